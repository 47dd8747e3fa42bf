"""The doctor's report."""

from jcb import doctor
from jcb.checkpoint.errors import ModelLoadError


def test_report_names_versions_devices_kernels_and_model(capsys):
    doctor.run()
    out = capsys.readouterr().out
    for word in ("jax ", "cpu:0", "paged_attention", "not tpu:", "GiB", "cache", "SHA-256"):
        assert word in out, word


def test_a_missing_model_is_a_problem_and_a_status(monkeypatch, capsys):
    def missing():
        raise ModelLoadError("default model", "install it")

    monkeypatch.setattr("jcb.checkpoint.default_model.default_model_path", missing)
    assert doctor.run() == 1
    assert "problem: " in (out := capsys.readouterr().out)
    assert "install it" in out
    assert "all well" not in out


def test_an_nvidia_driver_without_a_plugin_is_a_problem(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: "nvidia-smi")
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    problems = []
    assert list(doctor.devices(problems))
    assert ".[gpu]" in problems[0]


def test_a_broken_jax_does_not_stop_the_report(monkeypatch, capsys):
    def broken(*args):
        raise RuntimeError("no driver")

    monkeypatch.setattr("jax.devices", broken)
    assert doctor.run() == 1
    assert "JAX cannot start: no driver" in capsys.readouterr().out


def test_a_cache_folder_others_can_write_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "jcb").mkdir(mode=0o700)
    assert "chmod" not in dict(doctor.folders())["cache"]
    (tmp_path / "jcb").chmod(0o777)
    assert "chmod 700" in dict(doctor.folders())["cache"]

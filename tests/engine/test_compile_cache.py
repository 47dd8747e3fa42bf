"""The folder of compiled programs: ours alone, or a refusal that says what to do."""

import pytest

from jcb.engine.compile_cache import use_compile_cache


def test_off_is_no_folder():
    assert use_compile_cache("") == ""


def test_a_folder_that_cannot_be_made_is_a_refusal_with_advice(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be made .*--set engine.compile_cache=FOLDER"):
        use_compile_cache(str(tmp_path / "file" / "xla"))


def test_a_folder_that_others_can_read_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match="mode 0700"):
        use_compile_cache(str(tmp_path))

"""The folder of compiled programs: ours alone, or a refusal that says what to do."""

import subprocess
import sys

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


PROGRAM = """
import sys, warnings
warnings.simplefilter("ignore")
import jax, jax.numpy as jnp
from jcb.engine.compile_cache import use_compile_cache
use_compile_cache(sys.argv[1])
print(float(jax.jit(lambda x: (jnp.tanh(x) @ x.T).sum())(jnp.arange(64.0).reshape(8, 8))))
"""


def test_a_damaged_entry_is_compiled_anew(tmp_path):
    """What a killed server left half written, or the disk has changed, is never run."""
    folder = tmp_path / "xla"

    def answer() -> str:
        done = subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, check=True)
        return done.stdout

    right = answer()
    entries = sorted(path for path in folder.iterdir() if path.name.endswith("-cache"))
    assert entries
    for damage in (lambda b: b[: len(b) // 2], lambda b: b[:-40] + bytes([b[-40] ^ 1]) + b[-39:], lambda b: b""):
        for entry in entries:
            entry.write_bytes(damage(entry.read_bytes()))
        assert answer() == right

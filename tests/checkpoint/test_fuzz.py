"""Damaged model files give a ModelLoadError or load; never anything else, and never a large allocation."""

import random
import struct
import tracemalloc

import pytest

from jcb.checkpoint.errors import ModelLoadError
from jcb.checkpoint.reader import open_checkpoint
from tests.checkpoint.tiny_model import weights, write_tiny_gguf, write_tiny_hf

ROUNDS = 1_500
MEMORY_LIMIT = 64 * 1024 * 1024
INTERESTING = (
    0,
    1,
    2,
    0x7F,
    0x80,
    0xFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    1 << 32,
    (1 << 63) - 1,
    (1 << 64) - 1,
)


def mutate(rng: random.Random, raw: bytes, header: int) -> bytes:
    """One to three changes: a bit, a byte, a 64-bit number, a cut, a repeat; mostly within the header."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(header if rng.random() < 0.9 else len(data)) % max(len(data) - 8, 1)
        match rng.randrange(6):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                struct.pack_into("<Q", data, at, rng.choice(INTERESTING))
            case 3:
                struct.pack_into("<I", data, at, rng.choice(INTERESTING) & 0xFFFFFFFF)
            case 4:
                del data[at : at + rng.randint(1, 64)]
            case 5:
                data[at:at] = data[at : at + rng.randint(1, 64)]
    return bytes(data[: rng.randrange(len(data))]) if rng.random() < 0.1 else bytes(data)


def load(path) -> ModelLoadError | None:
    """Open and read everything; the error when it does not load."""
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.names():
            checkpoint.read(name)
    except ModelLoadError as error:
        return error
    return None


def survive(raw: bytes, header: int, path, *, seed: int, rounds: int) -> int:
    """How many of `rounds` damaged copies of `raw`, written to `path`, still load."""
    rng = random.Random(seed)
    loaded = 0
    for _ in range(rounds):
        path.write_bytes(mutate(rng, raw, header))
        error = load(path.parent if path.suffix == ".safetensors" else path)
        assert error is None or (error.name and error.reason)
        loaded += error is None
    return loaded


@pytest.fixture
def bounded_memory():
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MEMORY_LIMIT


@pytest.fixture
def gguf_model(tmp_path):
    """(path, content, length of the header)."""
    path = write_tiny_gguf(tmp_path / "t.gguf")
    raw = path.read_bytes()
    return path, raw, len(raw) - sum(value.nbytes for value in weights().values())


@pytest.fixture
def safetensors_model(tmp_path):
    """(path, content, length of the header)."""
    path = write_tiny_hf(tmp_path / "hf") / "model.safetensors"
    raw = path.read_bytes()
    return path, raw, 8 + struct.unpack("<Q", raw[:8])[0]


def test_damaged_gguf_files(gguf_model):
    path, raw, header = gguf_model
    assert 0 < survive(raw, header, path, seed=0, rounds=ROUNDS) < ROUNDS


def test_damaged_safetensors_files(safetensors_model):
    path, raw, header = safetensors_model
    assert survive(raw, header, path, seed=1, rounds=ROUNDS) < ROUNDS


def test_damaged_gguf_files_take_little_memory(gguf_model, bounded_memory):
    path, raw, header = gguf_model
    assert survive(raw, header, path, seed=2, rounds=200) < 200


def test_damaged_safetensors_files_take_little_memory(safetensors_model, bounded_memory):
    path, raw, header = safetensors_model
    assert survive(raw, header, path, seed=3, rounds=200) < 200

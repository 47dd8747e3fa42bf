"""Lowered steps kept in files: used when they are ours and whole, made anew when not; programs are the same."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcb.steps.lowered import LoweredCache

pytest.importorskip("flatbuffers")

TREE = {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}
STATE = (jax.ShapeDtypeStruct((3, 4), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32))
PACKED = jax.ShapeDtypeStruct((4,), jnp.int32)


class Step:
    """A step that counts how often it is traced."""

    __name__ = "decode_step"

    def __init__(self, factor: float = 2.0) -> None:
        self.traced = 0
        self.factor = factor

    def __call__(self, params, state, packed):
        self.traced += 1
        pages, last = state
        return (pages + params["w"][None, :], last + packed[0]), packed.astype(jnp.float32) * self.factor


@pytest.fixture(autouse=True)
def _nothing_refused(monkeypatch):
    """Whatever kernels other tests of this process were refused."""
    monkeypatch.setattr("pallas_kernels.dispatch.some_refused", lambda: False)


@pytest.fixture
def packages(tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "code.py").write_text("x = 1\n")
    return (folder,)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "lowered"
    made.mkdir(mode=0o700)
    return made


def lower(folder, packages, facts="facts", arguments=(TREE, STATE, PACKED)):
    step = Step()
    return LoweredCache(folder, packages).lower(facts, step, arguments), step.traced


def run(lowered):
    pages, last, packed = jnp.ones((3, 4)), jnp.array([5, 6], jnp.int32), np.arange(4, dtype=np.int32)
    return lowered.compile()({"w": jnp.arange(4.0)}, (pages, last), packed)


def test_a_second_start_traces_nothing_and_gets_the_same_program(folder, packages):
    first, traced = lower(folder, packages)
    assert traced == 1
    second, traced = lower(folder, packages)
    assert traced == 0
    assert first.as_text() == second.as_text()
    (pages, last), out = run(second)
    np.testing.assert_array_equal(pages, 1.0 + np.arange(4.0)[None, :].repeat(3, 0))
    np.testing.assert_array_equal(last, [5, 6])
    np.testing.assert_array_equal(out, [0.0, 2.0, 4.0, 6.0])


def test_the_state_is_donated_as_without_the_cache(folder, packages):
    kept, _ = lower(folder, packages)
    plain = jax.jit(Step(), donate_argnums=1).lower(TREE, STATE, PACKED)
    sizes = [each.compile().memory_analysis().alias_size_in_bytes for each in (kept, plain)]
    assert sizes[0] == sizes[1] > 0


def test_files_are_for_this_user_only(folder, packages):
    lower(folder, packages)
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("change", ["facts", "shapes", "sources"])
def test_whatever_a_program_depends_on_makes_another_file(folder, packages, change):
    lower(folder, packages)
    facts, arguments = "facts", (TREE, STATE, PACKED)
    if change == "facts":
        facts = "others"
    elif change == "shapes":
        arguments = (TREE, STATE, jax.ShapeDtypeStruct((5,), jnp.int32))
    else:
        (packages[0] / "code.py").write_text("x = 2\n")
    _, traced = lower(folder, packages, facts, arguments)
    assert traced == 1
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "foreign", "empty"])
def test_a_damaged_or_foreign_file_is_made_anew_with_a_log_line(folder, packages, damage, caplog):
    lower(folder, packages)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    if damage == "foreign":
        lower(folder, packages, "others")
        (other,) = set(folder.iterdir()) - {file}
        file.write_bytes(other.read_bytes())
    else:
        bad = {"cut": whole[:-1], "flipped": whole[:-1] + bytes([whole[-1] ^ 1]), "empty": b""}
        file.write_bytes(bad[damage])
    with caplog.at_level(logging.WARNING):
        lowered, traced = lower(folder, packages)
    assert traced == 1
    assert "is damaged; it is made anew" in caplog.text
    assert len(file.read_bytes()) == len(whole)
    np.testing.assert_array_equal(run(lowered)[1], [0.0, 2.0, 4.0, 6.0])


def test_nothing_is_kept_where_a_kernel_was_refused(folder, packages, monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.some_refused", lambda: True)
    assert lower(folder, packages)[1] == 1
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_costs_only_a_log_line(tmp_path, packages, caplog):
    with caplog.at_level(logging.WARNING):
        lowered, _ = lower(tmp_path / "missing", packages)
    assert "cannot be written" in caplog.text
    np.testing.assert_array_equal(run(lowered)[1], [0.0, 2.0, 4.0, 6.0])


def test_it_lies_inside_the_compile_cache_for_this_user_only(tmp_path):
    assert LoweredCache.beside("") is None
    assert LoweredCache.beside(str(tmp_path)) is not None
    assert (tmp_path / "lowered").stat().st_mode & 0o777 == 0o700

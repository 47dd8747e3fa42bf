"""Tile sizes as data: what tuned.json says is what a kernel uses, and it survives being written."""

import json
from dataclasses import fields
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.layout import KVLayout
from pallas_kernels.paged_attention import paged_attention, tpu, xla
from pallas_kernels.paged_attention.cases import BENCH, CASES, make

SHAPE = tuning.ShapeClass.of(CASES[0].layout("cpu"), 9, "float32", "decode")


def entry(device="cpu", blocks=None, microseconds=1.0):
    return tuning.Entry(device, "xla", SHAPE, blocks or {"rows": 2, "block_kv": 16}, microseconds, 2.0, "today")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "paged_attention").mkdir()
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning.load.cache_clear()
    yield tmp_path / "paged_attention"
    tuning.load.cache_clear()


def test_the_entry_for_the_device_and_shape_at_hand_is_used(folder, monkeypatch):
    case, used = CASES[0], []
    real = xla.DecodeBlocks
    monkeypatch.setattr(xla, "DecodeBlocks", lambda **blocks: used.append(blocks) or real(**blocks))
    (folder / "tuned.json").write_text(tuning.dump((entry(device="other", blocks={"rows": 16}), entry())))
    got = paged_attention(*make(case, "cpu"), layout=case.layout("cpu"), implementation="xla")
    assert used == [{"rows": 2, "block_kv": 16}]
    want = paged_attention(*make(case, "cpu"), layout=case.layout("cpu"), implementation="reference")
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_nothing_tuned_means_the_defaults(folder):
    assert tuning.tuned_blocks("paged_attention", "xla", "cpu", SHAPE) is None


def test_entries_survive_writing_and_newer_ones_replace_older(folder):
    old, new = (entry(), entry(device="other")), (entry(microseconds=0.5),)
    merged = tuning.merge(old, new)
    (folder / "tuned.json").write_text(tuning.dump(merged))
    assert tuning.load("paged_attention") == (entry(microseconds=0.5), entry(device="other"))


def test_the_device_of_the_current_mesh_decides():
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), (jax.sharding.AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert tuning.device_kind("tpu") == "TPU v5 lite"
    assert tuning.device_kind("cpu") == jax.devices()[0].device_kind


def test_shipped_files_can_be_read_and_name_real_block_fields():
    for shipped in tuning.load("paged_attention"):
        backend = import_module(f"pallas_kernels.paged_attention.{shipped.implementation}")
        layout = KVLayout(shipped.implementation, "bfloat16", 8, 128, 128)
        assert set(shipped.blocks) == {f.name for f in fields(backend.default_blocks(layout, 32, shipped.shape.phase))}
    json.loads((tuning.FOLDER / "paged_attention" / "tuned.json").read_text())


@pytest.mark.parametrize("case", BENCH, ids=lambda case: case.name)
@pytest.mark.parametrize("phase", ["decode", "chunk"])
def test_tpu_candidates_and_defaults_are_legal(case, phase):
    layout = KVLayout("tpu", "bfloat16", case.kv_heads, case.head_dim, 128)
    for blocks in (*tpu.candidates(layout, case.num_heads, phase), tpu.default_blocks(layout, case.num_heads, phase)):
        assert blocks.block_kv % layout.page_size == 0
        assert blocks.block_kv % blocks.compute_kv == 0
        assert (blocks.block_q == 1) == (phase == "decode")


def test_block_sizes_never_change_what_xla_computes():
    case = next(case for case in CASES if case.name == "mixed")
    arrays, layout = make(case, "cpu"), case.layout("cpu")
    want = paged_attention(*arrays, layout=layout, implementation="reference")
    for one, many in zip(
        xla.candidates(layout, 9, "decode")[::5], xla.candidates(layout, 9, "chunk")[::4], strict=False
    ):
        got = jax.jit(
            lambda *a, one=one, many=many: xla.paged_attention(
                *a, layout=layout, scale=case.head_dim**-0.5, decode_blocks=one, chunk_blocks=many
            )
        )(*arrays)
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert jnp.isfinite(want).all()

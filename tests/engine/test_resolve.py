"""How weights are kept: what "auto" chooses, what is refused, and that every count of bytes follows."""

import dataclasses

import jax
import pytest

from jcb.checkpoint.reader import open_checkpoint
from jcb.config import CacheConfig, EngineConfig, SchedulerConfig, ServeConfig
from jcb.engine import resolve as module
from jcb.engine.build import load_engine
from jcb.engine.memory import Device
from jcb.engine.model_shape import model_shape
from jcb.engine.resolve import as_kept, page_bytes, resolve, weight_bytes
from jcb.models.specs import nbytes, param_specs
from jcb.simulate.shape import ModelShape
from jcb.steps.step import StepStatics
from pallas_kernels.native.build import NotBuiltError
from tests.checkpoint.tiny_model import write_tiny_gguf

pytest.importorskip("gguf")
CPU, TPU = Device("cpu", 1 << 34), Device("tpu", 1 << 34)


@pytest.fixture
def model(tmp_path):
    return model_shape(str(write_tiny_gguf(tmp_path / "tiny.gguf", quant="Q4_1")))


@pytest.fixture
def built(monkeypatch):
    monkeypatch.setattr(module, "find_library", lambda: "kernels.so")


def kept(model, device=CPU, devices=1, **settings) -> str:
    return resolve(ServeConfig(**{"dtype": "float32", **settings}), model, device, devices).weights


@pytest.mark.usefixtures("built")
def test_auto_keeps_what_the_file_has_where_that_is_fast(model):
    assert kept(model) == "as-shipped"
    assert kept(model, dtype="bfloat16") == "dense"
    assert kept(model, TPU) == "dense"
    assert kept(model, devices=2) == "dense"
    assert kept(model, weights="dense") == "dense"
    assert kept(dataclasses.replace(model, shipped=())) == "dense"
    assert kept(model, TPU, weights="as-shipped", dtype="bfloat16") == "as-shipped"  # asked for, so done


def test_auto_is_dense_without_the_kernels(model, monkeypatch):
    def missing():
        raise NotBuiltError("no compiler")

    monkeypatch.setattr(module, "find_library", missing)
    assert kept(model) == "dense"
    assert kept(model, weights="as-shipped") == "as-shipped"


def test_what_cannot_be_kept_is_refused(model):
    with pytest.raises(ValueError, match="cannot be split over 2 devices"):
        kept(model, devices=2, weights="as-shipped")
    with pytest.raises(ValueError, match="needs a GGUF file with tensors in Q4_0, Q4_1 or Q8_0"):
        kept(dataclasses.replace(model, shipped=()), weights="as-shipped")


@pytest.mark.usefixtures("built")
def test_activations_in_8_bits_need_weights_of_4_bits_that_stay_packed(model):
    config = ServeConfig(dtype="float32", activations="int8")
    assert as_kept(resolve(config, model, CPU, 1), model).activations == "int8"
    assert as_kept(resolve(ServeConfig(dtype="float32"), model, CPU, 1), model).activations == "full"
    with pytest.raises(
        ValueError, match=r"needs packed Q4_0 or Q4_1.*'dense' keeps none packed; use weights='as-shipped'"
    ):
        resolve(dataclasses.replace(config, weights="dense"), model, CPU, 1)
    eight_bits = dataclasses.replace(model, shipped=tuple((path, "q8_0") for path, _ in model.shipped))
    with pytest.raises(ValueError, match="'as-shipped' keeps q8_0; use activations='full'"):
        resolve(config, eight_bits, CPU, 1)


def test_keys_and_values_are_kept_in_the_models_dtype_or_in_their_own(model):
    def resolved(**settings):
        config = ServeConfig(dtype="float32", cache=CacheConfig(num_pages=9, **settings))
        return resolve(config, model, CPU, 1)

    plain, half = resolved(), resolved(kv_dtype="bfloat16")
    assert (plain.cache.kv_dtype, half.cache.kv_dtype) == ("float32", "bfloat16")
    assert page_bytes(plain, model, "cpu", 1) == 2 * page_bytes(half, model, "cpu", 1)
    assert weight_bytes(plain, model, 1) == weight_bytes(half, model, 1)
    assert StepStatics.of(half, model, "cpu").layout.dtype == "bfloat16"


@pytest.mark.usefixtures("built")
def test_bytes_follow(model):
    packed = resolve(ServeConfig(dtype="float32"), model, CPU, 1)
    dense = resolve(ServeConfig(dtype="float32", weights="dense"), model, CPU, 1)
    assert weight_bytes(dense, model, 1) == nbytes(param_specs(dataclasses.replace(model, shipped=())), "float32")
    assert weight_bytes(packed, model, 1) < weight_bytes(dense, model, 1) / 5
    shape = ModelShape.of(as_kept(packed, model))
    assert shape.step_bytes("float32") < ModelShape.of(as_kept(dense, model)).step_bytes("float32") / 5
    assert shape.parameters == ModelShape.of(as_kept(dense, model)).parameters


@pytest.mark.parametrize("weights", ["as-shipped", "dense"])
def test_the_engine_holds_what_it_reports(tmp_path, weights):
    path = write_tiny_gguf(tmp_path / "tiny.gguf", quant="Q8_0")
    config = ServeConfig(
        model=str(path),
        dtype="float32",
        weights=weights,
        cache=CacheConfig(num_pages=64, page_size=4),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32),
        engine=EngineConfig(compile_cache=""),
    )
    engine = load_engine(config)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.executor._params))
    assert engine.report["weights"] == held
    assert engine.report["weights_kept"] == weights
    matrices = [name for name in open_checkpoint(path).names() if "norm" not in name]
    stored = sum(open_checkpoint(path).nbytes(name) for name in matrices)
    assert (held - stored < 4096) == (weights == "as-shipped")

"""One model on 1 to 8 devices: the same answers, each device's part of the cache in place, nothing recompiled."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jcb.config import Limits, ModelConfig, SchedulerConfig
from jcb.engine.core import EngineCore
from jcb.engine.executor import DeviceExecutor
from jcb.models import llama
from jcb.models.params import partition_specs
from jcb.scheduler.scheduler import Scheduler
from jcb.sharding import Placement, interleave, tensor_parallel
from jcb.steps.registry import Registry
from jcb.steps.step import StepStatics
from jcb.types import Request, SamplingParams
from jcb.weights.load import load_params
from pallas_kernels.layout import KVLayout
from tests.random_model import RandomCheckpoint

MODEL = ModelConfig(
    architecture="qwen3", vocab_size=96, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=16,
    num_kv_heads=8, head_dim=8, max_position_embeddings=256, attention_bias=True, qk_norm=True,
)  # fmt: skip
SCHEDULER = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16)


def limits(model: ModelConfig) -> Limits:
    return Limits(page_size=4, num_pages=1025, max_model_len=64, vocab_size=model.vocab_size)


def executor(model: ModelConfig, placement: Placement) -> DeviceExecutor:
    statics = StepStatics(model, KVLayout("cpu", "float32", model.num_kv_heads, model.head_dim, 4))
    registry = Registry(statics, SCHEDULER, limits(model), "float32", placement)
    registry.compile_all()
    params = load_params(RandomCheckpoint(model), llama.param_specs(model), "float32", placement=placement)
    device = DeviceExecutor(registry, params, limits(model), SCHEDULER.max_num_seqs)
    device.warm_up()
    return device


def answers(device: DeviceExecutor, model: ModelConfig) -> dict[str, tuple[list[int], list[float]]]:
    rng = random.Random(0)
    engine = EngineCore(Scheduler(SCHEDULER, limits(model), enable_prefix_caching=True), device, overlap=True)
    found: dict[str, tuple[list[int], list[float]]] = {}
    for number in range(8):
        params = SamplingParams(
            temperature=0, logprobs=1, presence_penalty=rng.choice([0.0, 0.5]), prompt_logprobs=rng.choice([None, 1])
        )
        prompt = tuple(rng.randrange(model.vocab_size) for _ in range(rng.choice([1, 7, 30])))
        found[str(number)] = ([], [])
        engine.add(Request(request_id=str(number), prompt_token_ids=prompt, params=params, seed=1, max_tokens=12))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            found[output.request_id][0].extend(output.token_ids)
            found[output.request_id][1].extend(entry.logprob for entry in (*output.logprobs, *output.prompt_logprobs))
    return found


def test_greedy_answers_of_eight_devices_are_those_of_one():
    want = answers(executor(MODEL, Placement()), MODEL)
    assert len({tuple(tokens) for tokens, _ in want.values()}) == len(want)
    device = executor(MODEL, tensor_parallel(8, MODEL))
    pointer = device.cache_pointer
    got = answers(device, MODEL)
    assert device.guard.count == 0, "a split engine compiled after it was ready"
    assert device.cache_pointer == pointer
    cache = device._state.kv_pages.nbytes // 8
    for program in device.registry.programs.values():
        if program.name != "init":
            assert cache <= program.alias_bytes < 2 * cache, program.name
            assert program.temp_bytes < cache // 2, program.name
    for name, (tokens, logprobs) in want.items():
        assert got[name][0] == tokens, name
        np.testing.assert_allclose(got[name][1], logprobs, atol=2e-4)


def logits(model: ModelConfig, placement: Placement) -> np.ndarray:
    """Scores after each token of a prompt, of the whole vocabulary."""
    whole = StepStatics(model, KVLayout("cpu", "float32", model.num_kv_heads, model.head_dim, 4))
    statics, specs = whole.split(placement), llama.param_specs(model)
    params = load_params(RandomCheckpoint(model), specs, "float32", placement=placement)
    ids = np.array([3, 14, 15, 92, 65, 35], np.int32)
    batch = llama.Batch(
        token_ids=jnp.asarray(ids),
        positions=jnp.arange(6),
        page_table=jnp.asarray([[2, 1]]),
        kv_lens=jnp.asarray([6]),
        cu_q_lens=jnp.asarray([0, 6]),
        num_seqs=jnp.int32(1),
    )

    def run(params):
        kv_pages = statics.layout.init(model.num_layers, 3)
        hidden, _ = llama.forward(
            params, batch, kv_pages, config=statics.config, layout=statics.layout, axis=statics.axis
        )
        return llama.logits(params, hidden, statics.config, statics.axis)

    split = placement.wrap(run, (partition_specs(specs, placement),), PartitionSpec())
    return np.asarray(jax.jit(split)(params))


@pytest.mark.parametrize("change", [{}, {"vocab_size": 99, "tie_word_embeddings": True, "attention_bias": False}])
def test_logits_do_not_depend_on_the_number_of_devices(change):
    model = dataclasses.replace(MODEL, **change)
    want = logits(model, Placement())
    assert want.shape == (6, model.vocab_size)
    for count in (2, 4):
        np.testing.assert_allclose(logits(model, tensor_parallel(count, model)), want, atol=2e-4, rtol=1e-4)


def test_each_device_holds_its_share():
    placement = tensor_parallel(4, MODEL)
    params = load_params(RandomCheckpoint(MODEL), llama.param_specs(MODEL), "float32", placement=placement)
    whole = load_params(RandomCheckpoint(MODEL), llama.param_specs(MODEL), "float32")
    heads = MODEL.num_heads * MODEL.head_dim // 4
    kv = MODEL.num_kv_heads * MODEL.head_dim // 4
    full = np.asarray(whole["layers"]["w_qkv"])
    q, k, v = np.split(full, [heads * 4, heads * 4 + kv * 4], axis=1)
    for shard in params["layers"]["w_qkv"].addressable_shards:
        index = shard.index[1].start // (heads + 2 * kv)
        mine = [q[:, index * heads :][:, :heads], k[:, index * kv :][:, :kv], v[:, index * kv :][:, :kv]]
        np.testing.assert_array_equal(np.asarray(shard.data), np.concatenate(mine, axis=1))
    norms = params["layers"]["attention_norm"].addressable_shards
    assert len(norms) == 4
    assert all(shard.data.shape == (2, 32) for shard in norms)


def test_interleave_is_the_identity_for_one_device():
    parts = [np.arange(8).reshape(4, 2), 10 + np.arange(4).reshape(2, 2)]
    out = np.empty((6, 2), int)
    interleave(parts, 1, out)
    np.testing.assert_array_equal(out, np.concatenate(parts))
    interleave(parts, 2, out)
    np.testing.assert_array_equal(out[:, 0], [0, 2, 10, 4, 6, 12])


@pytest.mark.parametrize(
    ("change", "count", "message"),
    [
        ({"num_kv_heads": 4}, 8, r"tensor_parallel=8 does not divide num_kv_heads=4"),
        ({"num_heads": 24}, 16, r"tensor_parallel=16 needs 16 devices, there are 8"),
        ({"intermediate_size": 66}, 4, r"tensor_parallel=4 does not divide intermediate_size=66"),
        ({"num_heads": 9, "num_kv_heads": 3}, 2, r"tensor_parallel=2 does not divide num_heads=9"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_numbers(change, count, message):
    with pytest.raises(ValueError, match=message):
        tensor_parallel(count, dataclasses.replace(MODEL, **change))


def test_one_device_involves_no_mesh():
    placement = tensor_parallel(1, MODEL)
    assert placement.mesh is None
    assert placement.axis is None
    function = lambda x: x  # noqa: E731
    assert placement.wrap(function, None, None) is function
    assert isinstance(placement.put(np.zeros(3), None).sharding, jax.sharding.SingleDeviceSharding)

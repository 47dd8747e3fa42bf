"""The forward pass against a plain numpy model, and its pieces against their definitions."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jcb.checkpoint.reader import open_checkpoint
from jcb.config import ModelConfig
from jcb.models import layers, llama
from jcb.models.params import init
from pallas_kernels.layout import KVLayout
from tests.checkpoint.tiny_model import write_tiny_hf
from tests.random_model import RandomCheckpoint

TINY = ModelConfig(
    architecture="llama", vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=8, max_position_embeddings=64,
)  # fmt: skip


def numpy_forward(params, config: ModelConfig, ids: list[int]) -> np.ndarray:
    """Logits of every position, float64, no cache, no batching."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def norm(x, w):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * w

    n, dim = len(ids), config.head_dim
    angles = np.arange(n)[:, None] * config.rope_theta ** (-np.arange(0, dim, 2) / dim)[None]
    turn = np.exp(1j * angles)[:, None]

    def rotate(x):
        z = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * turn
        return np.concatenate([z.real, z.imag], -1)

    x = params["embedding"][ids]
    group = config.num_heads // config.num_kv_heads
    for i in range(config.num_layers):
        w = {name: array[i] for name, array in params["layers"].items()}
        qkv = norm(x, w["attention_norm"]) @ w["w_qkv"].T + w.get("b_qkv", 0.0)
        qkv = qkv.reshape(n, -1, dim)
        q, k, v = np.split(qkv, [config.num_heads, config.num_heads + config.num_kv_heads], axis=1)
        if config.qk_norm:
            q, k = norm(q, w["q_norm"]), norm(k, w["k_norm"])
        q, k = rotate(q), np.repeat(rotate(k), group, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        scores[:, ~np.tri(n, dtype=bool)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        heads = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), np.repeat(v, group, 1))
        x = x + heads.reshape(n, -1) @ w["w_out"].T + w.get("b_out", 0.0)
        gate, up = np.split(norm(x, w["mlp_norm"]) @ w["w_gate_up"].T, 2, -1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["w_down"].T
    return norm(x, params["final_norm"]) @ params.get("head", params["embedding"]).T


def run(params, config: ModelConfig, ids: list[int], chunks: list[int], implementation="auto") -> np.ndarray:
    """Logits of every position, through pages of 4, in chunks."""
    layout = KVLayout("cpu", "float32", config.num_kv_heads, config.head_dim, 4)
    pages = [5, 3, 8, 1, 7, 2, 6, 4]
    kv, out, start = layout.init(config.num_layers, 10), [], 0
    forward = jax.jit(partial(llama.forward, config=config, layout=layout, implementation=implementation))
    for count in chunks:
        positions = np.arange(start, start + count)
        batch = llama.Batch(
            token_ids=jnp.asarray(ids[start : start + count]),
            positions=jnp.asarray(positions),
            page_table=jnp.asarray([pages]),
            kv_lens=jnp.asarray([start + count]),
            cu_q_lens=jnp.asarray([0, count]),
            num_seqs=jnp.int32(1),
        )
        hidden, kv = forward(params, batch, kv)
        out.append(np.asarray(llama.logits(params, hidden, config)))
        start += count
    return np.concatenate(out)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_forward_equals_a_plain_numpy_model(tied, bias):
    config = dataclasses.replace(TINY, tie_word_embeddings=tied, attention_bias=bias)
    params = init(llama.param_specs(config), jnp.float32, seed=3)
    assert ("head" in params) != tied
    ids = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9]
    want = numpy_forward(params, config, ids)
    np.testing.assert_allclose(run(params, config, ids, [11]), want, atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(run(params, config, ids, [1, 4, 1, 5]), want, atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(run(params, config, ids, [3, 8], "reference"), want, atol=2e-5, rtol=2e-5)


def test_qwen3_norms_every_head_before_it_is_turned():
    """Norm weights that are not all one, so that leaving them out, or turning first, shows."""
    from jcb.weights.load import load_params

    config = dataclasses.replace(TINY, architecture="qwen3", qk_norm=True, rms_norm_eps=1e-6, head_dim=16)
    params = load_params(RandomCheckpoint(config), llama.param_specs(config), "float32")
    assert params["layers"]["q_norm"].shape == (3, 16)
    ids = [3, 14, 15, 9, 26, 5, 35, 8]
    want = numpy_forward(params, config, ids)
    np.testing.assert_allclose(run(params, config, ids, [8]), want, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(run(params, config, ids, [3, 1, 4]), want, atol=1e-4, rtol=1e-4)
    plain = dataclasses.replace(config, qk_norm=False)
    assert np.abs(want - numpy_forward(params, plain, ids)).max() > 0.1


def test_logits_depend_on_the_prompt(tmp_path):
    from jcb.weights.load import load_params

    checkpoint = open_checkpoint(write_tiny_hf(tmp_path / "tiny"))
    params = load_params(checkpoint, llama.param_specs(checkpoint.config), "float32")
    a, b = run(params, checkpoint.config, [5, 6, 7], [3]), run(params, checkpoint.config, [5, 9, 7], [3])
    assert np.abs(a[2] - b[2]).max() > 0.01
    np.testing.assert_allclose(a, numpy_forward(params, checkpoint.config, [5, 6, 7]), atol=1e-4, rtol=1e-4)


def test_rope_scaling_types():
    plain = layers.rope_frequencies(8, 10_000.0, None)
    np.testing.assert_allclose(layers.rope_frequencies(8, 10_000.0, {"rope_type": "linear", "factor": 4.0}), plain / 4)
    llama3 = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    scaled = layers.rope_frequencies(128, 500_000.0, llama3)
    plain = layers.rope_frequencies(128, 500_000.0, None)
    wavelength = 2 * np.pi / plain
    np.testing.assert_allclose(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4], rtol=1e-6)
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-6)
    assert np.all((scaled <= plain * 1.000001) & (scaled >= plain / 8.000001))
    factors = {"rope_type": "frequency_factors", "factors": list(plain / scaled)}
    np.testing.assert_allclose(layers.rope_frequencies(128, 500_000.0, factors), scaled, rtol=1e-6)
    with pytest.raises(ValueError, match="yarn"):
        layers.rope_frequencies(8, 10_000.0, {"rope_type": "yarn", "factor": 4.0})


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope", "su"])
def test_b159_rope_scalings_that_depend_on_the_request_are_refused(kind):
    """B159: dynamic scaling was applied wrongly; what is not implemented must not load."""
    with pytest.raises(ValueError, match=kind):
        layers.rope_frequencies(64, 10_000.0, {"rope_type": kind, "factor": 2.0})


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_b155_one_two_or_three_kv_heads(kv_heads):
    """B155: 0 cache entries or a crash for multi-query attention."""
    config = dataclasses.replace(TINY, num_heads=6, num_kv_heads=kv_heads)
    params = init(llama.param_specs(config), jnp.float32, seed=1)
    ids = [3, 14, 15, 9, 26]
    np.testing.assert_allclose(
        run(params, config, ids, [2, 3]), numpy_forward(params, config, ids), atol=2e-5, rtol=2e-5
    )

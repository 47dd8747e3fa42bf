"""Every backend of quantized_dot against numpy on the numbers that the gguf package reads from the same bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import native
from pallas_kernels.native import INSTRUCTION_SETS
from pallas_kernels.packed import FORMATS, FOUR_BIT_FORMATS, PackedShape, pack
from pallas_kernels.quantized_dot import PackedWeights, dequantise, quantized_dot, take_rows
from pallas_kernels.quantized_dot.cases import CASES, Case, make
from pallas_kernels.quantized_dot.cpu import quantized_dot as quantized_dot_cpu
from pallas_kernels.quantized_dot.rounding import round_int8

CPU = pytest.param("cpu", marks=pytest.mark.skipif(not native.available(), reason=native.why_not()))
BACKENDS = ["reference", "xla", CPU]
HEADER = {"q4_0": 2, "q4_1": 4, "q8_0": 2}


def from_file(format: str, raw: np.ndarray) -> tuple[PackedWeights, np.ndarray]:
    """Packed weights of one layer from GGUF bytes u8[out, row bytes], and what the gguf package makes of them."""
    gguf = pytest.importorskip("gguf")
    want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[format.upper()])
    blocks = raw.reshape(len(raw), want.shape[1] // 32, -1)
    halves = blocks[..., : HEADER[format]].copy().view(np.float16)
    shape = PackedShape(format, 1, *want.shape)
    arrays = shape.empty()
    codes = blocks[..., HEADER[format] :]
    pack(arrays["codes"][0], codes.view(np.int8) if format == "q8_0" else codes, 0)
    pack(arrays["scales"][0], halves[..., 0], 0)
    if format == "q4_1":
        pack(arrays["mins"][0], halves[..., 1], 0)
    arrays = {name: jnp.asarray(array) for name, array in arrays.items()}
    return PackedWeights(**arrays, format=format, out=len(raw)), want


def stored(format: str, out: int, inner: int, seed: int = 0) -> np.ndarray:
    """GGUF bytes of random weights."""
    gguf = pytest.importorskip("gguf")
    weight = np.random.default_rng(seed).standard_normal((out, inner)).astype(np.float32)
    return gguf.quants.quantize(weight, gguf.GGMLQuantizationType[format.upper()])


def error(got: jax.Array, x: np.ndarray, weights: np.ndarray) -> float:
    """Largest difference to the float64 product, in units of float32's rounding of the sum of absolute products."""
    x, weights = x.astype(np.float64), weights.astype(np.float64)
    size = np.abs(x) @ np.abs(weights).T + np.finfo(np.float32).tiny
    return float(np.max(np.abs(np.asarray(got) - x @ weights.T) / size) / np.finfo(np.float32).eps)


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_the_product_with_the_widened_weights(case, implementation):
    x, packed = make(case)
    got = quantized_dot(x, packed, case.layer, implementation=implementation)
    assert got.shape == (case.rows, case.out)
    assert got.dtype == jnp.float32
    weights = np.asarray(dequantise(packed, case.layer))
    assert error(got, np.asarray(x.astype(jnp.float32)), weights) < 2 * case.inner**0.5
    other = quantized_dot(x, packed, 1 - case.layer, implementation=implementation)
    assert np.abs(np.asarray(got - other)).max() > 1e-3  # the layer counts


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_with_x_in_8_bits(case, implementation):
    """The product of x as `round_int8` has it, as near as any float32 sum; weights of 8 bits meet x as it is."""
    x, packed = make(case)
    got = quantized_dot(x, packed, case.layer, activations="int8", implementation=implementation)
    full = quantized_dot(x, packed, case.layer, implementation=implementation)
    if case.format not in FOUR_BIT_FORMATS:
        np.testing.assert_array_equal(got, full)
        return
    weights = np.asarray(dequantise(packed, case.layer))
    assert error(got, np.asarray(round_int8(x)), weights) < 2 * case.inner**0.5
    assert np.abs(np.asarray(got - full)).max() > 1e-4  # x was rounded


def test_rounding_to_8_bits_is_near_and_keeps_what_has_no_size():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((40, 96)) * np.logspace(-20, 20, 40)[:, None], jnp.float32)
    largest = np.abs(np.asarray(x)).reshape(40, 3, 32).max(axis=-1)
    step = np.repeat(largest / 127, 32, axis=1)
    got = np.asarray(round_int8(x))
    assert (np.abs(got - np.asarray(x)) <= step * (0.5 + 1e-4)).all()
    assert np.abs(got - np.asarray(x)).max() > 0
    np.testing.assert_allclose(np.abs(got).reshape(40, 3, 32).max(axis=-1), largest, rtol=1e-6)
    assert not np.asarray(round_int8(jnp.zeros((2, 64)))).any()
    assert not np.asarray(round_int8(jnp.full((1, 32), 1e-33))).any()


@pytest.mark.parametrize("format", HEADER)
def test_weights_are_exactly_those_of_the_file(format):
    packed, want = from_file(format, stored(format, 45, 96))
    np.testing.assert_array_equal(dequantise(packed, 0), want)
    ids = jnp.asarray([44, 0, 16, 15, 16])
    np.testing.assert_array_equal(take_rows(packed, 0, ids), want[np.asarray(ids)])


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("format", HEADER)
@pytest.mark.parametrize("rows", [1, 11])
def test_one_hot_rows_read_single_weights_exactly(format, implementation, rows):
    """No sum, no rounding: the kernel's own widening, weight for weight, the smallest scales included."""
    raw = stored(format, 33, 64).copy()
    tiny = np.asarray([2**-24, 2**-15, 60000.0], np.float16).view(np.uint8).reshape(3, 2)
    raw[:3, :2] = tiny  # below the normal float16, and near the largest
    packed, want = from_file(format, raw)
    for start in range(0, 64, 16):
        x = jnp.eye(64)[start : start + rows]
        got = quantized_dot(x, packed, implementation=implementation)
        np.testing.assert_array_equal(got, want.T[start : start + rows])


@pytest.mark.skipif(not native.available(), reason=native.why_not())
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("format", FORMATS)
def test_instruction_sets_agree(format, instruction_set):
    """The best at most: where the processor lacks one, the next is checked twice. Widening is exact, sums are near."""
    for rows in (1, 2, 4, 8, 9, 14):
        x, packed = make(Case("isa", rows, 45, 288, format=format))
        weights, scalars = np.asarray(dequantise(packed, 1)), (jnp.int32(1), jnp.int32(rows))
        got = quantized_dot_cpu(x, packed, *scalars, instruction_set=instruction_set)
        assert error(got, np.asarray(x), weights) < 2 * 288**0.5
        hot = quantized_dot_cpu(jnp.eye(288)[:rows], packed, *scalars, instruction_set=instruction_set)
        np.testing.assert_array_equal(hot, weights.T[:rows])
        if format in FOUR_BIT_FORMATS:
            got = quantized_dot_cpu(x, packed, *scalars, rounds=True, instruction_set=instruction_set)
            assert error(got, np.asarray(round_int8(x)), weights) < 2 * 288**0.5
    with pytest.raises(ValueError, match="sse9"):
        quantized_dot_cpu(x, packed, *scalars, instruction_set="sse9")


@pytest.mark.parametrize("activations", ["full", "int8"])
@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("rows", [3, 20])
def test_nan_and_infinity_stay_in_their_row(implementation, rows, activations):
    case = Case("special", rows, 48, 96)
    x, packed = make(case)
    x = x.at[0, 40].set(jnp.nan).at[1, 7].set(jnp.inf)
    got = np.asarray(quantized_dot(x, packed, 1, activations=activations, implementation=implementation))
    want = np.asarray(quantized_dot(x, packed, 1, activations=activations, implementation="reference"))
    assert np.isnan(got[0]).all()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got[1], want[1])
    assert np.isfinite(got[2:]).all()


@pytest.mark.parametrize("activations", ["full", "int8"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_does_not_depend_on_the_others(format, activations):
    if not native.available():
        pytest.skip(native.why_not())
    how = {"activations": activations, "implementation": "cpu"}
    x, packed = make(Case("rows", 50, 80, 1056, format=format))
    whole = np.asarray(quantized_dot(x, packed, 1, **how))
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 32):
        got = quantized_dot(x[50 - rows :], packed, 1, **how)
        np.testing.assert_array_equal(got, whole[50 - rows :], err_msg=f"{rows} rows")


@pytest.mark.parametrize("activations", ["full", "int8"])
@pytest.mark.parametrize("implementation", BACKENDS)
def test_padding_changes_no_row_that_counts(implementation, activations):
    how = {"activations": activations, "implementation": implementation}
    x, packed = make(Case("padded", 21, 80, 96))
    whole = np.asarray(quantized_dot(x, packed, 1, **how))
    for live in (0, 1, 3, 8, 9, 20, 21, 99):
        got = np.asarray(quantized_dot(x, packed, 1, live=live, **how))
        np.testing.assert_array_equal(got[:live], whole[:live], err_msg=f"{live} rows")
        assert np.isfinite(got).all()
        if implementation == "cpu":
            assert not got[live:].any()


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 40),
    out=st.integers(1, 70),
    blocks=st.integers(1, 20),
    format=st.sampled_from(FORMATS),
    activations=st.sampled_from(["full", "int8"]),
    seed=st.integers(0, 99),
)
def test_any_shape(rows, out, blocks, format, activations, seed):
    if not native.available():
        pytest.skip(native.why_not())
    case = Case("any", rows, out, 32 * blocks, format=format, layers=1, layer=0)
    x, packed = make(case, seed)
    got = quantized_dot(x, packed, activations=activations, implementation="cpu")
    if activations == "int8" and format in FOUR_BIT_FORMATS:
        x = round_int8(x)
    assert error(got, np.asarray(x), np.asarray(dequantise(packed, 0))) < 2 * case.inner**0.5


def test_parts_packed_one_after_the_other_are_one_matrix():
    """q, k and v go into one matrix; their heights need not be whole groups."""
    raw = stored("q4_1", 53, 64)
    want = np.asarray(dequantise(from_file("q4_1", raw)[0], 0))
    shape = PackedShape("q4_1", 1, 53, 64)
    arrays, start = shape.empty(), 0
    for count in (16, 5, 30, 2):
        blocks = raw[start : start + count].reshape(count, 2, 20)
        halves = blocks[..., :4].copy().view(np.float16)
        pack(arrays["codes"][0], blocks[..., 4:], start)
        pack(arrays["scales"][0], halves[..., 0], start)
        pack(arrays["mins"][0], halves[..., 1], start)
        start += count
    packed = PackedWeights(**{k: jnp.asarray(a) for k, a in arrays.items()}, format="q4_1", out=53)
    np.testing.assert_array_equal(dequantise(packed, 0), want)
    assert shape.nbytes == sum(array.nbytes for array in arrays.values())


@pytest.mark.skipif(not native.available(), reason=native.why_not())
def test_nothing_is_copied_in_a_scan_over_layers():
    case = Case("scan", 4, 256, 256, layers=6)
    x, packed = make(case)

    def run(x, packed):
        return jax.lax.scan(
            lambda x, layer: (quantized_dot(x, packed, layer, implementation="cpu"), None), x, jnp.arange(6)
        )[0]

    compiled = jax.jit(run).lower(x, packed).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < packed.codes.nbytes / 6
    want = x
    for layer in range(6):
        want = quantized_dot(want, packed, layer, implementation="cpu")
    np.testing.assert_array_equal(compiled(x, packed), want)


@pytest.mark.skipif(not native.available(), reason=native.why_not())
def test_a_layer_that_is_not_there_is_an_error():
    x, packed = make(CASES[0])
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="layer 2 of 2"):
        quantized_dot(x, packed, 2, implementation="cpu").block_until_ready()


def test_without_the_library_xla_does_it_and_says_so_once(monkeypatch, caplog):
    from pallas_kernels import dispatch

    def refuse():
        raise NotImplementedError("the C++ kernels are not built")

    monkeypatch.setattr(native, "register", refuse)
    monkeypatch.setattr(native, "why_not", lambda: "the C++ kernels are not built")
    dispatch._say_refused.cache_clear()
    x, packed = make(CASES[1])
    with caplog.at_level("WARNING"):
        for _ in range(2):
            got = quantized_dot(x, packed, 1, platform="cpu")
    assert [r.message for r in caplog.records if "quantized_dot" in r.message] in (
        ["quantized_dot: the cpu kernel is not used: the C++ kernels are not built"],
        [],  # where dispatch does not even try it
    )
    np.testing.assert_array_equal(got, quantized_dot(x, packed, 1, implementation="xla"))
    with pytest.raises(NotImplementedError, match="not built"):
        quantized_dot(x, packed, 1, implementation="cpu")


def test_bad_shapes_are_refused():
    x, packed = make(CASES[0])
    with pytest.raises(ValueError, match=r"x must be \[T, 64\]"):
        quantized_dot(x[:, :32], packed)
    with pytest.raises(ValueError, match="activations='int4' is not one of full, int8"):
        quantized_dot(x, packed, activations="int4")
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        quantized_dot(x.astype(jnp.float16), packed)
    with pytest.raises(ValueError, match="scales of"):
        quantized_dot(x, dataclasses.replace(packed, scales=packed.scales[:, :, :1]))
    with pytest.raises(ValueError, match="q5_0"):
        quantized_dot(x, dataclasses.replace(packed, format="q5_0"))

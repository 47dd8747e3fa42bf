"""Counting a program's traffic, on text small enough to count by hand, and against a program of this machine."""

import jax
import jax.numpy as jnp
import pytest

from jcb.aot import traffic
from jcb.aot.hlo import Shape, parse

PROGRAM = """HloModule jit_step, is_scheduled=true

%slice_and_add (p0: f32[3,8,128], p1: s32[], p2: f32[8,128]) -> f32[8,128] {
  %p0 = f32[3,8,128]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[8,128]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %dynamic-slice.1 = f32[1,8,128]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,8,128}
  %bitcast.1 = f32[8,128]{1,0} bitcast(%dynamic-slice.1)
  ROOT %add.1 = f32[8,128]{1,0} add(%bitcast.1, %p2)
}

%update (q0: f32[100,8], q1: f32[1,8], q2: s32[]) -> f32[100,8] {
  %q0 = f32[100,8]{1,0} parameter(0)
  %q1 = f32[1,8]{1,0} parameter(1)
  %q2 = s32[] parameter(2)
  ROOT %dynamic-update-slice.1 = f32[100,8]{1,0} dynamic-update-slice(%q0, %q1, %q2, %q2)
}

%body (arg: (s32[], f32[8,128], f32[3,8,128])) -> (s32[], f32[8,128], f32[3,8,128]) {
  %arg = (s32[], f32[8,128]{1,0}, /*index=2*/f32[3,8,128]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f32[8,128]{1,0} get-tuple-element(%arg), index=1
  %w = f32[3,8,128]{2,1,0} get-tuple-element(%arg), index=2
  %fusion.1 = f32[8,128]{1,0} fusion(%w, %i, %x), kind=kLoop, calls=%slice_and_add
  ROOT %tuple.1 = (s32[], f32[8,128]{1,0}, f32[3,8,128]{2,1,0}) tuple(%i, %fusion.1, %w)
}

%condition (arg.1: (s32[], f32[8,128], f32[3,8,128])) -> pred[] {
  %arg.1 = (s32[], f32[8,128]{1,0}, f32[3,8,128]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  %length = s32[] constant(3)
  ROOT %lt = pred[] compare(%i.1, %length), direction=LT
}

%cheap (c0: f32[8,128]) -> f32[8,128] {
  ROOT %c0 = f32[8,128]{1,0} parameter(0)
}

%dear (d0: f32[8,128]) -> f32[8,128] {
  %d0 = f32[8,128]{1,0} parameter(0)
  ROOT %negate.1 = f32[8,128]{1,0} negate(%d0)
}

ENTRY %main (a: f32[8,128], b: f32[3,8,128], c: f32[100,8], d: f32[1,8], e: bf16[8,5]) -> f32[8,128] {
  %a = f32[8,128]{1,0} parameter(0)
  %b = f32[3,8,128]{2,1,0} parameter(1)
  %c = f32[100,8]{1,0} parameter(2)
  %d = f32[1,8]{1,0} parameter(3)
  %e = bf16[8,5]{1,0:T(8,128)(2,1)} parameter(4)
  %start = s32[] constant(0)
  %tuple.2 = (s32[], f32[8,128]{1,0}, f32[3,8,128]{2,1,0}) tuple(%start, %a, %b)
  %while.1 = (s32[], f32[8,128]{1,0}, f32[3,8,128]{2,1,0}) while(%tuple.2), condition=%condition, body=%body@NOTED@
  %y = f32[8,128]{1,0} get-tuple-element(%while.1), index=1
  %fusion.2 = f32[100,8]{1,0} fusion(%c, %d, %start), kind=kLoop, calls=%update
  %copy-start.1 = (f32[8,128]{1,0}, f32[8,128]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%y)
  %on_chip = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%copy-start.1)
  %dot.1 = f32[8,8]{1,0:S(1)} dot(%on_chip, %on_chip), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %conditional.1 = f32[8,128]{1,0} conditional(%start, %y, %y), branch_computations={%cheap, %dear}
  %kernel = f32[8,128]{1,0} custom-call(%b), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"cost_estimate":{"flops":"7","transcendentals":"0","bytes_accessed":"1000"}}}
  %copy.1 = bf16[8,5]{1,0:T(8,128)(2,1)} copy(%e)
  ROOT %gemm = (f32[8,128]{1,0}, s8[4096]{0}) custom-call(%y, %kernel), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"]}}}
}
"""  # noqa: E501 (as compilers write it)

TILE = 8 * 128 * 4
LOOP_TURN = (4 + 3 * TILE) + (4 + 4 + 1)  # body: the index, a slice of the stack, x, the result; then the comparison
PADDED_COPY = 2 * 8 * 128 * 2
UPDATE = 2 * 8 * 4 + 4
WANT = 3 * LOOP_TURN + UPDATE + TILE + 1000 + PADDED_COPY + 3 * TILE


@pytest.mark.parametrize("noted", ["", ', backend_config={"known_trip_count":{"n":"3"}}'])
def test_every_rule_counts_as_by_hand(noted):
    moved = traffic.count(PROGRAM.replace("@NOTED@", noted))
    assert moved.nbytes == WANT
    assert moved.flops == 2 * 8 * 8 * 128 + 7 + 2 * 8 * 128 * 8
    assert moved.unknown_loops == 0


def test_a_loop_of_unknown_length_counts_once_and_is_reported():
    text = PROGRAM.replace("@NOTED@", "").replace("%length = s32[] constant(3)", "%length = s32[] parameter(1)")
    moved = traffic.count(text)
    assert moved.unknown_loops == 1
    assert moved.nbytes == WANT - 2 * LOOP_TURN


def test_a_gpu_kernel_states_its_cost_in_escaped_json():
    stated = (
        r'backend_config={cost_estimate_json = "{\22flops\22: 7, \22transcendentals\22: 0, \22bytes_accessed\22: 90}"}'
    )
    text = PROGRAM.replace("@NOTED@", "")
    old = text[text.index('backend_config={"custom_call_config"') :].partition("\n")[0]
    assert traffic.count(text.replace(old, stated)).nbytes == WANT - 910


def test_attention_kernels_count_by_how_full_page_tables_are():
    text = PROGRAM.replace("@NOTED@", "").replace(
        'custom_call_target="tpu',
        'metadata={op_name="jit(step)/paged_attention_q1/pallas_call"}, custom_call_target="tpu',
    )
    moved = traffic.count(text)
    assert (moved.nbytes, moved.attention_bytes, moved.attention_flops) == (WANT, 1000, 7)
    assert moved.at(0.25).nbytes == WANT - 750
    assert moved.at(1.0) == moved
    assert traffic.count(PROGRAM.replace("@NOTED@", "")).attention_bytes == 0


def test_large_moves_finds_copies_and_transposes_by_size():
    text = PROGRAM.replace("@NOTED@", "")
    assert traffic.large_moves(text, 1024) == ["copy-start copy-start.1"]
    assert traffic.large_moves(text, 40) == ["copy-start copy-start.1", "copy copy.1"]
    assert traffic.large_moves(text, 1025) == []


def test_shapes_know_tiles_and_on_chip_memory():
    (shape,) = Shape.parse_all("bf16[30,1025,3,100,64]{4,3,2,1,0:T(8,128)(2,1)}")
    assert shape.nbytes == 30 * 1025 * 3 * 104 * 128 * 2
    assert Shape.parse_all("f32[4]{0:T(128)S(1)}")[0].nbytes == 0
    assert Shape.parse_all("f32[4]{0:S(5)}")[0].nbytes == 16
    assert [each.nbytes for each in Shape.parse_all("(pred[], s4[10]{0}, token[], f8e4m3fn[2,2])")] == [1, 5, 0, 4]


NESTED = """HloModule jit_head

%renamed (p: bf16[64,32]) -> bf16[64,32] {
  %p = bf16[64,32]{1,0} parameter(0)
  ROOT %bitcast = bf16[64,32]{1,0} bitcast(%p)
}

%product (w: bf16[64,32], x: bf16[8,32]) -> f32[8,64] {
  %w = bf16[64,32]{1,0} parameter(0)
  %x = bf16[8,32]{1,0} parameter(1)
  %fusion.1 = bf16[64,32]{1,0} fusion(%w), kind=kLoop, calls=%renamed
  ROOT %convolution.1 = f32[8,64]{1,0} convolution(%x, %fusion.1), dim_labels=bf_oi->bf
}

ENTRY %main (w.1: bf16[64,32], x.1: bf16[8,32]) -> f32[8,64] {
  %w.1 = bf16[64,32]{1,0} parameter(0)
  %x.1 = bf16[8,32]{1,0} parameter(1)
  ROOT %fusion.2 = f32[8,64]{1,0} fusion(%w.1, %x.1), kind=kOutput, calls=%product
}
"""


def test_a_nested_fusion_that_only_renames_does_not_hide_what_is_read():
    moved = traffic.count(NESTED)
    assert moved.nbytes == 2 * 64 * 32 + 2 * 8 * 32 + 4 * 8 * 64
    assert moved.flops == 2 * 8 * 64 * 32


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        parse("HloModule nothing\n")


def test_a_scanned_model_of_this_machine_counts_every_layer():
    """What XLA itself does not: twice the layers, twice the traffic and arithmetic."""

    def run(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    def counted(layers: int) -> traffic.Traffic:
        compiled = jax.jit(run).lower(jnp.zeros((layers, 256, 256)), jnp.zeros((8, 256))).compile()
        return traffic.count(compiled.as_text())

    four, eight = counted(4), counted(8)
    assert four.unknown_loops == 0
    assert four.flops == pytest.approx(2 * 4 * 8 * 256 * 256, rel=0.01)
    assert eight.flops == pytest.approx(2 * four.flops, rel=0.01)
    assert eight.nbytes == pytest.approx(2 * four.nbytes, rel=0.1)
    assert four.nbytes >= 4 * 256 * 256 * 4

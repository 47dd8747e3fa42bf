"""`make bench-steps`: floors counted by hand, plans that the engine accepts, the straight line, the table."""

from types import SimpleNamespace

import pytest

from jcb.bench import steps
from jcb.bench.exposed import seconds_of_steps
from jcb.bench.rows import Crowd, narrow_config
from jcb.bench.steps import Calibration, linear_fit, make_case, run_rounds
from jcb.config import CacheConfig, Limits, ModelConfig, ServeConfig
from jcb.steps.packer import Packer
from jcb.steps.shapes import Shapes
from tests.fake_model import fake_engine

LIMITS = Limits(page_size=4, num_pages=40, max_model_len=64, vocab_size=2000)
MODEL = ModelConfig(
    architecture="llama", vocab_size=100, hidden_size=8, intermediate_size=16, num_layers=2, num_heads=2,
    num_kv_heads=1, head_dim=4, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip
LAYERS = 2 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16)
CONFIG = ServeConfig(dtype="float32", cache=CacheConfig(kv_dtype="float32"))
ENGINE = SimpleNamespace(model=MODEL, report={"weights": 4 * (LAYERS + 800)}, config=CONFIG)


def test_plans_can_be_packed_and_run():
    crowd, config = Crowd(LIMITS, 3, 40), narrow_config(rows=(3,), tokens=16, longest=64)
    shapes, packer = Shapes.make(config.scheduler, LIMITS), Packer(LIMITS, 3)
    for plan in (crowd.decode(40), crowd.decode(1), crowd.chunk(16, start=8)):
        packed = packer.pack(plan, shapes.choose(plan))
        assert packed[0] == len(plan.rows)
    assert shapes.choose(crowd.decode(9)).name == "decode 3"
    with pytest.raises(ValueError, match="10 rows of 40 tokens need 100 pages"):
        Crowd(LIMITS, 10, 40)


def test_settings_are_of_what_the_measurement_does_not_decide():
    sizes = {"rows": (3,), "tokens": 16, "longest": 64}
    config = narrow_config(**sizes, settings=["activations=int8", "kv_dtype=float32", "kv_dtype=bfloat16"])
    assert (config.activations, config.cache.kv_dtype, config.cache.page_size) == ("int8", "bfloat16", 16)
    with pytest.raises(ValueError, match=r"cache.page_size, scheduler.max_num_seqs cannot be set here"):
        narrow_config(**sizes, settings=["max_num_seqs=9", "cache.page_size=32"])


def test_a_decode_step_reads_weights_and_live_keys_once():
    case = make_case("decode", ENGINE, Crowd(LIMITS, 3, 40).decode(40))
    assert case.nbytes == 4 * (LAYERS + 800) + 3 * 40 * 4 * (2 * 2 * 4)
    assert case.flops == 2 * 3 * (LAYERS + 800) + 3 * 40.0 * (4 * 2 * 8)
    slow, weak = Calibration("float32", bandwidth=1e3, flops=1e12), Calibration("float32", bandwidth=1e12, flops=1e3)
    assert case.floor(slow) == case.nbytes / 1e3
    assert case.floor(weak) == case.flops / 1e3


def test_a_chunk_needs_no_head_and_attends_to_what_is_before_it():
    case = make_case("chunk", ENGINE, Crowd(LIMITS, 1, 40).chunk(8, start=4))
    pairs = sum(range(5, 13))
    assert case.flops == 2 * 8 * LAYERS + pairs * (4 * 2 * 8)
    assert case.nbytes == pytest.approx(4 * LAYERS + 12 * 4 * 16)


def test_a_line_is_fitted():
    slope, intercept, r2 = linear_fit([1, 2, 4], [5, 7, 11])
    assert (slope, intercept, r2) == pytest.approx((2, 3, 1))
    assert linear_fit([1, 2, 3, 4], [1, 9, 2, 8])[2] < 0.5


def test_every_case_is_measured_once_a_round(monkeypatch):
    engine, order = fake_engine(num_pages=99), []
    monkeypatch.setattr(Calibration, "measure", lambda self: order.append("calibrate"))
    dispatch = engine.executor.dispatch
    engine.executor.dispatch = lambda plan: order.append(len(plan.rows)) or dispatch(plan)
    cases = [
        make_case(
            f"{rows}", SimpleNamespace(**vars(ENGINE), executor=engine.executor), Crowd(LIMITS, rows, 9).decode(9)
        )
        for rows in (2, 3)
    ]
    run_rounds(cases, Calibration("float32"), rounds=2, steps=2)
    one_round = ["calibrate", 2, 2, 2, 3, 3, 3]
    assert order == [2, 2, 3, 3, *one_round, *one_round]
    assert [len(case.seconds) for case in cases] == [2, 2]
    line = steps.line_of(cases[0], Calibration("float32", bandwidth=1.0, flops=1.0))
    assert line.split()[0] == "2"
    assert seconds_of_steps(engine, cases[0].plan, 3) > 0


def test_bad_sizes_are_refused(capsys):
    for flags in (["--rows", "0"], ["--contexts", "512"]):
        with pytest.raises(SystemExit):
            steps.main(flags)
    assert "a line needs two contexts" in capsys.readouterr().err


def test_memory_is_read_at_some_speed(monkeypatch):
    monkeypatch.setattr(steps, "_READ_BYTES", 1 << 20)
    assert steps.read_bandwidth(repeat=1) > 1e6

"""The chosen programs against all others that could be, the command, and an engine that runs them."""

import itertools
import json
import random

import pytest

from jcb import cli, config_file
from jcb.chips import CHIPS
from jcb.config import Limits, SchedulerConfig, ServeConfig
from jcb.engine.llm import LLM
from jcb.models.presets import PRESETS
from jcb.plan.buckets import OTHER_PROGRAMS, choose_buckets
from jcb.plan.demand import Demand
from jcb.simulate.setup import make_engine
from jcb.simulate.simulation import Simulation
from jcb.simulate.workloads import parse
from jcb.steps.shapes import Shapes
from jcb.types import SamplingParams
from tests.checkpoint.tiny_model import VOCAB, write_tiny_gguf
from tests.plan.recordings import write_recording

LIMITS = Limits(page_size=16, num_pages=100, max_model_len=256, vocab_size=300)


def some_demand(seed, seqs, budget):
    rng, demand = random.Random(seed), Demand()
    for _ in range(40):
        rows = rng.randint(1, seqs)
        demand.add(rows if rng.random() < 0.6 else rng.randint(rows, budget), rows)
    return demand


def ladders(top, most):
    return [(*chosen, top) for n in range(most) for chosen in itertools.combinations(range(2, top), n)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("programs", [2, 3, 4, 5])
def test_no_other_programs_pad_less(seed, programs):
    scheduler = SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=12)
    demand = some_demand(seed, 5, 12)
    choice = choose_buckets(demand, scheduler, LIMITS, programs=programs)
    best = min(
        demand.padded(Shapes.make(SchedulerConfig(
            max_num_seqs=5, max_num_batched_tokens=12, decode_row_buckets=rows, prefill_row_buckets=(5,),
            token_buckets=tokens,
        ), LIMITS))
        for rows in ladders(5, programs - 1)
        for tokens in ladders(12, programs - 1)
        if len(rows) + len(tokens) <= programs
    )  # fmt: skip
    assert choice.padded == best >= choice.tokens == demand.tokens
    assert choice.programs <= programs


def test_row_buckets_multiply_and_save_rows():
    scheduler = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64)
    demand = some_demand(1, 16, 64)
    one = choose_buckets(demand, scheduler, LIMITS, programs=9)
    two = choose_buckets(demand, scheduler, LIMITS, programs=9, row_buckets=2)
    assert len(two.scheduler.prefill_row_buckets) == 2
    assert two.programs == len(two.scheduler.decode_row_buckets) + 2 * len(two.scheduler.token_buckets) <= 9
    assert two.rows < one.rows
    assert two.padded >= one.padded
    rows = {*one.scheduler.decode_row_buckets, *one.scheduler.prefill_row_buckets}
    assert one.compile_seconds(2.0)[1] == 2.0 * (one.programs + len(rows) + OTHER_PROGRAMS)


def test_too_few_programs_are_refused():
    with pytest.raises(ValueError, match="--k 2 is too small for --row-buckets 2"):
        choose_buckets(Demand(), SchedulerConfig(), LIMITS, programs=2, row_buckets=2)


def test_the_command_on_a_recording(tmp_path, capsys):
    """Steps of 21 tokens and decode steps of 3 rows: two programs of exactly those sizes beside the tops."""
    recording = write_recording(tmp_path / "run.jsonl", [[20, 1]] * 5 + [[1, 1, 1]] * 20)
    output = tmp_path / "chosen.toml"
    assert cli.main(["buckets", str(recording), "--k", "4", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    config = config_file.load(output)
    assert config.scheduler.decode_row_buckets == (3, 8)
    assert config.scheduler.token_buckets == (21, 64)
    assert config.scheduler.prefill_row_buckets == (8,)
    assert (config.scheduler.max_num_seqs, config.scheduler.policy) == (8, "priority")
    assert "tokens computed                        320           165" in printed  # 20 x 8 + 5 x 32; 20 x 3 + 5 x 21
    assert "computed / asked for                 1.939         1.000" in printed
    assert "assumed" in printed


def test_flags_win_over_the_recording(tmp_path, capsys):
    recording = write_recording(tmp_path / "run.jsonl", [[20, 1]] * 5)
    base, output = tmp_path / "base.toml", tmp_path / "chosen.toml"
    base.write_text('model = "m.gguf"\n[scheduler]\nmax_num_seqs = 4\n')
    flags = ["--max-num-seqs", "10", "--config", str(base), "--output", str(output), "--compile-seconds", "1.5"]
    assert cli.main(["buckets", str(recording), *flags]) == 0
    config = config_file.load(output)
    assert (config.model, config.scheduler.max_num_seqs, config.scheduler.decode_row_buckets[-1]) == ("m.gguf", 10, 10)
    assert "1.5 s each, as given" in capsys.readouterr().out


def test_the_command_on_lengths(tmp_path, capsys):
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text(json.dumps({"prompt_tokens": 40, "output_tokens": 8}))
    command = ["buckets", str(lengths), "--k", "5", "--requests", "50", "--concurrency", "1", "--max-num-seqs", "4"]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert "token_buckets       = [40, 512]" in printed
    assert "decode_row_buckets  = [2, 4]" in printed
    assert cli.main([*command, "--requests", "0"]) == 2


def test_the_simulator_pads_as_the_buckets_say():
    """20 prompt tokens in a step of 21, then 4 decode steps of one row in 3: 21 + 4 x 3."""
    config = config_file.override(
        ServeConfig(),
        {"max_num_seqs": 8, "max_num_batched_tokens": 64, "decode_row_buckets": (3, 8), "token_buckets": (21, 64)},
    )
    engine = make_engine(PRESETS["smollm2-135m"], CHIPS["h200"], config)
    stats = Simulation(engine.spec, parse("burst requests=1 prompt=20 output=5")).run()
    assert (stats.tokens, stats.padded_tokens) == (20 + 4, 21 + 4 * 3)


def test_an_engine_runs_exactly_the_chosen_programs(tmp_path):
    """Programs with fewer tokens than rows among them, and the same answers as with the usual ladders."""
    model = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    usual = config_file.override(
        ServeConfig(model=model),
        {"max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": 64, "dtype": "float32"},
    )
    scheduler = usual.scheduler
    chosen = config_file.override(
        usual, {"decode_row_buckets": (3, 6), "prefill_row_buckets": (6,), "token_buckets": (4, 13, 24)}
    )
    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.choice([2, 3, 9, 30]))] for _ in range(12)]
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=1 + i % 7) for i in range(12)]
    answers = []
    for config in (usual, chosen):
        llm, demand = LLM(config=config), Demand()
        dispatch = llm.engine.executor.dispatch

        def watched(plan, demand=demand, dispatch=dispatch):
            demand.add(plan.num_tokens, len(plan.rows))
            return dispatch(plan)

        llm.engine.executor.dispatch = watched
        answers.append([result.token_ids for result in llm.generate(prompts, params)])
        shapes = llm.engine.executor.registry.shapes
        metrics = llm.engine.metrics
        assert metrics.bucket_tokens.value + metrics.bucket_padding.value == demand.padded(shapes)
        assert metrics.bucket_tokens.value == demand.tokens
        assert metrics.compiles_after_ready.value == 0
    assert answers[0] == answers[1]
    assert [shape.num_rows for shape in shapes.decode] == [3, 6]
    assert [shape.num_tokens for shape in shapes.prefill] == [4, 13, 24]
    assert scheduler.token_buckets == ()

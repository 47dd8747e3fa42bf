"""The planner's numbers, worked out by hand for models that everybody knows, and its answers in words."""

import dataclasses
import json

import pytest

from jcb import cli
from jcb.chips import CHIPS
from jcb.config import ServeConfig
from jcb.config_file import override
from jcb.models.presets import PRESETS
from jcb.plan.place import parse_chips, split_of
from jcb.plan.planner import fitting_engine, floor, make_plan, memory_of
from jcb.simulate.cost import NO_HOST
from jcb.simulate.fit import FEATURES, Calibration, Fit, FittedCost

GIB = 1 << 30
SMALL, LARGE = PRESETS["llama-3.1-8b"], PRESETS["llama-3.1-70b"]


def memory(model, chip, devices, **settings):
    return memory_of(fitting_engine(override(ServeConfig(), settings), model, CHIPS[chip], devices))


def test_llama_8b_on_an_h200():
    """Weights: 8,030,261,248 numbers of 2 bytes.

    One token: K and V (2) x 32 layers x 8 heads x 128 numbers x 2 bytes = 131,072 bytes; a page of 16: 2,097,152.
    Budget: 0.9 x 151,397,597,184 = 136,257,837,465 (rounded down); less weights and 1 GiB for temporaries:
    136,257,837,465 - 16,060,522,496 - 1,073,741,824 = 119,123,573,145, which is 56,802.5 pages.
    """
    found = memory(SMALL, "h200", 1)
    assert found.weights == 8_030_261_248 * 2 == 16_060_522_496
    assert (found.page_size, found.kv_token, found.page) == (16, 2 * 32 * 8 * 128 * 2, 2_097_152)
    assert found.budget == 136_257_837_465
    assert found.num_pages == 119_123_573_145 // 2_097_152 == 56_802
    assert found.pages == 56_802 * 2_097_152
    assert found.weights + found.reserve + found.pages <= found.budget


def test_llama_8b_on_eight_v6e():
    """Each chip: an eighth of every matrix and of the two tables, whole norms.

    Norms: 32 layers x 2 x 4,096 and a last one of 4,096 = 266,240. The rest: (8,030,261,248 - 266,240) / 8 =
    1,003,749,376. Together 1,004,015,616 numbers, 2,008,031,232 bytes.
    One token: one KV head a chip: 131,072 / 8 = 16,384 bytes; a page of 128: 2,097,152.
    Budget: 0.9 x 33,543,694,581 (31.24 GiB) = 30,189,325,122; pages: 30,189,325,122 - 2,008,031,232 - 1,073,741,824 =
    27,107,552,066, which is 12,925.8 pages; 64 sequences of 131,072 tokens could use 65,536 and one.
    """
    found = memory(SMALL, "v6e", 8)
    assert found.weights == 2 * (266_240 + (8_030_261_248 - 266_240) // 8) == 2_008_031_232
    assert (found.page_size, found.kv_token, found.page) == (128, 16_384, 2_097_152)
    assert found.num_pages == 27_107_552_066 // 2_097_152 == 12_925


def test_llama_70b_on_eight_v6e():
    """Norms: 80 x 2 x 8,192 and 8,192 = 1,318,912. The rest: (70,553,706,496 - 1,318,912) / 8 = 8,819,048,448.

    Together 8,820,367,360 numbers, 17,640,734,720 bytes. One token: 2 x 80 x 1 head x 128 x 2 bytes = 40,960; a page
    of 128: 5,242,880. Pages: 30,189,325,122 - 17,640,734,720 - 1,073,741,824 = 11,474,848,578, which is 2,188.6.
    """
    found = memory(LARGE, "v6e", 8)
    assert found.weights == 2 * (1_318_912 + 8_819_048_448) == 17_640_734_720
    assert (found.kv_token, found.page, found.num_pages) == (40_960, 5_242_880, 11_474_848_578 // 5_242_880)
    assert found.usable_pages == 2_187


def test_llama_70b_needs_two_h200():
    """141 GB of weights are above 0.9 x 151 GB. Two hold (70,553,706,496 - 1,318,912) / 2 + 1,318,912 numbers each.

    One token: 2 x 80 x 4 heads x 128 x 2 bytes = 163,840; a page of 16: 2,621,440. Pages: 136,257,837,465 -
    70,555,025,408 - 1,073,741,824 = 64,629,070,233, which is 24,653.9.
    """
    with pytest.raises(ValueError, match=r"weights take 141,107,412,992 .*it fits from --tp 2"):
        memory(LARGE, "h200", 1)
    found = memory(LARGE, "h200", 2)
    assert found.weights == 2 * ((70_553_706_496 - 1_318_912) // 2 + 1_318_912) == 70_555_025_408
    assert (found.kv_token, found.page, found.num_pages) == (163_840, 2_621_440, 64_629_070_233 // 2_621_440)


def test_pages_never_exceed_what_sequences_can_use():
    """4 sequences of 1,000 tokens: 63 pages of 16 each, and the dummy."""
    assert memory(SMALL, "h200", 1, max_num_seqs=4, max_model_len=1000).num_pages == 4 * 63 + 1


def test_a_heads_split_that_cannot_be():
    with pytest.raises(ValueError, match="tensor_parallel=3 does not divide num_heads=32"):
        memory(SMALL, "h200", 3)


def plan(model="llama-3.1-8b", chip="h200", devices=1, input_len=1000, output_len=100, **settings):
    config = override(ServeConfig(model=f"preset:{model}"), settings)
    return make_plan(config, PRESETS[model], CHIPS[chip], devices=devices, input_len=input_len, output_len=output_len)


def test_sequences_by_hand():
    """1,001 usable pages of 16. Worst: 2,048 tokens, 128 pages: 7. Whole: 1,099 tokens, 69 pages: 14.

    On average over its 100 steps a sequence has 1,000 to 1,099 tokens: 8 of them at most 1,007 ... 1,008 tokens still
    take 63 pages (1,000 to 1,008: 9 steps), then 16 steps each of 64 to 68 pages, and 11 of 69.
    """
    found = plan(num_pages=1002, max_model_len=2048)
    mean = (9 * 63 + 16 * (64 + 65 + 66 + 67 + 68) + 11 * 69) / 100
    assert [fit.pages for fit in (found.worst, found.longest, found.average)] == [128, 69, mean]
    assert [fit.by_pages for fit in (found.worst, found.longest, found.average)] == [7, 14, int(1001 / mean)]
    assert found.limit.startswith("pages: they hold 15 sequences")
    assert found.full.clients == found.floor_full.clients == 15


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_num_seqs": 4, "max_model_len": 2048}, "max_num_seqs=4; pages hold 4 sequences of max_model_len"),
        ({"max_num_seqs": 10, "max_num_batched_tokens": 512}, "max_num_seqs=10 at these lengths; pages at 6"),
        ({"max_num_seqs": 60, "max_num_batched_tokens": 330}, "max_num_batched_tokens=330: beyond 30 sequences"),
        (
            {"max_num_seqs": 15, "num_pages": 1002, "max_model_len": 2048},
            "max_num_seqs=15; but pages hold only 14 sequences with their whole answers",
        ),
    ],
)
def test_the_first_limit_is_named(settings, words):
    assert plan(**settings).limit.startswith(words)


def test_the_floor_by_hand():
    """8B on an H200 at 4.8 TB/s and 989 TFLOP/s.

    A step reads layers and head: 6,979,321,856 + 525,336,576 numbers of 2 bytes = 15.01 GB: 3.127 ms. 32 rows of 1,050
    tokens on average read 32 x 1,050 x 131,072 = 4.404 GB more: 0.918 ms.
    """
    engine = fitting_engine(ServeConfig(), SMALL, CHIPS["h200"], 1)
    found = floor(engine, 32, 1000, 100)
    step = (2 * (6_979_321_856 + 525_336_576) + 32 * 1050 * 131_072) / 4.8e12
    assert found.tpot == pytest.approx(step)
    assert step == pytest.approx(0.003127 + 0.000918, rel=1e-3)
    prompt = 2 * (1000 * 6_979_321_856 + 525_336_576) + 1000 * 1001 / 2 * 4 * 32 * 32 * 128
    assert found.ttft == pytest.approx(prompt / 989e12)
    token = 2 * (6_979_321_856 + 525_336_576) + 1050 * 4 * 32 * 32 * 128
    life = max(100 * step, 32 * (prompt + 99 * token) / 989e12)
    assert found.output_rate == pytest.approx(32 * 100 / life)


@pytest.mark.parametrize(
    ("model", "chip", "devices"), [("llama-3.1-8b", "h200", 1), ("llama-3.1-70b", "v6e", 8), ("smollm2-135m", "cpu", 1)]
)
def test_no_forecast_is_below_its_floor(model, chip, devices):
    found = plan(model, chip, devices, input_len=200, output_len=20, max_num_seqs=8, max_model_len=512)
    for low, high in ((found.floor_alone, found.alone), (found.floor_full, found.full)):
        assert 0 < low.ttft < high.ttft
        assert 0 < low.tpot < high.tpot
        assert low.output_rate > high.output_rate > 0
    assert found.full.output_rate > found.alone.output_rate
    assert found.preemptions == 0


def test_programs_are_those_of_the_registry():
    found = plan(max_num_seqs=8, max_num_batched_tokens=32, token_buckets=(20, 32), max_model_len=2048)
    assert found.decode_programs == (2, 8)
    assert found.prefill_programs == ((20, 8), (32, 8))
    assert found.programs == 4 + 2 + 4


def test_fitted_step_times_replace_the_roofline(tmp_path, capsys):
    """A decode step of 1 s, another of 3 s, and a host that takes no time: TTFT 3 s, TPOT 1 s alone."""
    others = (0.0,) * (len(FEATURES) - 2)
    fitted = Calibration(
        cost=FittedCost((1.0, 2.0, *others), {}),
        host=NO_HOST,
        fit=Fit(20, 0.0, 0.0, 1.0),
        model="m",
        platform="gpu",
        dtype="bfloat16",
    )
    fitted.save(tmp_path / "fit.json")
    command = ["plan", "--model", "preset:llama-3.1-8b", "--chip", "h200", "--input-len", "100", "--output-len", "9"]
    command += ["--max-model-len", "1024", "--max-num-seqs", "2", "--calibration", str(tmp_path / "fit.json")]
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["alone"]["ttft"] == pytest.approx(3.0)
    assert found["alone"]["tpot"] == pytest.approx(1.0)
    assert cli.main([*command, "--goal", "tpot=999ms", "--workload", "burst requests=1 prompt=9 output=3"]) == 1
    capsys.readouterr()
    command[command.index("h200")] = "v6e"
    assert cli.main(command) == 2
    assert "the calibration is of a gpu" in capsys.readouterr().err


# ---- words


@pytest.mark.parametrize(
    ("text", "name", "count"), [("h200", "h200", 1), ("h200:8", "h200", 8), ("v6e-8", "v6e", 8), ("v6e:2x4", "v6e", 8)]
)
def test_chips_in_words(text, name, count):
    assert parse_chips(text) == (CHIPS[name], count)


def test_the_machine_at_hand():
    chip, count = parse_chips("cpu")
    assert (chip.name, count) == ("cpu", 1)
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) * 1024
    assert chip.memory == pytest.approx(total, rel=0.01)


@pytest.mark.parametrize("text", ["h300", "v6e-0", "v6e:8", "", "h300-2"])
def test_unknown_chips(text):
    with pytest.raises(ValueError, match=r"h200|for example v6e:2x2"):
        parse_chips(text)


def test_how_many_share_the_model():
    assert split_of(None, 1, 8) == 8
    assert split_of(2, 1, 8) == 2
    assert split_of(None, 4, 8) == 4
    assert split_of(4, 1, 1) == 4
    with pytest.raises(ValueError, match="--tp 3 does not divide the 8 devices"):
        split_of(3, 1, 8)


def test_the_command_as_table_and_as_json(capsys):
    command = ["plan", "--model", "preset:llama-3.1-8b", "--chip", "v6e-8", "--tp", "4", "--max-num-seqs", "8"]
    command += ["--max-model-len", "2048", "--input-len", "100", "--output-len", "10"]
    assert cli.main(command) == 0
    table = capsys.readouterr().out
    assert "on 4 x TPU v6e, 2 replicas of that" in table
    assert "first limit: max_num_seqs=8" in table
    assert cli.main([*command, "--json", "--compile-seconds", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["kv_token"] == 32_768
    assert f"{found['memory']['weights']:,} B" in table
    assert found["compile_seconds"] == 2 * found["programs"]
    assert found["output_tokens_per_second_per_chip"] == found["full"]["output_rate"] / 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--chip", "h300"], "no chip 'h300' is known"),
        (["--tp", "0"], "--tp 0"),
        (["--model", "preset:gpt"], "known: preset:smollm2-135m"),
        (["--input-len", "4000", "--max-model-len", "4096"], "are more than max_model_len=4096"),
        (["--input-len", "-1"], "--input-len -1"),
        (["--kv-cache-memory", "1M"], "hold 0 pages"),
    ],
)
def test_plans_that_cannot_be(capsys, flags, message):
    status = cli.main(["plan", "--model", "preset:llama-3.1-8b", "--chip", "h200", *flags])
    assert status == 2
    assert message in capsys.readouterr().err


def test_plans_are_values():
    found = plan(max_num_seqs=2, max_model_len=2048)
    assert found == dataclasses.replace(found)
    assert found == plan(max_num_seqs=2, max_model_len=2048)

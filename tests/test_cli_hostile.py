"""Files and flags that nobody means well: one line on stderr, a status that is not 0, in seconds and megabytes."""

import json

import pytest

from jcb import cli

SMALL = ["simulate", "--model", "preset:smollm2-135m", "--chip", "h200", "--max-model-len", "2048"]
SHORT = ["--workload", "burst requests=3 prompt=5 output=5"]
CALIBRATION = {
    "jcb_calibration": 1, "model": "m", "platform": "p", "dtype": "x", "decode": [0.0] * 7, "mixed": [0.0] * 7,
    "features": ["step", "padded_tokens", "padded_rows", "rows", "decode_kv", "chunk_kv", "chunk_pairs"],
    "factors": [], "host": {}, "fit": {"steps": 1, "median_error": 0, "p90_error": 0, "r_squared": 0},
}  # fmt: skip


def refused(capsys, arguments, word=""):
    assert cli.main([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jcb: ")
    assert error.count("\n") == 1
    assert len(error) < 1000
    assert word in error


def line(**fields):
    return json.dumps({"time": 0, "prompt": 5, "output": 5} | fields)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "[" * 100_000,
        "[1]",
        line(time=float("nan")),
        line(time=float("inf")),
        line(time={"a": 1}),
        line(prompt=0),
        line(prompt=-5),
        line(prompt=10**12),
        line(prompt=float("inf")),
        line(prompt=float("nan")),
        line(output=10**12),
        line(hash_ids=5),
        line(hash_ids=["a"]),
        line(priority="x"),
        "1" * 6000,
    ],
    ids=lambda text: text[:40],
)
def test_a_trace_in_json(tmp_path, capsys, text):
    path = tmp_path / "trace.jsonl"
    path.write_text(text + "\n")
    refused(capsys, [*SMALL, "--workload", path], "trace.jsonl")


def test_a_trace_whose_blocks_are_many_is_read_as_far_as_its_prompt(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text(line(hash_ids=[10**30] * 200_000) + "\n")
    assert cli.main([*SMALL, "--workload", str(path)]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "time,prompt,output\n0,5\n", "time,prompt\n" + "9" * 200_000])
def test_a_trace_in_csv(tmp_path, capsys, text):
    path = tmp_path / "trace.csv"
    path.write_text(text + "\n")
    refused(capsys, [*SMALL, "--workload", path], "trace.csv")


@pytest.mark.parametrize("text", ["poisson prefix=100000000000", "gamma cv=1e200", "gamma cv=1e-200", "gamma cv=nan"])
def test_a_workload_in_words(capsys, text):
    refused(capsys, [*SMALL, "--workload", text], text.split()[1].partition("=")[0])


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[1]",
        "null",
        *[
            json.dumps(CALIBRATION | change)
            for change in (
                {"decode": [1]},
                {"decode": ["a"] * 7},
                {"decode": [-1] * 7},
                {"mixed": [float("nan")] * 7},
                {"mixed": None},
                {"factors": [[1]]},
                {"factors": 5},
                {"host": [1]},
                {"features": 5},
            )
        ],
    ],
    ids=lambda text: text[:20] + text[-40:],
)
def test_a_calibration(tmp_path, capsys, text):
    path = tmp_path / "c.json"
    path.write_text(text)
    refused(capsys, [*SMALL, *SHORT, "--calibration", path])


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"prompt_tokens": 1000000000000, "output_tokens": 5}', "1" * 6000, "\x00"]
)
def test_a_file_of_lengths(tmp_path, capsys, text):
    path = tmp_path / "lengths.jsonl"
    path.write_text(text + "\n")
    refused(capsys, ["buckets", path], "lengths.jsonl, line 1")


@pytest.mark.parametrize(
    "flags", [["--k", "100000000"], ["--requests", "100000000000"], ["--compile-seconds", "nan"],
              ["--compile-seconds", "-1"], ["--concurrency", "-1"]],
)  # fmt: skip
def test_flags_of_buckets(tmp_path, capsys, flags):
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"prompt_tokens": 10, "output_tokens": 5}\n')
    refused(capsys, ["buckets", path, *flags], flags[0])


@pytest.mark.parametrize("value", ["nan", "-5", "inf"])
def test_flags_of_plan(capsys, value):
    arguments = ["plan", "--model", "preset:smollm2-135m", "--chip", "h200", "--compile-seconds", value]
    refused(capsys, arguments, "--compile-seconds")


def test_flags_of_simulate(capsys):
    refused(capsys, [*SMALL, *SHORT, "--replicas", "1000000000"], "--replicas")


def test_too_little_memory_is_one_line(monkeypatch, capsys):
    def run():
        raise MemoryError

    assert cli.report_errors(run) == 1
    assert capsys.readouterr().err.count("\n") == 1

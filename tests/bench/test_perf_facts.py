"""The guard of performance: what programs and host cost, counted, against the committed baseline."""

import pytest

from jcb.bench import perf_facts
from jcb.bench.perf_facts import count_events, differences


def check(found, key):
    baseline = perf_facts.load()
    if key not in baseline:
        pytest.skip(f"{perf_facts.BASELINE.name} has no figures for {key}: `make perf-facts` adds them")
    lines = list(differences(found(), baseline[key]))
    assert not lines, "\n".join(lines)


def test_programs_cost_what_they_did():
    check(perf_facts.program_facts, perf_facts.program_key())


def test_the_host_takes_the_instructions_it_took():
    check(perf_facts.host_facts, perf_facts.host_key())


def test_a_difference_names_the_figure_both_values_and_the_way_out():
    baseline = {"decode 8": {"flops": 100.0, "temp_bytes": 50.0, "gone": 1.0}}
    found = {"decode 8": {"flops": 104.0, "temp_bytes": 51.0, "new": 1.0}}
    lines = list(differences(found, baseline))
    assert len(lines) == 3
    assert lines[0] == (
        "decode 8: flops is 104, the baseline says 100 (+4.0 %, allowed 3 %); if that is meant, "
        "`make perf-facts` writes the new baseline"
    ).replace(" %", "%")
    assert "gone is gone" in lines[1]
    assert "new is new" in lines[2]
    assert not list(differences(baseline, baseline))
    assert len(list(differences({"decode 8": {"flops": 96.0}}, {"decode 8": {"flops": 100.0}}))) == 1


def test_instructions_are_counted_alike_every_time():
    import sys

    def work(count):
        return [index * 2 for index in range(count)]

    event = sys.monitoring.events.INSTRUCTION
    short, again, long = (count_events(event, lambda n=n: work(n)) for n in (10, 10, 1010))
    assert short == again > 10
    assert long > short + 3000

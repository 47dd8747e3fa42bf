"""Rows that follow a grammar: when they run, and that nothing that happens to them loses their place in it."""

import pytest

from jcb.types import FinishReason
from tests.fakes import Bench, CountingGrammar, CountingMatcher

V = 101
GRAMMAR = CountingGrammar(V, end_ids=(5,))


def bench(**config) -> Bench:
    made = Bench(vocab_size=V, **config)
    made.executor.keep_plans = True
    return made


def steps_of(made: Bench, name: str) -> list[int]:
    return [plan.step_id for plan in made.executor.plans if any(r.sequence.request_id == name for r in plan.rows)]


def test_a_guided_row_runs_every_second_step_and_its_mates_every_step():
    made = bench()
    made.add("free", [1, 2, 3], 20)
    made.add("guided", [4, 5], 12, grammar=CountingGrammar(V, first=2))
    made.run()
    made.check()
    free, guided = steps_of(made, "free"), steps_of(made, "guided")
    assert free == list(range(free[0], free[0] + 20))
    assert guided == list(range(guided[0], guided[0] + 2 * len(guided), 2))
    assert len(guided) == len(made.tokens["guided"]) > 1


def test_alone_it_waits_for_nothing():
    made = bench()
    made.add("guided", [4, 5], 12, grammar=GRAMMAR)
    made.run()
    made.check()
    assert made.executor.num_dispatched == len(made.tokens["guided"])


@pytest.mark.parametrize("config", [{"overlap": False}, {"preempt_every": 2}, {"preempt_every": 3, "page_size": 1}])
def test_the_answer_is_the_same_however_it_runs(config):
    made = bench(**config)
    for index in range(6):
        made.add(f"g{index}", [index, 7], 9, grammar=CountingGrammar(V, first=index))
        made.add(f"f{index}", [index, 7], 9)
    made.run()
    made.check()


def test_a_failed_step_costs_it_nothing():
    made = bench()
    made.executor.fails_collect = lambda plan: plan.step_id in (3, 4) and len(plan.rows) > 1
    for index in range(4):
        made.add(f"g{index}", [index], 9, grammar=CountingGrammar(V, first=index))
    made.run()
    made.check()


def test_the_end_of_the_grammar_is_a_stop_without_a_stop_id():
    made = bench()
    made.add("guided", [1], 60, grammar=CountingGrammar(V))
    made.run()
    end = made.ends["guided"]
    assert (end.finish_reason, end.stop_token_id) == (FinishReason.STOP, None)
    assert (1 + sum(made.tokens["guided"])) % 12 == 0
    assert made.stat("pages_used") == 0


def test_max_tokens_cuts_it_and_says_so():
    made = bench()
    made.add("guided", [2], 1, grammar=CountingGrammar(V, first=2))
    made.run()
    made.check()
    assert made.ends["guided"].finish_reason is FinishReason.LENGTH


def test_b133_a_stop_id_ends_it_only_where_the_grammar_accepts():
    """B133: a stop token was allowed before the grammar was complete, which gave truncated JSON with "stop"."""
    ids = tuple(range(V))  # any token is a stop id
    made = bench()
    made.add("hidden", [2], 20, grammar=CountingGrammar(V), stop_token_ids=ids)
    made.add("kept", [2], 20, grammar=CountingGrammar(V), stop_token_ids=ids, include_stop_str_in_output=True)
    made.run()
    hidden, kept = made.tokens["hidden"], made.tokens["kept"]
    assert len(hidden) == 2  # what comes before the second token is accepted, what comes before the first is not
    assert made.ends["hidden"].stop_token_id == hidden[-1]
    assert len(kept) == 1
    assert made.ends["kept"].finish_reason is FinishReason.STOP


def test_end_ids_are_held_back_by_min_tokens_and_ignore_eos():
    for first in range(12):
        made = bench()
        grammar = CountingGrammar(V, first=first, end_ids=range(1, V, 6))
        made.add("long", [first], 9, grammar=grammar, min_tokens=3, eos_token_ids=tuple(grammar.end_ids))
        made.add("ignoring", [first], 9, grammar=grammar, ignore_eos=True)
        made.run()
        made.check("long")
        assert not grammar.end_ids & set(made.tokens["long"][:3])
        assert not grammar.end_ids & set(made.tokens["ignoring"])


def test_a_grammar_that_fails_ends_its_own_request_alone(monkeypatch):
    monkeypatch.setattr(CountingMatcher, "fails_after", 2)
    made = bench()
    made.add("free", [1], 9)
    made.add("guided", [2], 9, grammar=CountingGrammar(V, first=2))
    made.run()
    made.check("free")
    end = made.ends["guided"]
    assert (end.finish_reason, end.error.code) == (FinishReason.ERROR, "grammar_failed")
    assert made.stat("pages_used") == 0


def test_only_stop_strings_that_leave_a_whole_answer_may_cut_it():
    made = bench()
    made.add("guided", [1], 60, grammar=CountingGrammar(V))
    made.add("free", [1], 3)
    seen = {"guided": [], "free": []}
    while made.core.has_work:
        made.step()
        for output in made.last:
            seen[output.request_id].append(output.may_stop)
    total, expected = 1, []
    for token in made.tokens["guided"]:
        total += token
        expected.append(total % 3 == 0 and total % 12 != 0)
    assert seen == {"guided": expected, "free": [True] * 3}

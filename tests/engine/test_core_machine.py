"""Everything at once: random requests, aborts, faults and clocks on random engines, against answers known before.

Whatever happens, each request ends exactly once, with the oracle's tokens or, where something ended it early, with
their beginning; pages and slots are conserved after every step; the oldest always advances.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jcb.scheduler.knobs import POLICIES
from jcb.types import FinishReason, RequestError
from tests.fakes import Bench, CountingGrammar, reference_prompt_logprobs

CONFIGS = st.fixed_dictionaries(
    {
        "admission": st.sampled_from(["paged", "paged", "paged", "reserve", "static"]),
        "policy": st.sampled_from(POLICIES),
        "overlap": st.booleans(),
        "prefix_caching": st.booleans(),
        "page_size": st.sampled_from([1, 2, 4, 16]),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(5, 16),
        "max_prefill_chunk": st.sampled_from([0, 0, 1, 3, 7]),
        "preempt_every": st.sampled_from([0, 0, 0, 0, 1, 3]),
    }
)
ASKS = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, 1), min_size=1, max_size=14),
        "follows": st.booleans(),
        "max_tokens": st.integers(1, 16),
        "priority": st.integers(0, 2),
        "namespace": st.sampled_from(["", "", "other"]),
        "min_tokens": st.integers(0, 4),
        "prompt_logprobs": st.sampled_from([None, None, None, 2]),
        "is_guided": st.sampled_from([False, False, True]),
    }
)
ENDED_WELL = (FinishReason.STOP, FinishReason.LENGTH)


class CoreMachine(RuleBasedStateMachine):
    @initialize(config=CONFIGS, pool_tokens=st.integers(28, 60))
    def start(self, config, pool_tokens):
        num_pages = 1 + -(-pool_tokens // config["page_size"])
        self.bench = Bench(
            num_pages=num_pages,
            vocab_size=31,
            max_model_len=30,
            queue_timeout=50.0,
            run_timeout=80.0,
            max_queued=999,
            max_queued_tokens=99_999,
            **config,
        )
        self.poisoned: dict[str, int] = {}
        self.not_finite: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.flaky = False
        self.clock_moved = False
        executor = self.bench.executor
        executor.fails_dispatch = lambda plan: self.fails(plan, 0)
        executor.fails_collect = lambda plan: self.fails(plan, 1)
        executor.not_finite = lambda row: row.kv_len >= self.not_finite.get(row.sequence.request_id, 1_000)

    def fails(self, plan, where):
        if self.flaky and len(plan.rows) > 1 and plan.step_id % 2 == where:
            self.flaky = False
            return True
        return any(
            row.kv_len >= self.poisoned.get(row.sequence.request_id, 1_000)
            and int(row.sequence.request_id[1:]) % 2 == where
            for row in plan.rows
        )

    @property
    def alive(self):
        return [name for name in self.bench.requests if name not in self.bench.ends]

    @rule(asks=st.lists(ASKS, min_size=1, max_size=5))
    def submit(self, asks):
        for ask in asks:
            self.submit_one(**ask)

    def submit_one(self, prompt, follows, max_tokens, is_guided, **fields):
        bench = self.bench
        stops = {"grammar": CountingGrammar(31, end_ids=(5,))} if is_guided else {"stop_token_ids": (7,)}
        if follows and bench.requests:
            before = list(bench.requests)[-1]
            prompt = [*bench.requests[before].prompt_token_ids, *bench.tokens[before], *prompt][:24]
        limits = bench.limits
        fits = limits.pages_for(min(len(prompt) + max_tokens, limits.max_model_len)) <= limits.usable_pages
        name = f"r{len(bench.requests)}"
        try:
            bench.add(name, prompt, max_tokens, arrival_time=bench.now, eos_token_ids=(5,), **stops, **fields)
        except RequestError:
            assert not fits
        else:
            assert fits

    @precondition(lambda self: self.alive)
    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.one_step()

    @precondition(lambda self: self.alive)
    @rule(count=st.integers(5, 20))
    def step_on(self, count):
        self.step(count)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), what=st.sampled_from(["abort", "poison", "break numbers"]), length=st.integers(1, 24))
    def trouble(self, data, what, length):
        """Abort one, or let its steps raise or its numbers break from some length on."""
        name = data.draw(st.sampled_from(self.alive))
        if what == "poison":
            self.poisoned[name] = length
        elif what == "break numbers":
            self.not_finite[name] = length
        else:
            self.aborted.add(name)
            self.bench.abort(name)
            self.bench.scheduler.check_integrity()

    @rule()
    def fail_once(self):
        self.flaky = True

    @rule(data=st.data(), policy=st.sampled_from(POLICIES))
    def turn(self, data, policy):
        """Change every knob between two steps; no answer may change."""
        scheduler, ceiling = self.bench.scheduler, self.bench.config
        tokens = data.draw(st.integers(1, ceiling.max_num_batched_tokens))
        seqs = data.draw(st.integers(1, min(tokens, ceiling.max_num_seqs)))
        scheduler.turn({"max_num_batched_tokens": tokens, "max_num_seqs": seqs, "policy": policy})
        scheduler.check_integrity()

    @rule(seconds=st.sampled_from([0.0, 20.0, -5.0]))
    def wait(self, seconds):
        self.bench.now += seconds
        self.clock_moved = True

    def one_step(self):
        """A step, in which the oldest that runs must advance unless somebody takes its turn by design."""
        bench = self.bench
        scheduler = bench.scheduler
        undisturbed = not (scheduler._suspects or bench.config.preempt_every)
        oldest = next(iter(scheduler._roster.running()), None)
        resets = bench.executor.num_resets
        before = None if oldest is None else (oldest.num_computed, oldest.num_tokens, -oldest.num_pending)
        bench.step()
        if oldest is not None and undisturbed and bench.executor.num_resets == resets:
            after = oldest.num_computed, oldest.num_tokens, -oldest.num_pending
            assert oldest.finish_reason is not None or after > before, "the oldest stood still"

    def check_end(self, name):
        bench = self.bench
        end, tokens, expected = bench.ends[name], bench.tokens[name], bench.expected(name)
        if end.finish_reason in ENDED_WELL:
            assert tokens == expected
            grammar = bench.requests[name].grammar
            is_whole = end.stop_token_id is not None or (grammar and (grammar.first + sum(tokens)) % 12 == 0)
            assert end.finish_reason is (FinishReason.STOP if is_whole else FinishReason.LENGTH)
            return
        assert tokens == expected[: len(tokens)]
        if end.finish_reason is FinishReason.ABORT:
            assert name in self.aborted
            return
        code = end.error.code
        allowed = {"step_failed": self.poisoned, "non_finite_logits": self.not_finite}
        assert name in allowed.get(code, {}) or (self.clock_moved and code in ("queue_timeout", "run_timeout")), code
        assert not (code == "queue_timeout" and tokens)

    def teardown(self):
        if not hasattr(self, "bench"):
            return
        for _ in range(20_000):
            if not self.bench.core.has_work:
                break
            self.one_step()
        assert not self.alive
        for name in self.bench.requests:
            self.check_end(name)
            self.check_prompt_logprobs(name)
        assert self.bench.stat("pages_used") == 0

    def check_prompt_logprobs(self, name):
        request = self.bench.requests[name]
        given = [(entry.token_id, entry.logprob) for entry in self.bench.prompt_logprobs[name]]
        expected = reference_prompt_logprobs(request.prompt_token_ids)
        if request.params.prompt_logprobs is None:
            assert not given
        elif self.bench.tokens[name]:
            assert given == expected
        else:
            assert given == expected[: len(given)]


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

"""One request, many batches: inside one step shape its tokens and log-probabilities are the same bits."""

import random

import pytest

from jcb.types import Request, RowKind, SamplingParams, ScheduledRow, Sequence, StepPlan
from tests.e2e.real_model import executor

pytestmark = [pytest.mark.golden, pytest.mark.timeout(1500)]

PROMPT = (504, 3575, 282, 4649, 314)
TRIALS = 200


def row(sequence: Sequence, slot: int, pages: list[int], q_len: int) -> ScheduledRow:
    start = sequence.num_tokens - q_len
    ids = tuple(sequence.tokens(start, start + q_len))
    table = tuple(pages[: -(-sequence.num_tokens // 16)])
    kind = RowKind.NEW if start == 0 else RowKind.CONTINUED
    return ScheduledRow(sequence, slot, start, q_len, kind, True, ids, table, 0, -1)


def random_mate(rng: random.Random, index: int) -> Sequence:
    params = SamplingParams(
        temperature=rng.choice([0.0, 1.0]),
        top_p=rng.choice([1.0, 0.9]),
        logprobs=rng.choice([None, 5]),
        presence_penalty=rng.choice([0.0, 1.0]),
    )
    prompt = tuple(rng.randrange(100, 40_000) for _ in range(rng.randrange(2, 8)))
    return Sequence(
        Request(request_id=f"mate{index}", prompt_token_ids=prompt, params=params, seed=rng.getrandbits(64))
    )


def trial(device, rng: random.Random, params: SamplingParams) -> tuple:
    """The same request among 3 … 7 random mates in random order and slots: one prefill and two decode steps.

    Steps of 17 … 64 tokens in at most 8 rows run as "prefill 64 x 8", those of 3 … 8 rows as "decode 8".
    """
    sequences = [random_mate(rng, i) for i in range(rng.randrange(4, 8))]
    me = Sequence(Request(request_id="me", prompt_token_ids=PROMPT, params=params, seed=77))
    sequences.insert(rng.randrange(len(sequences) + 1), me)
    filler = 33 - sum(s.num_tokens for s in sequences)
    if filler > 0:  # into the shape of 64
        extra = tuple(rng.randrange(100, 40_000) for _ in range(filler))
        old = sequences[(sequences.index(me) + 1) % len(sequences)]
        request = Request(
            request_id="long", prompt_token_ids=extra + old.request.prompt_token_ids, params=old.request.params
        )
        sequences[sequences.index(old)] = Sequence(request)
    slots = rng.sample(range(32), len(sequences))
    ids = rng.sample(range(1, 500), 8 * len(sequences))
    pages = [ids[8 * i : 8 * i + 8] for i in range(len(sequences))]
    seen = []
    for step in range(3):
        rows = [row(s, slots[i], pages[i], s.num_tokens if step == 0 else 1) for i, s in enumerate(sequences)]
        plan = StepPlan(step, tuple(rows))
        shape = device.registry.shapes.choose(plan)
        assert (shape.num_tokens, shape.num_rows) == ((64, 8) if step == 0 else (8, 8))
        result = device.collect(device.dispatch(plan))
        for i, sequence in enumerate(sequences):
            sequence.output_token_ids.append(int(result.token_ids[i]))
            if sequence is me:
                top = result.top_logprobs[i].tobytes() if params.logprobs else b""
                seen.append((int(result.token_ids[i]), result.logprobs[i].tobytes(), top))
    return tuple(seen)


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0, logprobs=5), SamplingParams(temperature=1.0, top_p=0.95)]
)
def test_b177_tokens_and_logprobs_are_bit_equal_whatever_shares_the_batch(params):
    """B177: temperature 0 answers depended on batch mates."""
    device, rng = executor(), random.Random(1)
    device.reset()
    found = {trial(device, rng, params) for _ in range(TRIALS // 2)}
    assert len(found) == 1, f"{len(found)} different answers in {TRIALS // 2} trials"

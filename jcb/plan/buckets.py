"""The bucket chooser: which step programs to compile so that padding is least for what was seen."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jcb import config_file
from jcb.config import Limits, SchedulerConfig, ServeConfig
from jcb.models.presets import serve_command
from jcb.plan.demand import (
    Demand,
    is_recording,
    limits_for,
    read_lengths,
    recorded_demand,
    simulated_demand,
)
from jcb.plan.ladder import Ladder, best_ladders
from jcb.recording import Recording
from jcb.steps.shapes import Shapes

SECONDS_PER_PROGRAM = 5.0
"""Assumed where nothing was measured: a step of the default model takes two CPU cores 2 to 8 s."""

OTHER_PROGRAMS = 4
"""Beside the steps and the pick programs: the initial state, the slot, the mask and the prompt program."""


def programs_of(shapes: Shapes) -> int:
    """All that are compiled for `shapes`: steps, a pick program for each number of rows, and the others."""
    return len(shapes.decode) + len(shapes.prefill) + len(shapes.row_counts) + OTHER_PROGRAMS


@dataclass(frozen=True)
class Choice:
    """Buckets that were chosen and what they change. *_before: with the buckets of the given settings.

    tokens: asked for in all; padded: computed for them; rows: those whose logits are computed; programs: steps only;
    compiled: all.
    """

    scheduler: SchedulerConfig
    steps: int
    tokens: int
    padded_before: int
    padded: int
    rows_before: int
    rows: int
    programs_before: int
    programs: int
    compiled_before: int
    compiled: int

    @property
    def ratio_before(self) -> float:
        return self.padded_before / self.tokens

    @property
    def ratio(self) -> float:
        """Tokens computed for one that was asked for."""
        return self.padded / self.tokens

    def compile_seconds(self, each: float) -> tuple[float, float]:
        """Forecast before and after, one program after another, of which each takes so long."""
        return each * self.compiled_before, each * self.compiled


def choose_buckets(
    demand: Demand, scheduler: SchedulerConfig, limits: Limits, *, programs: int, row_buckets: int = 1
) -> Choice:
    """The step programs, at most `programs`, that compute the fewest padded tokens for `demand`.

    row_buckets: sizes of rows of the steps that are not decodes only; each multiplies the token buckets, and they are
    those that compute the fewest padded rows. Exact: every split of `programs` between decode steps and others is
    tried with the best ladder of each. Raises ValueError where `programs` is too small.
    """
    if row_buckets < 1 or programs < 1 + row_buckets:
        raise ValueError(
            f"--k {programs} is too small for --row-buckets {row_buckets}: there must be one program for decode steps "
            "and one for each row bucket"
        )
    mixed_rows, mixed_tokens = Counter[int](), Counter[int]()
    for (tokens, rows), count in demand.mixed.items():
        mixed_rows[rows] += count
        mixed_tokens[tokens] += count
    rows = best_ladders(mixed_rows, scheduler.max_num_seqs, row_buckets)[-1].sizes
    decodes = best_ladders(demand.decode, scheduler.max_num_seqs, programs - len(rows))
    mixed = best_ladders(mixed_tokens, scheduler.max_num_batched_tokens, (programs - 1) // len(rows))
    decode, tokens = _best_split(decodes, mixed, programs, len(rows))
    chosen = dataclasses.replace(
        scheduler, decode_row_buckets=decode.sizes, prefill_row_buckets=rows, token_buckets=tokens.sizes
    )
    before, after = Shapes.make(scheduler, limits), Shapes.make(chosen, limits)
    return Choice(
        scheduler=chosen,
        steps=demand.steps,
        tokens=demand.tokens,
        padded_before=demand.padded(before),
        padded=demand.padded(after),
        rows_before=demand.padded_rows(before),
        rows=demand.padded_rows(after),
        programs_before=len(before.decode) + len(before.prefill),
        programs=len(after.decode) + len(after.prefill),
        compiled_before=programs_of(before),
        compiled=programs_of(after),
    )


def _best_split(decodes: list[Ladder], mixed: list[Ladder], programs: int, each: int) -> tuple[Ladder, Ladder]:
    """The ladders with the least padding together whose programs are not too many, the fewest among equals."""
    pairs = [
        (decode, tokens)
        for decode in decodes
        for tokens in mixed
        if len(decode.sizes) + each * len(tokens.sizes) <= programs
    ]
    return min(
        pairs, key=lambda pair: (pair[0].padded + pair[1].padded, len(pair[0].sizes) + each * len(pair[1].sizes))
    )


def report(choice: Choice, seconds_each: float, is_measured: bool) -> list[str]:
    """The answer in lines."""
    before, after = choice.compile_seconds(seconds_each)
    chosen = choice.scheduler
    return [
        f"{choice.steps:,} steps asked for {choice.tokens:,} tokens",
        f"decode_row_buckets  = {list(chosen.decode_row_buckets)}",
        f"prefill_row_buckets = {list(chosen.prefill_row_buckets)}",
        f"token_buckets       = {list(chosen.token_buckets)}",
        f"{'':<28}{'before':>14}{'after':>14}",
        f"{'tokens computed':<28}{choice.padded_before:>14,}{choice.padded:>14,}",
        f"{'computed / asked for':<28}{choice.ratio_before:>14.3f}{choice.ratio:>14.3f}",
        f"{'rows of logits computed':<28}{choice.rows_before:>14,}{choice.rows:>14,}",
        f"{'step programs':<28}{choice.programs_before:>14,}{choice.programs:>14,}",
        f"{'forecast compile seconds':<28}{before:>14,.0f}{after:>14,.0f}",
        f"(one program after another at {seconds_each:g} s each, {'as given' if is_measured else 'assumed'}, "
        f"{choice.compiled - choice.programs} more programs included)",
    ]


RECORDED = (
    "max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk", "chunk_policy", "chunk_half_position",
    "bucket_ladder",
    "max_model_len", "policy", "admission",
)  # fmt: skip
"""Settings of the scheduler that a recording's steps depend on, taken from it unless others are asked for."""


def run(
    path: Path, base: ServeConfig, flags: Mapping[str, object], *, programs: int, row_buckets: int,
    compile_seconds: float | None, requests: int, concurrency: int, seed: int, output: Path | None,
    say: Callable[[str], None] = print,
) -> Choice:  # fmt: skip
    """Choose for the recording or file of lengths at `path`, print the answer, write the configuration.

    base: settings of a configuration file; flags: what was asked for beside it, by full path.
    """
    if is_recording(path):
        recording = Recording.open(path)
        recorded = recording.scheduler_config()
        same = {f"scheduler.{name}": getattr(recorded, name) for name in RECORDED}
        config = config_file.override(base, same | dict(flags))
        limits, demand = recording.limits(), recorded_demand(recording)
    else:
        lengths, config = read_lengths(path), config_file.override(base, flags)
        limits = limits_for(lengths, config)
        demand = simulated_demand(
            lengths, config.scheduler, limits, requests=requests, concurrency=concurrency, seed=seed
        )
    choice = choose_buckets(demand, config.scheduler, limits, programs=programs, row_buckets=row_buckets)
    measured = compile_seconds is not None
    for line in report(choice, compile_seconds if measured else SECONDS_PER_PROGRAM, measured):
        say(line)
    if output is not None:
        output.write_text(config_file.dump(dataclasses.replace(config, scheduler=choice.scheduler)), encoding="utf-8")
        say(f"wrote {output}: {serve_command(output, config.model)}")
    return choice

"""Step times fitted from a recording: which part of a step costs what, on the machine that made it.

A step's device time is a sum of non-negative prices for what the step holds. Least squares of relative errors, so that
short steps count as much as long ones; a few steps that something else disturbed are weighed down. Where a program ran
often, what its steps took beside the sum is kept too.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jcb.recording import Recording, Step
from jcb.simulate.cost import Affine, HostCost, StepWork, work_of_step

VERSION = 2
FEATURES = ("step", "mixed", "padded_tokens", "tokens", "padded_rows", "rows", "decode_kv", "chunk_kv", "chunk_pairs")
"""What has a price: the step itself (weights are read once) and one with chunks, tokens and rows (logits) with their
padding and without (the C++ kernels pass over it), cache tokens read by single rows and by chunks, pairs of tokens in
chunks."""

MIN_STEPS = 20
_OFTEN = 6  # steps of one program that tell its own factor
_MOST_FACTOR = 2.0


@dataclass(frozen=True)
class Fit:
    """How well prices explain what they were fitted to. Errors are shares of the measured time."""

    steps: int
    median_error: float
    p90_error: float
    r_squared: float


@dataclass(frozen=True)
class FittedCost:
    """Device seconds from prices: seconds a unit of each of FEATURES.

    factors: of programs by (tokens, rows, is_decode), multiplied to the sum.
    """

    prices: tuple[float, ...]
    factors: Mapping[tuple[int, int, bool], float]

    def seconds(self, work: StepWork) -> float:
        """Of one step on the device."""
        factor = self.factors.get((work.padded_tokens, work.padded_rows, work.is_decode), 1.0)
        step, mixed, padded_tokens, tokens, padded_rows, rows, decode_kv, chunk_kv, pairs = self.prices
        return factor * (
            (step if work.is_decode else step + mixed)
            + padded_tokens * work.padded_tokens
            + tokens * work.tokens
            + padded_rows * work.padded_rows
            + rows * work.rows
            + decode_kv * work.decode_kv
            + chunk_kv * work.chunk_kv
            + pairs * work.chunk_pairs
        )


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What a recording says of a machine and a model."""

    cost: FittedCost
    host: HostCost
    fit: Fit
    model: str
    platform: str
    dtype: str

    def to_json(self) -> dict[str, Any]:
        """As written to a file."""
        factors = [[*key, factor] for key, factor in sorted(self.cost.factors.items())]
        return {
            "jcb_calibration": VERSION,
            "model": self.model,
            "platform": self.platform,
            "dtype": self.dtype,
            "features": list(FEATURES),
            "prices": list(self.cost.prices),
            "factors": factors,
            "host": dataclasses.asdict(self.host),
            "fit": dataclasses.asdict(self.fit),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Calibration:
        """The inverse of `to_json`; ValueError for anything else."""
        if value.get("jcb_calibration") != VERSION or tuple(value.get("features", ())) != FEATURES:
            raise ValueError(f"no calibration of version {VERSION}: make one with `jcb simulate --calibrate`")
        factors = {(int(t), int(r), bool(d)): float(f) for t, r, d, f in value["factors"]}
        return Calibration(
            cost=FittedCost(tuple(value["prices"]), factors),
            host=HostCost(**{name: Affine(**part) for name, part in value["host"].items()}),
            fit=Fit(**value["fit"]),
            model=value["model"],
            platform=value["platform"],
            dtype=value["dtype"],
        )

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """Read what `save` wrote; ValueError names the file."""
        try:
            return Calibration.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise ValueError(f"calibration {str(path)!r} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"calibration {str(path)!r} is none: {error}") from error


def calibrate(recordings: Recording | Sequence[Recording]) -> Calibration:
    """Fit prices to the steps of one or more recordings of one engine. ValueError when they hold too few."""
    each = [recordings] if isinstance(recordings, Recording) else list(recordings)
    steps = [step for recording in each for step in usable_steps(recording)]
    if len(steps) < MIN_STEPS:
        raise ValueError(f"{each[0].path} holds {len(steps)} steps; a calibration needs {MIN_STEPS}")
    header = each[0].header
    works = [work_of_step(step) for step in steps]
    times = np.array([step.device for step in steps])
    cost = fit_cost(works, times)
    return Calibration(
        cost=cost,
        host=_fit_host([turn for recording in each for turn in _turns(recording)]),
        fit=errors(cost, works, times),
        model=header.model,
        platform=header.platform,
        dtype=str(header.config.get("dtype", "")),
    )


def usable_steps(recording: Recording) -> list[Step]:
    """Steps whose time is their own: they did not fail, and are not the first (first uses cost more)."""
    return [step for index, step in enumerate(recording.steps()) if step.device > 0 and not step.failed and index > 0]


def fit_cost(works: Sequence[StepWork], times: np.ndarray) -> FittedCost:
    """Prices and factors for measured steps."""
    plain = FittedCost(_prices(_features(works), times), {})
    ratios: dict[tuple[int, int, bool], list[float]] = {}
    for work, measured in zip(works, times, strict=True):
        key = work.padded_tokens, work.padded_rows, work.is_decode
        ratios.setdefault(key, []).append(measured / max(plain.seconds(work), 1e-9))
    factors = {key: _bounded(float(np.median(each))) for key, each in ratios.items() if len(each) >= _OFTEN}
    return dataclasses.replace(plain, factors=factors)


def errors(cost: FittedCost, works: Sequence[StepWork], times: np.ndarray) -> Fit:
    """How far `cost` is from measured times."""
    predicted = np.array([cost.seconds(work) for work in works])
    relative = np.abs(predicted - times) / times
    spread = float(((times - times.mean()) ** 2).sum())
    return Fit(
        steps=len(works),
        median_error=float(np.median(relative)),
        p90_error=float(np.quantile(relative, 0.9)),
        r_squared=1 - float(((predicted - times) ** 2).sum()) / spread if spread else 0.0,
    )


def _features(works: Iterable[StepWork]) -> np.ndarray:
    """f64[steps, FEATURES]"""
    return np.array(
        [
            (
                *(1.0, not w.is_decode, w.padded_tokens, w.tokens, w.padded_rows, w.rows),
                *(w.decode_kv, w.chunk_kv, w.chunk_pairs),
            )
            for w in works
        ],
        np.float64,
    )  # fmt: skip


def _prices(features: np.ndarray, times: np.ndarray, rounds: int = 5) -> tuple[float, ...]:
    """Non-negative least squares of relative errors, reweighed so that disturbed steps count less."""
    from scipy.optimize import nnls

    scale = features.max(axis=0)
    scale[scale == 0] = 1.0
    weights = np.ones(len(times))
    prices = np.zeros(features.shape[1])
    for _ in range(rounds):
        root = np.sqrt(weights) / times
        prices, _ = nnls(features / scale * root[:, None], times * root)
        off = np.abs(features / scale @ prices - times) / times
        limit = max(3 * float(np.median(off)), 1e-3)
        weights = np.minimum(1.0, limit / np.maximum(off, 1e-12))
    return tuple(float(price) for price in prices / scale)


def _bounded(factor: float) -> float:
    return min(max(factor, 1 / _MOST_FACTOR), _MOST_FACTOR)


@dataclass(frozen=True)
class _HostTurn:
    rows: int
    before: float
    dispatch: float
    after: float


def _turns(recording: Recording) -> list[_HostTurn]:
    """The host's part of turns that dispatched; `after` reaches to the next turn, and so holds what streams cost."""
    turns: list[_HostTurn] = []
    last: Step | None = None
    for event in recording:
        if not isinstance(event, Step):
            continue
        if last is not None and last.rows and event.rows and not last.failed:
            outside = max(event.t - last.t - last.host - last.wait, 0.0)
            inside = max(last.host - last.before - last.dispatch, 0.0)
            turns.append(_HostTurn(len(last.rows), last.before, last.dispatch, inside + outside))
        last = event
    return turns


def _fit_host(turns: Sequence[_HostTurn]) -> HostCost:
    if len(turns) < MIN_STEPS:
        return HostCost()
    rows = np.array([turn.rows for turn in turns], np.float64)
    parts = {
        name: _affine(rows, np.array([getattr(turn, name) for turn in turns]))
        for name in ("before", "dispatch", "after")
    }
    return HostCost(**parts)


def _affine(rows: np.ndarray, seconds: np.ndarray) -> Affine:
    """A fixed part and one a row, robust against turns that something disturbed."""
    low, high = np.quantile(seconds, (0.05, 0.95))
    kept = (seconds >= low) & (seconds <= high)
    rows, seconds = rows[kept], seconds[kept]
    if np.ptp(rows) == 0:
        return Affine(float(np.median(seconds)), 0.0)
    row, fixed = np.polyfit(rows, seconds, 1)
    if row < 0 or fixed < 0:
        return Affine(float(np.median(seconds)), 0.0)
    return Affine(float(fixed), float(row))

"""A recorded run under other knobs: the same requests at the same times, with step times fitted to that very run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jcb import config_file
from jcb.config import CacheConfig, EngineConfig, Limits, MeshConfig, ServeConfig
from jcb.engine.resolve import limits_of
from jcb.recording import Recording
from jcb.simulate.cost import CostModel, HostCost
from jcb.simulate.fit import Calibration, calibrate
from jcb.simulate.job import VOCAB_SIZE
from jcb.simulate.recorded import RecordedWorkload
from jcb.simulate.replica import ReplicaSpec, Turn
from jcb.simulate.simulation import Simulation
from jcb.simulate.stats import RunStats
from jcb.steps.shapes import Shapes, StepShape
from pallas_kernels.page import ITEM_BYTES

PATIENT = {"queue_timeout": math.inf, "run_timeout": math.inf, "max_queued": 1 << 30, "max_queued_tokens": 1 << 50}
"""Settings of a scheduler that refuses and times out nobody."""


def config_of(recording: Recording, settings: Mapping[str, object] | None = None) -> ServeConfig:
    """The configuration of a recorded run with `settings` (by full path) changed."""
    recorded = recording.header.config
    config = ServeConfig(
        model=recording.header.model,
        dtype=recorded.get("dtype", "auto"),
        weights=recorded.get("weights", "auto"),
        activations=recorded.get("activations", "full"),
        scheduler=recording.scheduler_config(),
        cache=CacheConfig(**recorded["cache"]),
        mesh=MeshConfig(**recorded.get("mesh", {})),
        engine=EngineConfig(overlap=recording.overlap),
    )
    changed = config_file.override(config, settings or {})
    return _with_pages(recording, config, changed, settings or {})


def _with_pages(
    recording: Recording, config: ServeConfig, changed: ServeConfig, settings: Mapping[str, object]
) -> ServeConfig:
    """Pages for the memory that the run had, or for the one asked for."""
    if "cache.num_pages" in settings:
        return changed
    tokens = config.cache.num_pages * config.cache.page_size * _kv_item(config) // _kv_item(changed)
    if "cache.memory_gib" in settings:
        shape = recording.header.shape
        numbers = 2 * shape["num_layers"] * shape["num_kv_heads"] * shape["head_dim"]
        tokens = int(changed.cache.memory_gib * (1 << 30)) // (numbers * _kv_item(changed))
    pages = max(tokens // changed.cache.page_size, 2)
    return dataclasses.replace(changed, cache=dataclasses.replace(changed.cache, num_pages=pages))


def _kv_item(config: ServeConfig) -> int:
    """Bytes of one number of the cache."""
    dtype = config.dtype if config.cache.kv_dtype == "auto" else config.cache.kv_dtype
    return ITEM_BYTES["bfloat16" if dtype == "auto" else dtype]


def _precision(config: ServeConfig) -> dict[str, str]:
    """The settings, by full path, that say in how many bits a step computes."""
    names = {"dtype": config.dtype, "weights": config.weights, "activations": config.activations}
    return names | {"cache.kv_dtype": config.cache.kv_dtype}


def shapes_of(recording: Recording, config: ServeConfig, limits: Limits) -> Shapes:
    """The programs of the recorded engine where every plan of `config` fits them, else those it would compile."""
    buckets: Any = recording.header.config.get("buckets", {})
    width = limits.pages_per_seq
    decode = tuple(StepShape(rows, rows, width, True) for rows in buckets.get("decode", ()))
    prefill = tuple(StepShape(tokens, rows, width, False) for tokens, rows in buckets.get("prefill", ()))
    changed = config.scheduler != recording.scheduler_config()
    named = config.scheduler.token_buckets != recording.scheduler_config().token_buckets
    if not prefill or named:
        return Shapes.make(config.scheduler, limits)
    rows, tokens = max(s.num_rows for s in prefill), max(s.num_tokens for s in prefill)
    fits = rows >= config.scheduler.max_num_seqs and tokens >= config.scheduler.max_num_batched_tokens
    return Shapes(decode, prefill) if fits or not changed else Shapes.make(config.scheduler, limits)


def spec_of(
    recording: Recording, settings: Mapping[str, object] | None = None, *, cost: CostModel, host: HostCost
) -> ReplicaSpec:
    """The recorded engine under `settings`, with its programs and pages.

    Nobody is timed out or refused, unless the settings say when: what a slower engine would have lost is seen as time.
    Raises ValueError for settings that change how long a step takes: the times are those of the recorded engine.
    """
    config, before = config_of(recording, settings), config_of(recording)
    for name, value in _precision(config).items():
        if value != (recorded := _precision(before)[name]):
            raise ValueError(
                f"{name}={value!r} changes the time of a step, and here that is known for the recorded {recorded!r} "
                "only: replay it with --real"
            )
    limits = limits_of(config, VOCAB_SIZE)
    given = {path.rpartition(".")[2] for path in settings or {}}
    return ReplicaSpec(
        scheduler=dataclasses.replace(config.scheduler, **{k: v for k, v in PATIENT.items() if k not in given}),
        limits=limits,
        shapes=shapes_of(recording, config, limits),
        cost=cost,
        host=host,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        overlap=config.engine.overlap,
    )


def simulate_recording(
    recording: Recording,
    settings: Mapping[str, object] | None = None,
    *,
    calibration: Calibration | None = None,
    cost: CostModel | None = None,
    host: HostCost | None = None,
    on_turn: Callable[[Turn], object] | None = None,
) -> RunStats:
    """The recorded requests under `settings`. Step times: `cost`, else of `calibration`, else fitted to that run."""
    if cost is None:
        calibration = calibration or calibrate(recording)
        cost, host = calibration.cost, host or calibration.host
    spec = spec_of(recording, settings, cost=cost, host=host or HostCost())
    return Simulation(spec, RecordedWorkload(recording), on_turn=on_turn).run()

"""What of the scheduler can be changed while it runs, and how far."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

from jcb.config import SchedulerConfig, SchedulingPolicy
from jcb.types import RequestError

POLICIES: tuple[str, ...] = get_args(SchedulingPolicy)
KNOBS = ("max_num_batched_tokens", "max_num_seqs", "policy")


def describe(config: SchedulerConfig, ceiling: SchedulerConfig) -> dict[str, dict[str, Any]]:
    """Each knob's value and what it may be alone. `ceiling`: what the programs were compiled for."""
    most = min(ceiling.max_num_seqs, config.max_num_batched_tokens)
    return {
        "max_num_batched_tokens": {
            "value": config.max_num_batched_tokens,
            "minimum": config.max_num_seqs,
            "maximum": ceiling.max_num_batched_tokens,
        },
        "max_num_seqs": {"value": config.max_num_seqs, "minimum": 1, "maximum": most},
        "policy": {"value": config.policy, "choices": list(POLICIES)},
    }


def turn(config: SchedulerConfig, ceiling: SchedulerConfig, changes: Mapping[str, Any]) -> SchedulerConfig:
    """`config` with `changes` made together; RequestError 400 names a value that cannot be and its bounds.

    The queue keeps the size it had at the ceiling, so that no knob refuses a request for good.
    """
    for name in changes.keys() - set(KNOBS):
        raise RequestError(f"{name} is no knob; there are {', '.join(KNOBS)}", param=name, code="unknown_knob")
    if (policy := changes.get("policy", config.policy)) not in POLICIES:
        raise _refusal("policy", policy, f"must be one of {', '.join(POLICIES)}")
    seqs = changes.get("max_num_seqs", config.max_num_seqs)
    _check("max_num_seqs", seqs, 1, ceiling.max_num_seqs)
    tokens = changes.get("max_num_batched_tokens", config.max_num_batched_tokens)
    if "max_num_batched_tokens" in changes:
        _check("max_num_batched_tokens", tokens, seqs, ceiling.max_num_batched_tokens)
    else:
        _check("max_num_seqs", seqs, 1, tokens)
    queue = ceiling.max_queued or max(4 * ceiling.max_num_seqs, 64)
    return dataclasses.replace(
        config, max_num_seqs=seqs, max_num_batched_tokens=tokens, policy=policy, max_queued=queue
    )


def _check(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _refusal(name, value, f"must be a whole number from {least:,} to {most:,}")


def _refusal(name: str, value: Any, rule: str) -> RequestError:
    shown = "".join(c for c in repr(value)[:64] if c.isprintable())
    return RequestError(f"{name}={shown} {rule}", param=name, code="knob_out_of_range")

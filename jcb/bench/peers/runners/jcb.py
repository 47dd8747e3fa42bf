"""jcb itself: the engine's own loop, without a server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from jcb.bench.peers.runners.protocol import Stepper, serve, versions


class _Jcb:
    def __init__(self, core: Any) -> None:
        self._core = core

    @property
    def has_work(self) -> bool:
        return self._core.has_work

    def add(self, index: int, prompt: Sequence[int], output: int) -> None:
        from jcb.types import Request, SamplingParams

        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        self._core.add(
            Request(
                request_id=str(index),
                prompt_token_ids=tuple(prompt),
                params=params,
                arrival_time=time.monotonic(),
                max_tokens=output,
            )
        )

    def step(self) -> Sequence[tuple[int, Sequence[int]]]:
        outputs = self._core.step()
        for output in outputs:
            if output.error is not None:
                raise output.error
        return [(int(output.request_id), output.token_ids) for output in outputs if output.token_ids]


def load(settings: dict[str, Any]) -> tuple[Stepper, dict[str, Any]]:
    """settings: model, max_model_len, max_num_seqs, and `set`, more of jcb's own as "key=value"."""
    from jcb import __version__
    from jcb.config import ServeConfig
    from jcb.config_file import override, parse_settings
    from jcb.engine.build import load_engine

    values = {
        "max_model_len": settings["max_model_len"],
        "max_num_seqs": settings["max_num_seqs"],
        "enable_prefix_caching": False,
        "queue_timeout": 1e9,
        "run_timeout": 1e9,
        "max_queued": 100_000,
        "max_queued_tokens": 100_000_000,
    }
    config = override(ServeConfig(model=settings["model"]), values | parse_settings(settings["set"]))
    engine = load_engine(config)
    told = {
        "versions": {"jcb": __version__} | versions("jax", "jaxlib"),
        "precision": " ".join([engine.config.dtype, *settings["set"]]),
        "programs": engine.report["programs"],
        "ready_seconds": engine.report["ready_seconds"],
    }
    return _Jcb(engine.core), told


if __name__ == "__main__":
    serve(load)

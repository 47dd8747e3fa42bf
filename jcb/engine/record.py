"""Starts the recorder of an engine whose configuration has no "auto" left."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from jcb.config import ModelConfig, ServeConfig
from jcb.recording.events import Header
from jcb.recording.recorder import Recorder, RecordingFile
from jcb.steps.shapes import Shapes
from jcb.types import StepPlan


def start_recorder(
    file: RecordingFile, config: ServeConfig, model: ModelConfig, platform: str, shapes: Shapes
) -> Recorder:
    """Writes the header and takes notes from now on, on the clock `time.monotonic`."""

    def choose(plan: StepPlan) -> tuple[int, int, int]:
        shape = shapes.choose(plan)
        return shape.num_tokens, shape.num_rows, shape.pages_per_seq

    header = Header(
        model=config.server.served_model_name or config.model.rpartition("/")[2],
        vocab_size=model.vocab_size,
        platform=platform,
        started_at=time.time(),
        config=recorded_config(config, shapes),
        shape=dataclasses.asdict(model),
    )
    return Recorder(file, header, choose=choose, started=time.monotonic(), token_ids=config.engine.record_token_ids)


def recorded_config(config: ServeConfig, shapes: Shapes) -> dict[str, Any]:
    """The sections that decide about plans and step times; nothing of the server, which may hold secrets."""
    return {
        "dtype": config.dtype,
        "weights": config.weights,
        "activations": config.activations,
        "scheduler": dataclasses.asdict(config.scheduler),
        "cache": dataclasses.asdict(config.cache),
        "mesh": dataclasses.asdict(config.mesh),
        "engine": {"overlap": config.engine.overlap, "implementation": config.engine.implementation},
        "buckets": {
            "decode": [shape.num_rows for shape in shapes.decode],
            "prefill": [[shape.num_tokens, shape.num_rows] for shape in shapes.prefill],
        },
    }

"""Recordings written line by line, as the format says."""

import json
from pathlib import Path

CONFIG = {
    "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, "policy": "priority"},
    "cache": {"page_size": 16, "num_pages": 100, "enable_prefix_caching": True},
    "engine": {"overlap": True},
}


def write_recording(path: Path, steps: list[list[int]], **scheduler: object) -> Path:
    """A recording whose steps have rows of the given lengths."""
    config = CONFIG | {"scheduler": CONFIG["scheduler"] | scheduler}
    lines = [
        {"jcb_recording": 1, "model": "m", "vocab_size": 300, "platform": "cpu", "started_at": 0.0, "config": config}
    ]
    for number, q_lens in enumerate(steps):
        rows = [[i, i, 0, q_len, "new", 1] for i, q_len in enumerate(q_lens)]
        lines.append({"event": "step", "step": number, "t": 0.1 * number, "rows": rows, "preempted": []})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path

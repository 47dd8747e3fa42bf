"""Which chips a plan is for, from words such as "h200", "v6e-8" or "v6e:2x4"."""

from __future__ import annotations

import dataclasses
import re

from jcb.chips import Chip, chip_named, parse_topology
from jcb.engine.memory import physical_memory
from jcb.engine.resolve import auto_dtype


def parse_chips(text: str) -> tuple[Chip, int]:
    """The chip, and how many there are. "cpu" is the machine at hand: its memory, and the data type jcb would take.

    Raises ValueError that says what is known.
    """
    if match := re.fullmatch(r"([a-z0-9]+)-([1-9][0-9]{0,3})", text.strip().lower()):
        return chip_named(match[1]), int(match[2])
    if ":" in text:
        topology = parse_topology(text)
        return topology.chip, topology.num_devices
    chip = chip_named(text.strip())
    if chip.platform == "cpu":
        title = f"this machine (speeds of {chip.title})"
        chip = dataclasses.replace(chip, title=title, memory=physical_memory(), dtype=auto_dtype("cpu"))
    return chip, 1


def split_of(tensor_parallel: int | None, configured: int, named: int) -> int:
    """Devices that share the model: as asked, else as configured, else all that were named.

    Raises ValueError where there are not so many, or where they do not make whole replicas.
    """
    count = tensor_parallel or (configured if configured > 1 else named)
    if named > 1 and (count > named or named % count):
        raise ValueError(f"--tp {count} does not divide the {named} devices that --chip names")
    return count

"""The text of an optimised XLA program, parsed as far as counting needs it."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

_ITEM_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
_SHAPE = re.compile(r"(\w+)\[([0-9,<=]*)\](?:\{([^}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_HAS_WORKSPACE = re.compile(r'custom_call_target="__cu(?:blas|dnn)')  # their last result is scratch memory
_HEADER = re.compile(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$")


@dataclass(frozen=True)
class Shape:
    """One array. bits: of an element. nbytes: as it lies in memory, tiles padded; 0 while it is in on-chip memory."""

    dtype: str
    dims: tuple[int, ...]
    bits: int
    nbytes: int

    @staticmethod
    def parse_all(text: str) -> tuple[Shape, ...]:
        """Every array that a type names, tuples flattened."""
        return tuple(Shape._parse(*match.groups()) for match in _SHAPE.finditer(text))

    @staticmethod
    def _parse(dtype: str, dims: str, layout: str | None) -> Shape:
        sizes = tuple(int(size.lstrip("<=")) for size in dims.split(",") if size)
        padded = list(sizes)
        if layout and (tile := re.search(r"T\(([\d,]+)\)", layout)):
            order = [int(index) for index in layout.partition(":")[0].split(",") if index]
            for size, axis in zip(reversed([int(n) for n in tile[1].split(",")]), order, strict=False):
                padded[axis] = -(-padded[axis] // size) * size
        bits = _ITEM_BITS.get(dtype) or next((int(n) for n in re.findall(r"\d+", dtype)[:1]), 0)
        on_chip = layout is not None and re.search(r"S\([1-4]\)", layout) is not None
        return Shape(dtype, sizes, bits, 0 if on_chip else math.prod(padded) * bits // 8)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation. text: all that follows the opening bracket of its operands."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    text: str
    is_root: bool

    @property
    def nbytes(self) -> int:
        return sum(shape.nbytes for shape in self.shapes)

    def called(self, *keys: str) -> list[str]:
        """Names of the computations under attributes such as "body"."""
        found = [re.search(rf"{key}=(?:\{{([^}}]*)\}}|%([\w.\-]+))", self.text) for key in keys]
        return [name for match in found if match for name in _NAME.findall(match[0].partition("=")[2])]


class Computation:
    """Instructions by name, with their users."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.instructions: dict[str, Instruction] = {}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = defaultdict(list)
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                users[operand].append(instruction)
        return users

    @cached_property
    def root(self) -> Instruction:
        return next(each for each in self.instructions.values() if each.is_root)

    @cached_property
    def parameters(self) -> list[Instruction]:
        found = [each for each in self.instructions.values() if each.opcode == "parameter"]
        return sorted(found, key=lambda each: int(each.text.partition(")")[0]))


@dataclass(frozen=True)
class Module:
    """A whole program: its computations by name, and which one is run."""

    computations: dict[str, Computation]
    entry: Computation


def parse(text: str) -> Module:
    """The module that `text` (a compiled program's `as_text()`) spells. Raises ValueError when it has no entry."""
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[1], Computation(header[1]))
            if line.startswith("ENTRY"):
                entry = current
        elif line.startswith("}"):
            current = None
        elif current is not None and " = " in line:
            instruction = _instruction(line)
            current.instructions[instruction.name] = instruction
    if entry is None:
        raise ValueError("the text has no ENTRY computation")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction:
    left, _, right = line.strip().partition(" = ")
    kind_end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    opcode, _, rest = right[kind_end:].strip().partition("(")
    operands = rest[: _closing("(" + rest, 0) - 1]
    shapes = Shape.parse_all(right[:kind_end])
    return Instruction(
        name=left.removeprefix("ROOT ").lstrip("%"),
        opcode=opcode,
        shapes=shapes[:1] if _HAS_WORKSPACE.search(rest) else shapes,
        operands=tuple(_NAME.findall(operands)),
        text=rest,
        is_root=left.startswith("ROOT "),
    )


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    raise ValueError(f"unbalanced brackets in {text[start : start + 80]!r}")

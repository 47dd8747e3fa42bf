"""Memory traffic and arithmetic of a compiled program, counted in its optimised text.

XLA's own summary counts the body of a loop once, so a model whose layers are scanned looks as if it had one. Here
loops count as often as they run, fusions read only what they slice, updates in place write only what they change, and
what stays in on-chip memory is free. A conditional counts its cheapest branch: what a step without extras runs.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass

from jcb.aot.hlo import Computation, Instruction, Module, parse

_FREE = frozenset(
    {
        "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
        "iota", "opt-barrier", "add-dependency", "domain",
    }
)  # fmt: skip
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})
_RENAMES = frozenset({"bitcast", "copy", "convert", "reshape", "transpose"})
_HINTS = frozenset({"AssumeGatherIndicesInBound", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"})
_COST = re.compile(r'cost_estimate(?:"?:\s*|_json\s*=\s*")(\{[^{}]*\})')  # a kernel's own, on TPU and on GPU
_ATTENTION = re.compile(r'op_name="[^"]*paged_attention')
_MOVES = frozenset({"copy", "copy-start", "transpose", "convert", "concatenate", "pad", "select", "broadcast"})


@dataclass
class Traffic:
    """Bytes moved to and from memory, floating-point operations, and loops whose length the text does not tell.

    attention_bytes, attention_flops: the part that attention kernels state for themselves, for full page tables.
    """

    nbytes: float = 0.0
    flops: float = 0.0
    attention_bytes: float = 0.0
    attention_flops: float = 0.0
    unknown_loops: int = 0

    def at(self, share: float) -> Traffic:
        """The same when page tables are only filled to `share`."""
        absent = 1.0 - share
        return Traffic(
            self.nbytes - absent * self.attention_bytes,
            self.flops - absent * self.attention_flops,
            share * self.attention_bytes,
            share * self.attention_flops,
            self.unknown_loops,
        )

    def add(self, other: Traffic, times: int = 1) -> None:
        """Count `other` so many times more."""
        self.nbytes += times * other.nbytes
        self.flops += times * other.flops
        self.attention_bytes += times * other.attention_bytes
        self.attention_flops += times * other.attention_flops
        self.unknown_loops += other.unknown_loops


def count(text: str) -> Traffic:
    """The traffic of one run of a compiled program, given its `as_text()`. Loops of unknown length count once."""
    module = parse(text)
    return _Counter(module).computation(module.entry)


def large_moves(text: str, num_elements: int) -> list[str]:
    """Names of instructions that rewrite an array of at least `num_elements`, such as a copy or a transpose."""
    module = parse(text)
    return [
        f"{each.opcode} {each.name}"
        for computation in module.computations.values()
        for each in computation.instructions.values()
        if each.opcode in _MOVES and max((math.prod(shape.dims) for shape in each.shapes), default=0) >= num_elements
    ]


class _Counter:
    """One walk over a module; computations are counted once each."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[str, Traffic] = {}

    def computation(self, computation: Computation) -> Traffic:
        if computation.name not in self._known:
            total = Traffic()
            for instruction in computation.instructions.values():
                self._instruction(computation, instruction, total)
            self._known[computation.name] = total
        return self._known[computation.name]

    def _named(self, name: str) -> Computation:
        return self._module.computations[name]

    def _instruction(self, owner: Computation, each: Instruction, total: Traffic) -> None:
        opcode = each.opcode.removesuffix("-start")
        if opcode in _FREE or opcode.endswith(("-done", "-update")):
            return
        if opcode == "while":
            times = self._trips(each)
            body = Traffic()
            for name in each.called("body", "condition"):
                body.add(self.computation(self._named(name)))
            total.add(body, times or 1)
            total.unknown_loops += times is None
        elif opcode == "conditional":
            names = each.called("branch_computations", "true_computation", "false_computation")
            total.add(min((self.computation(self._named(name)) for name in names), key=lambda each: each.nbytes))
        elif opcode in ("call", "async"):
            for name in each.called("to_apply", "calls", "called_computations"):
                total.add(self.computation(self._named(name)))
        elif opcode == "fusion":
            for name in each.called("calls"):
                total.nbytes += self._fusion_bytes(self._named(name))
                total.flops += self._fusion_flops(self._named(name))
        elif opcode == "custom-call":
            self._custom_call(owner, each, total)
        else:
            total.nbytes += self._plain_bytes(owner, each)
            total.flops += _matmul_flops(owner, each)

    def _trips(self, loop: Instruction) -> int | None:
        """How often a loop runs: what the compiler noted, else the one number that its condition compares with."""
        if noted := re.search(r'known_trip_count"?:\{"n":"(\d+)"', loop.text):
            return int(noted[1])
        found: set[int] = set()
        waiting = loop.called("condition")
        while waiting:
            for each in self._named(waiting.pop()).instructions.values():
                waiting += each.called("calls")
                if each.opcode == "constant" and (number := re.match(r"(\d+)\)", each.text)):
                    found.add(int(number[1]))
        return found.pop() if len(found) == 1 else None

    def _fusion_bytes(self, inner: Computation) -> float:
        read = sum(self._share(inner, each, 1.0) * each.nbytes for each in inner.parameters if each.nbytes)
        return read + self._written(inner, inner.root)

    def _fusion_flops(self, inner: Computation) -> float:
        flops = 0.0
        for each in inner.instructions.values():
            flops += _matmul_flops(inner, each)
            if each.opcode == "fusion":
                flops += sum(self._fusion_flops(self._named(name)) for name in each.called("calls"))
        return flops

    def _share(self, inner: Computation, value: Instruction, beyond: float) -> float:
        """The share of `value` that a fused computation looks at; `beyond`: of what it gives back, that others do.

        Nothing in a fusion is made whole: what only moves or converts elements does so for those that are used.
        """
        share = beyond if value.is_root else 0.0
        for user in inner.users[value.name]:
            first = user.operands[0] == value.name
            if user.opcode in _RENAMES:
                share += self._share(inner, user, beyond)
            elif user.opcode in _SLICES and first:
                share += _elements(user) / max(_elements(value), 1)
            elif user.opcode in ("dynamic-update-slice", "scatter") and first:
                continue
            elif user.opcode == "fusion":
                nested = self._named(user.called("calls")[0])
                outside = self._share(inner, user, beyond)
                for index, operand in enumerate(user.operands):
                    if operand == value.name:
                        share += self._share(nested, nested.parameters[index], outside)
            else:
                share += 1.0
        return min(share, 1.0)

    def _written(self, inner: Computation, root: Instruction) -> int:
        """Bytes that a fused computation writes: all of its result, or what it updates in place."""
        if not root.nbytes:
            return 0
        if root.opcode == "tuple":
            return sum(self._written(inner, inner.instructions[name]) for name in root.operands)
        if root.opcode == "bitcast":
            return self._written(inner, inner.instructions[root.operands[0]])
        if root.opcode in ("dynamic-update-slice", "scatter"):
            return _logical(inner.instructions[root.operands[1 if root.opcode == "dynamic-update-slice" else -1]])
        if root.opcode == "fusion":
            nested = self._named(root.called("calls")[0])
            return self._written(nested, nested.root)
        return root.nbytes

    def _plain_bytes(self, owner: Computation, each: Instruction) -> int:
        operands = [owner.instructions[name] for name in each.operands if name in owner.instructions]
        opcode = each.opcode.removesuffix("-start")
        if each.opcode.endswith("-start"):  # (operands, result, context): a copy out of or into on-chip memory
            source = operands[0].nbytes if opcode == "copy" else _logical_of(each, -2)
            return (source if operands[0].nbytes else 0) + (each.shapes[-2].nbytes if len(each.shapes) > 2 else 0)
        if opcode in _SLICES:
            return (_logical(each) if operands[0].nbytes else 0) + each.nbytes
        if opcode in ("dynamic-update-slice", "scatter"):
            return 2 * _logical(operands[1 if opcode == "dynamic-update-slice" else -1]) if each.nbytes else 0
        return sum(operand.nbytes for operand in operands) + each.nbytes

    def _custom_call(self, owner: Computation, each: Instruction, total: Traffic) -> None:
        target = re.search(r'custom_call_target="([^"]*)"', each.text)
        name = target[1] if target else ""
        if name in _HINTS:
            return
        if estimate := _COST.search(each.text):
            cost = json.loads(estimate[1].replace("\\22", '"'))
            stated = Traffic(float(cost.get("bytes_accessed", 0)), float(cost.get("flops", 0)))
            if _ATTENTION.search(each.text):
                stated.attention_bytes, stated.attention_flops = stated.nbytes, stated.flops
            total.add(stated)
            return
        total.nbytes += sum(owner.instructions[n].nbytes for n in each.operands if n in owner.instructions)
        total.nbytes += each.nbytes
        total.flops += _matmul_flops(owner, each)


def _elements(each: Instruction) -> int:
    return math.prod(each.shapes[0].dims)


def _logical(each: Instruction) -> int:
    """Bytes of a result by its elements, wherever it lies."""
    return sum(math.prod(shape.dims) * shape.bits // 8 for shape in each.shapes)


def _logical_of(each: Instruction, index: int) -> int:
    shape = each.shapes[index] if len(each.shapes) >= -index else each.shapes[0]
    return math.prod(shape.dims) * shape.bits // 8


def _matmul_flops(owner: Computation, each: Instruction) -> float:
    """Two operations for every multiplication of a matrix product, 0 for anything else."""
    contracted = re.search(r"lhs_contracting_dim(?:s=\{|ensions\":\[)([\d,\"]*)", each.text)
    if contracted and each.opcode in ("dot", "custom-call"):
        left = owner.instructions[each.operands[0]].shapes[0]
        axes = [int(axis) for axis in re.findall(r"\d+", contracted[1])]
        return 2.0 * math.prod(each.shapes[0].dims) * math.prod(left.dims[axis] for axis in axes)
    if each.opcode == "convolution":
        return 2.0 * math.prod(each.shapes[0].dims) * _convolution_depth(owner, each)
    return 0.0


def _convolution_depth(owner: Computation, each: Instruction) -> float:
    """Products summed for one result: input features times the window, less the holes that dilation makes."""
    kernel = owner.instructions[each.operands[1]].shapes[0]
    labels = re.search(r"dim_labels=\w+_(\w+)->", each.text)
    features = kernel.dims[labels[1].index("i")] if labels else 1
    window = re.search(r"window=\{size=([\dx]+)", each.text)
    dilated = re.search(r"lhs_dilate=([\dx]+)", each.text)
    sizes = [math.prod(int(n) for n in found[1].split("x")) if found else 1 for found in (window, dilated)]
    return features * max(sizes[0] / sizes[1], 1.0)

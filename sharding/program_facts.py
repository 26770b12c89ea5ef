"""What a compiled program holds, sends and moves, read from the program itself.

Bytes moved are those of arguments and results of every operation that runs by itself, loops'
bodies as often as they run. What an operation only picks from counts by what it picks: rows of
a gather, slices, pages of a cache, the experts that some token chose.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import jax

from sharding.hlo_text import Array, Computation, Instruction, Program

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# What neither reads nor writes memory by itself.
_FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
        *("partition-id", "replica-id", "opt-barrier", "domain", "async-update", "async-done"),
    )
)
_PICKS = ("gather", "dynamic-slice", "slice")
_UPDATES = ("custom-call", "fusion", "scatter", "dynamic-update-slice")
_PASSES = ("bitcast", "reshape", "convert", "copy", "transpose", "bitcast-convert")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of a program on one device.

    Attributes:
      arguments: parameters, caches, and the step's inputs.
      aliased: results that take an argument's place: the caches.
      results: all of them, the aliased ones among them.
      temporaries: what the program needs while it runs.
      peak: most at one time, as the compiler counts.
    """

    arguments: int
    aliased: int
    results: int
    temporaries: int
    peak: int

    @property
    def total(self) -> int:
        """What a device must have for the program."""
        return self.arguments + self.results - self.aliased + self.temporaries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """Exchanges of one kind between the devices of a stage, in one step.

    Attributes:
      kind: as the compiler calls it.
      count: how often.
      bytes: of the results on one device.
    """

    kind: str
    count: int
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What decides how much of a large array an operation touches.

    Attributes:
      experts: routed experts that a device holds.
      active: of them, those that some token of the step chose.
      requests: that the step's tokens belong to.
    """

    experts: int
    active: float
    requests: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes that one kind of operation moves in a step.

    Attributes:
      name: kernel, or opcode and place in the model.
      count: how often it runs.
      bytes: of arguments and results.
    """

    name: str
    count: int
    bytes: int


def memory_use(compiled: jax.stages.Compiled) -> MemoryUse:
    """Bytes that the compiler allocates on each device."""
    stats = compiled.memory_analysis()
    return MemoryUse(
        arguments=stats.argument_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        results=stats.output_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        peak=stats.peak_memory_in_bytes,
    )


def collectives(program: Program) -> tuple[Collective, ...]:
    """What the program exchanges, by kind; loops' bodies as often as they run."""
    counts: collections.Counter[str] = collections.Counter()
    sizes: collections.Counter[str] = collections.Counter()
    for _, instruction, times in executed(program):
        kind = re.sub(r"-start$", "", instruction.opcode)
        if kind not in COLLECTIVES:
            continue
        counts[kind] += times
        sizes[kind] += times * _received(instruction)
    return tuple(
        Collective(kind=kind, count=counts[kind], bytes=sizes[kind]) for kind in sorted(counts)
    )


def _received(instruction: Instruction) -> int:
    """Bytes of a collective's results; one that is started lists its arguments before them."""
    arrays = instruction.arrays
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        arrays = arrays[len(arrays) // 2 :]
    return sum(array.bytes for array in arrays)


def executed(
    program: Program, name: str | None = None, times: int = 1
) -> Iterator[tuple[Computation, Instruction, int]]:
    """Operations that run by themselves, and how often.

    A loop that only the device can count runs once. Of a conditional's branches the shortest
    runs: the others are for logits that are changed and draws that are truncated.
    """
    computation = program.computations[name or program.entry]
    for instruction in computation.instructions.values():
        called = program.runs(instruction)
        if not called:
            yield computation, instruction, times
        elif instruction.opcode == "conditional":
            called = (min(called, key=lambda branch: sum(1 for _ in program.walk(branch))),)
        for inner in called:
            trips = (instruction.trips or 1) if instruction.opcode == "while" else 1
            yield from executed(program, inner, times * trips)


def moved_bytes(program: Program, sizes: Sizes) -> tuple[Moved, ...]:
    """Bytes moved by every kind of operation, the most first.

    Args:
      program: of one stage and step.
      sizes: how much of the experts and caches the step touches.
    """
    counts: collections.Counter[str] = collections.Counter()
    total: collections.Counter[str] = collections.Counter()
    for computation, instruction, times in executed(program):
        size = operation_bytes(program, computation, instruction, sizes)
        if size:
            label = operation_label(instruction)
            counts[label] += times
            total[label] += times * size
    return tuple(
        Moved(name=name, count=counts[name], bytes=size) for name, size in total.most_common()
    )


def operation_label(instruction: Instruction) -> str:
    """The kernel, or the opcode with the last names of its place, layers counted together."""
    if instruction.kernel:
        return instruction.kernel
    places = [p for p in instruction.op_name.split("/") if not p.startswith(("jit(", "layer_"))]
    return " ".join([re.sub(r"-start$", "", instruction.opcode), "/".join(places[-2:])]).strip()


def operation_bytes(
    program: Program, computation: Computation, instruction: Instruction, sizes: Sizes
) -> int:
    """Bytes of arguments and results that one operation touches."""
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
        return 0
    operands = [computation.instructions[name] for name in instruction.operands]
    if instruction.kernel:
        return kernel_bytes(instruction, operands, sizes)
    if instruction.opcode == "fusion":
        return _fusion_bytes(program, instruction, operands)
    if instruction.opcode in _PICKS:
        return 2 * instruction.bytes + sum(operand.bytes for operand in operands[1:])
    if instruction.opcode == "dynamic-update-slice":
        return 2 * operands[1].bytes
    if instruction.opcode == "scatter":
        return sum(operand.bytes for operand in operands[1:]) + operands[-1].bytes
    if instruction.opcode.endswith("-start"):
        return sum(operand.bytes for operand in operands) + _received(instruction)
    return instruction.bytes + sum(operand.bytes for operand in operands)


def kernel_bytes(instruction: Instruction, operands: list[Instruction], sizes: Sizes) -> int:
    """Bytes that a handwritten kernel touches.

    Experts' weights count for the active experts, caches for the rows that are written, named by
    slots, or on the pages of the requests; everything else once and in full.
    """
    name, arrays = instruction.kernel or "", [operand.arrays[0] for operand in operands]
    seen, total = set(), instruction.bytes
    if name.startswith("write_"):
        slots = next(array for array in arrays if array.dtype == "s32")
        total = sum(_rows(cache, slots.elements) for cache in instruction.arrays)
        arrays = arrays[len(instruction.arrays) :]
        operands = operands[len(instruction.arrays) :]
    for index, (operand, array) in enumerate(zip(operands, arrays, strict=True)):
        if operand.name in seen:
            continue
        seen.add(operand.name)
        total += _touched(name, arrays, index, array, instruction, sizes)
    return total


def _touched(
    name: str,
    arrays: list[Array],
    index: int,
    array: Array,
    instruction: Instruction,
    sizes: Sizes,
) -> int:
    packed = array.dtype in ("u8", "u16", "u32")
    if packed and len(array.shape) == 3 and array.shape[0] == sizes.experts:
        return round(array.bytes * sizes.active / sizes.experts)
    if packed and name == "sparse_attention":
        caches = [i for i, other in enumerate(arrays) if other.dtype == "u8"]
        slots = [other for other in arrays if other.dtype == "s32"]
        return _rows(array, slots[caches.index(index) // 2].elements)
    if packed and name == "index_scores":
        positions = instruction.arrays[0].shape[-1]
        return _rows(array, sizes.requests * positions)
    return array.bytes


def _rows(array: Array, rows: int) -> int:
    """Bytes of at most `rows` rows of an array."""
    return min(rows, array.shape[0]) * (array.bytes // max(1, array.shape[0]))


def _fusion_bytes(program: Program, instruction: Instruction, operands: list[Instruction]) -> int:
    inner = program.computations[instruction.called("calls")[0]]
    total, replaced = 0, set()
    root = inner.instructions[inner.root]
    results = [root]
    if root.opcode == "tuple":
        results = [inner.instructions[name] for name in root.operands]
    for result in results:
        written, source = _written(inner, result)
        total += written
        replaced |= {source} - {None}
    for number, operand in enumerate(operands):
        parameter = inner.parameter(number)
        if parameter is not None and parameter.name not in replaced:
            total += min(operand.bytes, _read(inner, parameter))
    return total


def _written(inner: Computation, result: Instruction) -> tuple[int, str | None]:
    """Bytes a fusion writes for a result, and the parameter that it updates in place."""
    while result.opcode in _PASSES and result.opcode != "convert":
        result = inner.instructions[result.operands[0]]
    if result.opcode == "dynamic-update-slice":
        written = inner.instructions[result.operands[1]].bytes
    elif result.opcode == "scatter":
        written = inner.instructions[result.operands[-1]].bytes
    else:
        return result.bytes, None
    source = inner.instructions[result.operands[0]]
    while source.opcode in _PASSES:
        source = inner.instructions[source.operands[0]]
    return written, source.name if source.opcode == "parameter" else None


def _read(inner: Computation, source: Instruction) -> int:
    """Bytes of a fusion's parameter that it reads: what it picks, if it only picks."""
    total, size = 0, max(1, source.bytes // max(1, math.prod(source.arrays[0].shape)))
    for user in inner.users(source.name):
        if user.opcode in _PICKS and user.operands[0] == source.name:
            total += user.arrays[0].elements * size
        elif user.opcode in _PASSES:
            total += _read(inner, user) * source.bytes // max(1, user.bytes)
        else:
            return source.bytes
    return total


def large_arrays(program: Program, least: int) -> Mapping[str, Array]:
    """Results of at least `least` bytes that operations write anew, by instruction.

    What a kernel, a fusion or an update returns in the shape of an argument is taken to be that
    argument, updated in place.
    """
    found = {}
    for computation, instruction, _ in executed(program):
        if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
            continue
        kept = []
        if instruction.opcode in _UPDATES:
            operands = [computation.instructions[name] for name in instruction.operands]
            kept = [array for operand in operands for array in operand.arrays]
        for array in instruction.arrays:
            if array.bytes >= least and array not in kept:
                found[instruction.name] = array
    return found

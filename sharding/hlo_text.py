"""Reads the text of a compiled program: computations, instructions, shapes and loops."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "s4", "u4", "f8e4m3fn", "f8e5m2", "f8e8m0fnu"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_OPCODE = re.compile(r"^([\w\-]+)\(")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_COMMENT = re.compile(r"/\*index=\d+\*/")
_KERNEL = re.compile(r'[ {]name = "(\w+)"')


@dataclasses.dataclass(frozen=True)
class Array:
    """An array's element type, as the compiler spells it, and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Of all elements; tokens and other types that hold none count nothing."""
        return self.elements * _BYTES.get(self.dtype, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One operation of a computation.

    Attributes:
      name: unique in the program.
      arrays: its result, or the parts of it.
      opcode: what it does.
      operands: names of instructions of the same computation.
      attributes: the rest of its text.
    """

    name: str
    arrays: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def bytes(self) -> int:
        """Of the result."""
        return sum(array.bytes for array in self.arrays)

    @property
    def kernel(self) -> str | None:
        """Name of the handwritten kernel that it launches."""
        if self.opcode != "custom-call" or "gpu.triton" not in self.attributes:
            return None
        found = _KERNEL.findall(self.attributes)
        return found[-1] if found else "unnamed"

    @property
    def op_name(self) -> str:
        """Where in the model it comes from, as JAX names the place."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def trips(self) -> int | None:
        """How often a loop's body runs; None where only the device knows."""
        found = _TRIPS.search(self.attributes)
        return int(found[1]) if found else None

    def called(self, *keys: str) -> tuple[str, ...]:
        """Computations named by attributes such as `body`."""
        names: list[str] = []
        for key in keys:
            found = re.search(rf"\b{key}=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", self.attributes)
            if found:
                names += re.findall(r"[\w.\-]+", found[1] or found[2])
        return tuple(names)


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order of the text, and the name of the result."""

    instructions: Mapping[str, Instruction]
    root: str

    def parameter(self, number: int) -> Instruction | None:
        """The instruction that stands for an argument."""
        for instruction in self.instructions.values():
            if instruction.opcode == "parameter" and instruction.operands == (str(number),):
                return instruction
        return None

    def users(self, name: str) -> list[Instruction]:
        """Instructions that read one."""
        return [i for i in self.instructions.values() if name in i.operands]


@dataclasses.dataclass(frozen=True)
class Program:
    """Computations by name, and the name of the one that runs."""

    computations: Mapping[str, Computation]
    entry: str

    def walk(self, name: str | None = None) -> Iterator[tuple[Computation, Instruction]]:
        """Every instruction of a computation and of those it runs, loops' bodies once.

        Fusions count as one instruction, and every branch of a conditional is walked.
        """
        computation = self.computations[name or self.entry]
        for instruction in computation.instructions.values():
            yield computation, instruction
            for called in self.runs(instruction):
                yield from self.walk(called)

    def runs(self, instruction: Instruction) -> tuple[str, ...]:
        """Computations that an instruction runs as they are: a loop's body, branches, calls."""
        keys = {
            "while": ("body",),
            "conditional": ("branch_computations", "true_computation", "false_computation"),
            "call": ("to_apply",),
            "async-start": ("calls",),
        }.get(instruction.opcode, ())
        return instruction.called(*keys)


def parse(text: str) -> Program:
    """Reads `Compiled.as_text()`.

    Raises:
      ValueError: the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = current = root = None
    instructions: dict[str, Instruction] = {}
    for line in text.splitlines():
        if current is None:
            header = _HEADER.match(line)
            if header:
                current, instructions = header[2], {}
                entry = current if header[1] else entry
        elif line.startswith("}"):
            computations[current] = Computation(instructions, root or next(reversed(instructions)))
            current = root = None
        elif (found := _NAME.match(line)) is not None:
            instruction = _instruction(found[2], _COMMENT.sub("", found[3]))
            instructions[instruction.name] = instruction
            root = instruction.name if found[1] else root
    if entry is None:
        raise ValueError("the program's text has no ENTRY computation")
    return Program(computations, entry)


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text) if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].lstrip()
    opcode = _OPCODE.match(rest)
    if opcode is None:
        raise ValueError(f"instruction {name} of the program has no opcode: {rest[:80]}")
    start = opcode.end() - 1
    close = start + _closing(rest[start:])
    arrays = tuple(
        Array(dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(shape)
    )
    operands = tuple(
        operand.strip().rsplit(" ", 1)[-1].lstrip("%")
        for operand in rest[start + 1 : close - 1].split(", ")
        if operand
    )
    return Instruction(
        name=name,
        arrays=arrays,
        opcode=opcode[1],
        operands=operands,
        attributes=rest[close:],
    )


def _closing(text: str) -> int:
    """Index after the parenthesis that closes the one `text` starts with."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return index + 1
    return len(text)

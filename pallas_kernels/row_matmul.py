"""The kernel of all linear layers: rows times the transpose of a weight stored [N, K].

What a row gives depends on that row alone. Its products are added in an order that N and K
decide: tiles of ROW_TILE rows against blocks of outputs, blocks of inputs in order, and a few
splits of the inputs whose sums are added in order. The number of rows decides only what runs at
the same time: how many tiles of rows share a block of weights, and whether the splits are
programs of their own, so that few rows keep a whole GPU reading.

The weight is the left operand of the tensor cores, which then take 16 rows as readily as 64, and
a decoded weight straight from registers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.dispatch import Implementation, KernelError, launch, whole
from pallas_kernels.kernel_math import largest_power_of_two_divisor, next_power_of_two

ROW_TILE = 16  # rows of one product
_MOST_TILES = 4  # tiles of rows that share a block of weights
_OUTPUTS = 64  # outputs of a block at most: rows of a tensor-core instruction of four warps
_INPUTS = 128  # inputs of a block at most
_PROGRAMS = 256  # that keep a GPU busy: about two for each of 132 processors
_LEAST_SPLIT = 512  # inputs of a split at least


@dataclasses.dataclass(frozen=True)
class Format:
    """How kernels read blocks of weights and rows.

    Attributes:
      load: (int32 outputs, first input, number of inputs, *refs) -> pytree of what decoding a
        block of the weight needs beside its codes. Loaded one block ahead.
      decode: (block of the weight, what was loaded) -> bf16 values of the block.
      rows: bf16 tile of rows -> bf16 values to multiply.
    """

    load: Callable[..., Any]
    decode: Callable[[jax.Array, Any], jax.Array]
    rows: Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a product is cut; decides its bits, and depends on the weight alone.

    Attributes:
      outputs: of a block.
      inputs: of a block.
      splits: parts of the inputs that are summed on their own, each whole blocks.
    """

    outputs: int
    inputs: int
    splits: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What runs at the same time; decides no bits.

    Attributes:
      tiles: tiles of rows in a program.
      programs: splits that are programs of their own: all, or one that goes through them.
    """

    tiles: int
    programs: int


def choose_blocks(outputs: int, inputs: int, groups: int = 1) -> Blocks:
    """Blocks of a weight [outputs, inputs] whose outputs divide into groups.

    Raises:
      KernelError: the inputs or the outputs of a group do not divide into blocks of 16.
    """
    block = min(next_power_of_two(outputs, 16), _OUTPUTS)
    if groups > 1:
        block = largest_power_of_two_divisor(outputs // groups, _OUTPUTS)
    splits = 1
    while (
        -(-outputs // block) * splits < _PROGRAMS
        and inputs % (2 * splits * _INPUTS) == 0
        and inputs // (2 * splits) >= _LEAST_SPLIT
    ):
        splits *= 2
    depth = largest_power_of_two_divisor(inputs // splits, _INPUTS)
    if min(depth, block) < 16:
        raise KernelError(
            f"a weight of {outputs} outputs in {groups} groups and {inputs} inputs does not divide "
            "into blocks of 16 inputs, and of 16 outputs of a group; pad it"
        )
    return Blocks(block, depth, splits)


def choose_schedule(rows: int, outputs: int, blocks: Blocks) -> Schedule:
    """Schedule of a product of so many rows."""
    tiles = min(next_power_of_two(-(-rows // ROW_TILE)), _MOST_TILES)
    programs = -(-rows // (ROW_TILE * tiles)) * -(-outputs // blocks.outputs)
    return Schedule(tiles, blocks.splits if programs < _PROGRAMS else 1)


def row_matmul(
    x: jax.Array,
    weight: jax.Array,
    *side: jax.Array,
    name: str,
    format: Format,
    implementation: Implementation,
    groups: int = 1,
) -> jax.Array:
    """Product of rows with a weight, with float32 sums.

    Shapes: M rows, G groups, K inputs of a group, N outputs of all groups.

    Args:
      x: bf16[M, G * K].
      weight: [N, K]; consecutive outputs belong to a group.
      *side: arrays that decoding the weight needs.
      name: of the kernel.
      format: of weight and rows; `load` gets refs of `side`.
      implementation: "pallas" or "pallas_interpret".
      groups: G.

    Returns:
      float32[M, N].
    """
    (rows, _), (outputs, inputs) = x.shape, weight.shape
    blocks = choose_blocks(outputs, inputs, groups)
    schedule = choose_schedule(rows, outputs, blocks)
    height = ROW_TILE * schedule.tiles
    columns = -(-outputs // blocks.outputs)
    per_group = columns // groups
    span = inputs // schedule.programs
    spans = inputs // span
    partial = launch(
        functools.partial(
            _kernel,
            blocks=blocks,
            schedule=schedule,
            shape=(rows, outputs),
            format=format,
        ),
        x,
        weight,
        *side,
        name=name,
        # Tiles of rows run fastest, so that those at work together share a block of weights.
        grid=(-(-rows // height), columns, schedule.programs),
        in_specs=[
            pl.BlockSpec((height, span), lambda i, j, s: (i, j // per_group * spans + s)),
            pl.BlockSpec((blocks.outputs, span), lambda i, j, s: (j, s)),
            *map(whole, side),
        ],
        out_specs=pl.BlockSpec((None, height, blocks.outputs), lambda i, j, s: (s, i, j)),
        out_shape=jax.ShapeDtypeStruct((schedule.programs, rows, outputs), jnp.float32),
        num_warps=4,
        num_stages=4 if schedule.tiles == 1 else 3,
        implementation=implementation,
    )
    return functools.reduce(jnp.add, [partial[s] for s in range(schedule.programs)])


def _kernel(
    x_ref: jax.Array,
    weight_ref: jax.Array,
    *refs: jax.Array,
    blocks: Blocks,
    schedule: Schedule,
    shape: tuple[int, int],
    format: Format,
) -> None:
    """One program: `tiles` tiles of rows, one block of outputs, one or all of the splits.

    Rows and outputs past the end are read from the last one, and not written.
    """
    *side, out_ref = refs
    height, width, depth = ROW_TILE * schedule.tiles, blocks.outputs, blocks.inputs
    first_row, first_output = pl.program_id(0) * height, pl.program_id(1) * width
    span = x_ref.shape[1]
    first_input = pl.program_id(2) * span
    last_row, last_output = shape[0] - 1 - first_row, shape[1] - 1 - first_output
    outputs = jnp.arange(width)
    tiles = [t * ROW_TILE + jnp.arange(ROW_TILE) for t in range(schedule.tiles)]
    read = outputs if shape[1] % width == 0 else jnp.minimum(outputs, last_output)
    steps = span * schedule.programs // (blocks.splits * depth)

    def load(index: jax.Array) -> Any:
        return format.load(first_output + read, first_input + index * depth, depth, *side)

    def step(index: jax.Array, carry: tuple[Any, list[jax.Array]]) -> tuple[Any, list[jax.Array]]:
        beside, sums = carry
        following = load(jnp.minimum(index + 1, span // depth - 1))
        inputs = index * depth + jnp.arange(depth)
        weight = format.decode(triton.load(weight_ref.at[read[:, None], inputs[None, :]]), beside)
        found = []
        for rows, total in zip(tiles, sums, strict=True):
            rows = rows if shape[0] % height == 0 else jnp.minimum(rows, last_row)
            x = format.rows(triton.load(x_ref.at[rows[:, None], inputs[None, :]]))
            found.append(total + triton.dot(weight, x, trans_b=True))
        return following, found

    def split(
        index: jax.Array | int, carry: tuple[Any, list[jax.Array]]
    ) -> tuple[Any, list[jax.Array]]:
        beside, totals = carry
        beside, sums = jax.lax.fori_loop(index * steps, (index + 1) * steps, step, (beside, zeros))
        return beside, [a + b for a, b in zip(totals, sums, strict=True)]

    zeros = [jnp.zeros((width, ROW_TILE), jnp.float32)] * schedule.tiles
    splits = blocks.splits // schedule.programs
    _, totals = jax.lax.fori_loop(0, splits, split, (load(0), zeros))
    for rows, total in zip(tiles, totals, strict=True):
        inside = (rows <= last_row)[:, None] & (outputs <= last_output)[None, :]
        triton.store(out_ref.at[rows[:, None], outputs[None, :]], total.T, mask=inside)

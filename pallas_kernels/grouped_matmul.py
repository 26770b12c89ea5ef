"""Routed experts over packed FP4 weights."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats, grouped_kernels, numerics
from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.grouped_kernels import ROW_BLOCK, Plan, swiglu
from pallas_kernels.scaled_matmul import quantized, scaled_matmul_reference

_CHUNK = 512  # assignments compared with one another; any number gives the same plan
Packed = tuple[jax.Array, jax.Array]  # codes uint8[..., K / 2] and E8M0 scales uint8[..., K / 32]


def expert_mlp(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    w1: Packed,
    w2: Packed,
    w3: Packed,
    *,
    limit: float,
    partial: bool = False,
    implementation: Implementation,
) -> jax.Array:
    """Sum over each row's experts of w2(swiglu(w1(x), w3(x)) * weight).

    Shapes: M rows, A experts of a row, E experts held here, D hidden, F intermediate.

    Args:
      x: bf16[M, D].
      experts: int32[M, A], which experts, distinct in a row; an id outside 0..E-1 contributes
        nothing.
      weights: float32[M, A], routing weights.
      w1, w3: codes uint8[E, F, D / 2] and E8M0 scales uint8[E, F, D / 32].
      w2: codes uint8[E, D, F / 2] and E8M0 scales uint8[E, D, F / 32].
      limit: clamp of the SwiGLU.
      partial: whether F is a slice, so that a result may be rounded only after a sum
        over devices.
      implementation: which one runs.

    Returns:
      float32[M, D], experts added in ascending order.
    """
    chex.assert_rank([x, experts, weights, *w1, *w2, *w3], [2, 2, 2, 3, 3, 3, 3, 3, 3])
    chex.assert_equal_shape([experts, weights])
    held = w1[0].shape[0]
    if resolve(implementation) == "xla":
        inputs = quantized(x)

        def one(expert: jax.Array, weight: jax.Array) -> jax.Array:
            def pick(array: jax.Array) -> jax.Array:
                return jax.lax.dynamic_index_in_dim(array, expert, keepdims=False)

            packed = jax.tree.map(pick, (w1, w2, w3))
            return expert_reference(inputs, weight, *packed, limit=limit, partial=partial)

        return _expert_by_expert(one, experts, weights, count=held, outputs=w2[0].shape[1])
    if not experts.size:
        return jnp.zeros(x.shape, jnp.float32)
    plan, places = sort_by_expert(experts, held)
    inputs = even_first(quantized(x)).astype(jnp.bfloat16)
    hidden = grouped_kernels.gate_up(
        inputs, weights.reshape(-1), w1, w3, plan, limit=limit, implementation=implementation
    )
    out = grouped_kernels.down(hidden, w2, plan, partial=partial, implementation=implementation)
    return combine(out, places)


def expert_reference(
    x: jax.Array,
    weight: jax.Array,
    w1: Packed,
    w2: Packed,
    w3: Packed,
    *,
    limit: float,
    partial: bool,
) -> jax.Array:
    """Defines one expert's result, float32[M, D].

    Args:
      x: float32[M, D], quantized.
      weight: float32[M, 1], routing weights.
      w1, w2, w3: codes and scales of the expert.
      limit: clamp of the SwiGLU.
      partial: whether the result is not rounded yet.
    """
    gate = numerics.round_bf16(scaled_matmul_reference(x, formats.dequantize_fp4(*w1)))
    up = numerics.round_bf16(scaled_matmul_reference(x, formats.dequantize_fp4(*w3)))
    hidden = (swiglu(gate, up, limit) * weight).astype(jnp.bfloat16)
    out = scaled_matmul_reference(quantized(hidden), formats.dequantize_fp4(*w2))
    return out if partial else numerics.round_bf16(out)


def _expert_by_expert(
    one: Callable[[jax.Array, jax.Array], jax.Array],
    experts: jax.Array,
    weights: jax.Array,
    *,
    count: int,
    outputs: int,
) -> jax.Array:
    """Adds `one(expert, weight of each row)` where chosen; skips an expert that no row chose."""

    def add_expert(expert: jax.Array, total: jax.Array) -> jax.Array:
        chosen = experts == expert
        weight = jnp.sum(jnp.where(chosen, weights, 0.0), axis=-1, keepdims=True)

        def add(total: jax.Array) -> jax.Array:
            out = one(expert, weight)
            return total + jnp.where(jnp.any(chosen, axis=-1, keepdims=True), out, 0.0)

        return jax.lax.cond(jnp.any(chosen), add, lambda total: total, total)

    total = jnp.zeros((experts.shape[0], outputs), jnp.float32)
    return jax.lax.fori_loop(0, count, add_expert, total)


def even_first(x: jax.Array) -> jax.Array:
    """[M, D] with the even columns before the odd ones, as the two nibbles of a byte need them."""
    return x.reshape(x.shape[0], -1, 2).swapaxes(1, 2).reshape(x.shape)


def num_blocks(assignments: int, experts: int) -> int:
    """Blocks of rows that suffice however the assignments fall on the experts."""
    active = min(assignments, experts)
    return active + (assignments - active) // ROW_BLOCK


def sort_by_expert(experts: jax.Array, count: int) -> tuple[Plan, jax.Array]:
    """Sorts assignments by expert, stably, and cuts each expert's into blocks.

    Places are found by counting, which fuses where a sort would not: what comes before in the
    same chunk of assignments by comparing all pairs, what comes in chunks before by expert.

    Args:
      experts: int32[M, A]; ids outside 0..count-1 are dropped.
      count: experts held here.

    Returns:
      The plan, and int32[M, A]: each row's sorted places in ascending order of expert, -1 (and
      last) for what is dropped.
    """
    flat = experts.reshape(-1)
    total = flat.shape[0]
    expert = jnp.where((flat >= 0) & (flat < count), flat, count)
    chunk = min(total, _CHUNK)
    chunks = jnp.pad(expert, (0, -total % chunk), constant_values=count).reshape(-1, chunk)
    ids = jnp.arange(count + 1)
    held = jnp.sum(chunks[:, :, None] == ids[None, None, :], axis=1, dtype=jnp.int32)
    ends = jnp.cumsum(jnp.sum(held, axis=0))
    starts = ends - jnp.sum(held, axis=0)
    earlier = jnp.arange(chunk)[None, :] < jnp.arange(chunk)[:, None]
    same = (chunks[:, None, :] == chunks[:, :, None]) & earlier[None]
    inside = jnp.sum(same, axis=2, dtype=jnp.int32)
    before = jnp.take_along_axis(jnp.cumsum(held, axis=0) - held, chunks, axis=1)
    place = (starts[chunks] + before + inside).reshape(-1)[:total]
    order = jnp.zeros(total, jnp.int32).at[place].set(jnp.arange(total), unique_indices=True)

    rows = starts[1:] - starts[:-1]
    blocks = (rows + ROW_BLOCK - 1) // ROW_BLOCK
    last = jnp.cumsum(blocks)
    block = jnp.arange(num_blocks(total, count))
    owner = jnp.sum(last[None, :] <= block[:, None], axis=1, dtype=jnp.int32)
    busy = owner < count
    owner = jnp.where(busy, owner, 0)
    skipped = ROW_BLOCK * (block - last[owner] + blocks[owner])
    plan = Plan(
        order=order,
        expert=owner,
        first=starts[owner] + skipped,
        count=jnp.where(busy, jnp.minimum(rows[owner] - skipped, ROW_BLOCK), 0),
    )
    place = place.reshape(experts.shape)
    rank = jnp.sum(place[:, None, :] < place[:, :, None], axis=2)
    ordered = rank[:, None, :] == jnp.arange(experts.shape[1])[None, :, None]
    places = jnp.sum(jnp.where(ordered, place[:, None, :], 0), axis=2, dtype=jnp.int32)
    return plan, jnp.where(places < starts[count], places, -1)


def combine(out: jax.Array, places: jax.Array) -> jax.Array:
    """Adds each row's results one after another, so that the gathers fuse with the sum.

    Args:
      out: [N, D], results in sorted order.
      places: int32[M, A]; -1 adds nothing, whatever `out` holds.

    Returns:
      float32[M, D].
    """
    total = jnp.zeros((places.shape[0], out.shape[1]), jnp.float32)
    for a in range(places.shape[1]):
        place = places[:, a]
        rows = out[jnp.maximum(place, 0)].astype(jnp.float32)
        total = total + jnp.where((place >= 0)[:, None], rows, 0.0)
    return total


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A named call of `expert_mlp`.

    Attributes:
      name: phase, rows and partition.
      rows: M.
      intermediate: F on one device.
      experts: E on one device.
      spread: devices that share the experts out; `chosen` is of all of theirs.
      hidden: D.
      chosen: A.
      partial: whether F is a slice.
    """

    name: str
    rows: int
    intermediate: int
    experts: int = 384
    spread: int = 1
    hidden: int = 5120
    chosen: int = 6
    partial: bool


SHAPES = tuple(
    Shape(
        name=f"{phase} {rows} {partition}",
        rows=rows,
        intermediate=2304 // split,
        experts=384 // spread,
        spread=spread,
        partial=split > 1,
    )
    for partition, split, spread in (
        ("tp1", 1, 1),
        ("tp2", 2, 1),
        ("tp4", 4, 1),
        ("tp8", 8, 1),
        ("ep2", 1, 2),
        ("ep4", 1, 4),
        ("ep8", 1, 8),
    )
    for phase, sizes in (("decode", (1, 4, 16, 64)), ("prefill", (512, 2048)))
    for rows in sizes
)


def abstract_arguments(shape: Shape) -> tuple[Any, ...]:
    """Shapes and dtypes of the arguments x, experts, weights, w1, w2, w3."""

    def packed(outputs: int, inputs: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(
            jax.ShapeDtypeStruct((shape.experts, outputs, inputs // per), jnp.uint8)
            for per in (2, formats.FP4_BLOCK)
        )

    d, f = shape.hidden, shape.intermediate
    return (
        jax.ShapeDtypeStruct((shape.rows, d), jnp.bfloat16),
        jax.ShapeDtypeStruct((shape.rows, shape.chosen), jnp.int32),
        jax.ShapeDtypeStruct((shape.rows, shape.chosen), jnp.float32),
        packed(f, d),
        packed(d, f),
        packed(f, d),
    )


def make_arguments(shape: Shape, rng: np.random.Generator) -> tuple[Any, ...]:
    """Random arguments: distinct experts in a row, projections of the size of their inputs."""
    x, experts, weights, *packed = abstract_arguments(shape)
    order = rng.random((shape.rows, shape.experts)).argsort(axis=1)[:, : shape.chosen]

    def draw(codes: jax.ShapeDtypeStruct, scales: jax.ShapeDtypeStruct) -> Packed:
        middle = 127 - round(math.log2(2 * codes.shape[-1]) / 2) - 1
        return (
            jnp.asarray(rng.integers(0, 256, codes.shape, np.uint8)),
            jnp.asarray(rng.integers(middle - 1, middle + 2, scales.shape, np.uint8)),
        )

    return (
        jnp.asarray(rng.normal(size=x.shape), jnp.bfloat16),
        jnp.asarray(order, jnp.int32),
        jnp.asarray(rng.uniform(0.2, 0.6, weights.shape), jnp.float32),
        *(draw(*p) for p in packed),
    )


def run(shape: Shape, arguments: tuple[Any, ...], *, implementation: Implementation) -> jax.Array:
    """The operation of a shape, with the clamp of the released model."""
    return expert_mlp(*arguments, limit=10.0, partial=shape.partial, implementation=implementation)


def active_experts(shape: Shape) -> float:
    """Experts held here that some row is expected to choose, if all are alike."""
    probability = shape.chosen / (shape.experts * shape.spread)
    return shape.experts * (1 - (1 - probability) ** shape.rows)


def flops(shape: Shape) -> int:
    """Multiplications and additions of the projections, for this device's share of the choices."""
    products = 3 * shape.hidden * shape.intermediate
    return 2 * shape.rows * shape.chosen * products // shape.spread


def bytes(shape: Shape, active: float) -> int:
    """Bytes that must move at least.

    Args:
      shape: the call.
      active: experts held here that some row chose, see `active_experts`.
    """
    weight = 3 * shape.hidden * shape.intermediate
    packed = weight // 2 + weight // formats.FP4_BLOCK
    return round(active * packed) + shape.rows * (6 * shape.hidden + 8 * shape.chosen)

"""Kernels of the routed experts: rows sorted by expert, a block of rows of one expert each."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels import dispatch, formats, kernel_math

_E2M1_SCALE = 2.0**14  # the exponent bias of float16 less that of E2M1
ROW_BLOCK = 16  # rows of one expert in a program; fixed, so that no row's bits see the batch


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a projection is cut; from the shape of one expert's weight only.

    Attributes:
      outputs: outputs of a program, a divisor of all.
      inputs: inputs of a step; the last ones are taken in halves of it where they must be.
      num_warps: warps of a program.
      num_stages: steps in flight.
    """

    outputs: int
    inputs: int = 128
    num_warps: int = 4
    num_stages: int = 4


def gate_up_blocks(outputs: int) -> Blocks:
    """Blocks of w1 and w3: narrow, so that the experts of one row fill the device."""
    if outputs < 1024:
        return Blocks(kernel_math.largest_power_of_two_divisor(outputs, 32))
    return Blocks(kernel_math.largest_power_of_two_divisor(outputs, 64), num_warps=8)


def down_blocks(outputs: int) -> Blocks:
    """Blocks of w2, which has many outputs."""
    return Blocks(kernel_math.largest_power_of_two_divisor(outputs, 64))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """Assignments of rows to experts, sorted by expert and cut into blocks.

    Shapes: N assignments, B blocks, enough for any assignment.

    Attributes:
      order: int32[N], assignment at each sorted place.
      expert: int32[B], expert of each block.
      first: int32[B], its first sorted place.
      count: int32[B], its rows; 0 in an idle block.
    """

    order: jax.Array
    expert: jax.Array
    first: jax.Array
    count: jax.Array

    def arrays(self) -> tuple[jax.Array, ...]:
        """The attributes in order."""
        return self.order, self.expert, self.first, self.count


def swiglu(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """float32 clamped SwiGLU of bf16-rounded projections.

    Args:
      gate: float32[M, F].
      up: float32[M, F].
      limit: upper bound of `gate`, and bound of `up` on both sides.
    """
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


def gate_up(
    x: jax.Array,
    weights: jax.Array,
    w1: tuple[jax.Array, jax.Array],
    w3: tuple[jax.Array, jax.Array],
    plan: Plan,
    *,
    limit: float,
    implementation: dispatch.Implementation,
) -> jax.Array:
    """The experts' hidden rows, quantized as w2 takes them.

    Shapes: M rows, N assignments, E experts, D hidden, F intermediate.

    Args:
      x: bf16[M, D], quantized, even columns first and then the odd ones.
      weights: float32[N], routing weights; assignment i belongs to row i // (N / M).
      w1, w3: codes uint8[E, F, D / 2] and scales uint8[E, F, D / 32].
      plan: of the N assignments.
      limit: clamp of the SwiGLU.
      implementation: "pallas" or "pallas_interpret".

    Returns:
      bf16[N, F] in sorted order, quantized, even columns first; undefined where nothing is
      assigned.
    """
    experts, features, _ = w1[0].shape
    blocks = gate_up_blocks(features)

    arguments = (*plan.arrays(), x, weights, *_words(w1), *_words(w3))
    whole = [dispatch.whole(a) for a in arguments[:6]]
    return dispatch.launch(
        functools.partial(
            _gate_up, blocks=blocks, chosen=weights.shape[0] // x.shape[0], limit=limit
        ),
        *arguments,
        name="expert_gate_up",
        grid=(plan.expert.shape[0], features // blocks.outputs),
        in_specs=[*whole, *(_output_block(a, blocks) for a in arguments[6:])],
        out_specs=pl.BlockSpec((weights.shape[0], features), lambda b, n: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((weights.shape[0], features), jnp.bfloat16),
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        implementation=implementation,
    )


def down(
    hidden: jax.Array,
    w2: tuple[jax.Array, jax.Array],
    plan: Plan,
    *,
    partial: bool,
    implementation: dispatch.Implementation,
) -> jax.Array:
    """The experts' results.

    Args:
      hidden: bf16[N, F], see `gate_up`.
      w2: codes uint8[E, D, F / 2] and scales uint8[E, D, F / 32].
      plan: of the N assignments.
      partial: whether F is a slice, so that results are not rounded yet.
      implementation: "pallas" or "pallas_interpret".

    Returns:
      [N, D] in sorted order, float32 if partial and bf16 otherwise; undefined where nothing
      is assigned.
    """
    features = w2[0].shape[1]
    blocks = down_blocks(features)
    arguments = (plan.expert, plan.first, plan.count, hidden, *_words(w2))
    shape = (hidden.shape[0], features)
    return dispatch.launch(
        functools.partial(_down, blocks=blocks),
        *arguments,
        name="expert_down",
        grid=(plan.expert.shape[0], features // blocks.outputs),
        in_specs=[
            *(dispatch.whole(a) for a in arguments[:4]),
            *(_output_block(a, blocks) for a in arguments[4:]),
        ],
        out_specs=pl.BlockSpec(shape, lambda b, n: (0, 0)),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32 if partial else jnp.bfloat16),
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        implementation=implementation,
    )


def _words(weight: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Codes seen as uint32[..., K / 8], without a copy.

    All 384 experts of the released model have more than 2^31 bytes of them, too many offsets.
    """
    codes, scales = weight
    eights = codes.reshape(*codes.shape[:-1], -1, 4)
    return jax.lax.bitcast_convert_type(eights, jnp.uint32), scales


def _output_block(array: jax.Array, blocks: Blocks) -> pl.BlockSpec:
    """All experts' rows for the outputs of a program."""
    return pl.BlockSpec((array.shape[0], blocks.outputs, array.shape[2]), lambda b, n: (0, n, 0))


def _gate_up(
    order_ref: jax.Ref,
    expert_ref: jax.Ref,
    first_ref: jax.Ref,
    count_ref: jax.Ref,
    x_ref: jax.Ref,
    weights_ref: jax.Ref,
    w1_ref: jax.Ref,
    s1_ref: jax.Ref,
    w3_ref: jax.Ref,
    s3_ref: jax.Ref,
    hidden_ref: jax.Ref,
    *,
    blocks: Blocks,
    chosen: int,
    limit: float,
) -> None:
    block, part = pl.program_id(0), pl.program_id(1)
    count = count_ref[block]

    @pl.when(count > 0)
    def _() -> None:
        expert = expert_ref[block]
        first = first_ref[block]
        places = _places(first, count)
        assignments = order_ref[places]
        rows = assignments // chosen

        def step(sums: tuple[jax.Array, ...], at: _Step) -> tuple[jax.Array, ...]:
            inputs = _inputs(x_ref, rows, at)
            gate = sums[0] + _product(inputs, w1_ref, s1_ref, expert, at)
            return gate, sums[1] + _product(inputs, w3_ref, s3_ref, expert, at)

        zeros = jnp.zeros((ROW_BLOCK, blocks.outputs), jnp.float32)
        gate, up = (
            total.astype(jnp.bfloat16).astype(jnp.float32)
            for total in _sum_steps(step, (zeros, zeros), x_ref.shape[1], blocks)
        )
        hidden = swiglu(gate, up, limit) * weights_ref[assignments][:, None]
        hidden = hidden.astype(jnp.bfloat16).astype(jnp.float32)
        hidden = kernel_math.quantize_fp8_block(hidden).astype(jnp.bfloat16)
        even, odd = jnp.unstack(hidden.reshape(ROW_BLOCK, -1, 2), axis=-1)
        _store(hidden_ref, even, first, count, part)
        _store(hidden_ref, odd, first, count, part + pl.num_programs(1))


def _down(
    expert_ref: jax.Ref,
    first_ref: jax.Ref,
    count_ref: jax.Ref,
    hidden_ref: jax.Ref,
    w2_ref: jax.Ref,
    s2_ref: jax.Ref,
    out_ref: jax.Ref,
    *,
    blocks: Blocks,
) -> None:
    block, part = pl.program_id(0), pl.program_id(1)
    count = count_ref[block]

    @pl.when(count > 0)
    def _() -> None:
        expert = expert_ref[block]
        first = first_ref[block]
        places = _places(first, count)

        def step(total: jax.Array, at: _Step) -> jax.Array:
            return total + _product(_inputs(hidden_ref, places, at), w2_ref, s2_ref, expert, at)

        zeros = jnp.zeros((ROW_BLOCK, blocks.outputs), jnp.float32)
        total = _sum_steps(step, zeros, hidden_ref.shape[1], blocks)
        _store(out_ref, total.astype(out_ref.dtype), first, count, part)


def _places(first: jax.Array, count: jax.Array) -> jax.Array:
    """Sorted places of a block's rows; rows past `count` repeat the last, and are not stored."""
    return first + jnp.minimum(jnp.arange(ROW_BLOCK), count - 1)


@dataclasses.dataclass(frozen=True)
class _Step:
    """Inputs start + k * size and on; offsets are products, so that loads stay aligned."""

    start: int
    k: jax.Array
    size: int

    def first(self, per: int) -> jax.Array:
        """The first of them, counted in units of `per` inputs."""
        return self.start // per + self.k * (self.size // per)


def _sum_steps(step: Callable[..., Any], zeros: Any, inputs: int, blocks: Blocks) -> Any:
    """Adds up `step(sums, inputs of the step)`, in an order fixed by the number of inputs."""
    sums, start, size = zeros, 0, blocks.inputs
    while start < inputs:
        steps = (inputs - start) // size

        def advance(k: jax.Array, sums: Any, start: int = start, size: int = size) -> Any:
            return step(sums, _Step(start, k, size))

        if steps:
            sums = jax.lax.fori_loop(0, steps, advance, sums)
        start, size = start + steps * size, size // 2
    return sums


def _inputs(ref: jax.Ref, rows: jax.Array, at: _Step) -> tuple[jax.Array, jax.Array]:
    """bf16[BM, size / 2]: even and odd columns of rows that hold the even ones first."""
    columns = at.first(2) + jnp.arange(at.size // 2)[None, :]
    rows = rows[:, None]
    return ref[rows, columns], ref[rows, ref.shape[1] // 2 + columns]


def _product(
    inputs: tuple[jax.Array, jax.Array],
    words_ref: jax.Ref,
    scales_ref: jax.Ref,
    expert: jax.Array,
    at: _Step,
) -> jax.Array:
    """float32[BM, BN] of one step: exact products, those of even inputs summed first."""
    outputs, groups = words_ref.shape[1], at.size // formats.FP4_BLOCK
    word = words_ref[expert, :, pl.ds(at.first(8), at.size // 8)]
    scale = scales_ref[expert, :, pl.ds(at.first(formats.FP4_BLOCK), groups)]
    scale = kernel_math.decode_e8m0(scale) * np.float32(_E2M1_SCALE)

    def weight(codes: jax.Array) -> jax.Array:
        scaled = codes.reshape(outputs, groups, -1) * scale[:, :, None]
        return scaled.reshape(outputs, -1).astype(jnp.bfloat16)

    even, odd = (weight(codes) for codes in _decode_e2m1_words(word))
    return triton.dot(inputs[0], even, trans_b=True) + triton.dot(inputs[1], odd, trans_b=True)


def _decode_e2m1_words(word: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32[N, 4 * W] of even and of odd codes in uint32[N, W], 2^14 too small.

    A code's bits are those of a float16 that much too small. They are moved for two codes at
    once, four apart: half the integer arithmetic of one by one, which is what decoding costs.
    """

    def half(bits: jax.Array) -> jax.Array:
        narrow = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16)
        return narrow.astype(jnp.float32)

    def codes(i: int) -> jax.Array:
        """Codes i and i + 4 of each word, [N, W, 2]."""
        moved = word >> np.uint32(4 * i)
        sign = (moved & np.uint32(0x00080008)) << np.uint32(12)
        pair = sign | (moved & np.uint32(0x00070007)) << np.uint32(9)
        return jnp.stack([half(pair & np.uint32(0xFFFF)), half(pair >> np.uint32(16))], axis=-1)

    even = jnp.stack([codes(0), codes(2)], axis=-1)  # codes 0 2, then 4 6
    odd = jnp.stack([codes(1), codes(3)], axis=-1)
    return even.reshape(word.shape[0], -1), odd.reshape(word.shape[0], -1)


def _store(
    ref: jax.Ref, values: jax.Array, first: jax.Array, count: jax.Array, part: jax.Array
) -> None:
    """Writes the first `count` rows of a block, in one part of the columns."""
    rows = jnp.arange(ROW_BLOCK)
    columns = part * values.shape[1] + jnp.arange(values.shape[1])
    at = ref.at[(first + rows)[:, None], columns[None, :]]
    triton.store(at, values, mask=jnp.broadcast_to((rows < count)[:, None], values.shape))

"""Kernels of the indexer: scores over paged keys, and selection of the best positions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels import dispatch, formats
from pallas_kernels.dispatch import Implementation
from pallas_kernels.kernel_math import (
    decode_e2m1_pair,
    decode_e8m0,
    next_power_of_two,
    round_bf16,
)
from pallas_kernels.packed_rows import PackedRows

_GROUP_BYTES = formats.FP4_BLOCK // 2


@dataclasses.dataclass(frozen=True)
class _ScoreBlocks:
    """Blocks of the score kernel.

    Attributes:
      heads: of a product; missing ones have weight 0.
      groups: of 32 channels of a key, a power of two; missing ones are zeros.
      keys: of a product.
      span: keys of a program.
    """

    heads: int
    groups: int
    keys: int = 64
    span: int = 512


@dataclasses.dataclass(frozen=True)
class _SelectBlocks:
    """Blocks of the selection.

    Attributes:
      tile: positions read at once.
      segment: positions of a program; longer rows are selected from twice.
    """

    tile: int
    segment: int


def paged_scores(
    q: jax.Array,
    weights: jax.Array,
    keys: PackedRows,
    table: jax.Array,
    visible: jax.Array,
    *,
    rows_per_page: int,
    implementation: Implementation,
) -> jax.Array:
    """The kernel of `index_topk.paged_index_scores`."""
    rows, heads, dim = q.shape
    groups = dim // formats.FP4_BLOCK
    blocks = _ScoreBlocks(next_power_of_two(heads, 16), next_power_of_two(groups))
    missing = blocks.heads - heads
    query = q.astype(jnp.bfloat16).reshape(rows, heads, dim // 2, 2).transpose(0, 3, 2, 1)
    channels = blocks.groups * _GROUP_BYTES
    query = jnp.pad(query, ((0, 0), (0, 0), (0, channels - dim // 2), (0, missing)))
    factors = jnp.pad(weights.astype(jnp.float32), ((0, 0), (0, missing)))
    capacity = table.shape[1] * rows_per_page
    spans = -(-capacity // blocks.span)
    codes = keys.codes.reshape(-1, groups, _GROUP_BYTES)
    scores = dispatch.launch(
        functools.partial(_score_kernel, rows_per_page=rows_per_page, blocks=blocks),
        table,
        visible,
        query,
        factors,
        codes,
        keys.scales,
        name="index_scores",
        grid=(rows, spans),
        in_specs=[
            pl.BlockSpec((None, table.shape[1]), lambda t, j: (t, 0)),
            pl.BlockSpec((1,), lambda t, j: (t,)),
            pl.BlockSpec((None, 2, channels, blocks.heads), lambda t, j: (t, 0, 0, 0)),
            pl.BlockSpec((None, blocks.heads), lambda t, j: (t, 0)),
            dispatch.whole(codes),
            dispatch.whole(keys.scales),
        ],
        out_specs=pl.BlockSpec((None, blocks.span), lambda t, j: (t, j)),
        out_shape=jax.ShapeDtypeStruct((rows, spans * blocks.span), jnp.float32),
        num_warps=4,
        num_stages=2,
        implementation=implementation,
    )
    return scores[:, :capacity]


def _score_kernel(
    table_ref: jax.Ref,
    visible_ref: jax.Ref,
    query_ref: jax.Ref,
    factors_ref: jax.Ref,
    codes_ref: jax.Ref,
    scales_ref: jax.Ref,
    out_ref: jax.Ref,
    *,
    rows_per_page: int,
    blocks: _ScoreBlocks,
) -> None:
    # One program per row and span of keys. Bytes hold an even and an odd channel, so the query
    # comes apart into even and odd channels and a key needs no interleaving.
    start = pl.program_id(1) * blocks.span
    visible = visible_ref[0]
    group = jnp.arange(blocks.groups)
    byte = jnp.arange(_GROUP_BYTES)
    channels = blocks.groups * _GROUP_BYTES

    @pl.when(start >= visible)
    def _() -> None:
        out_ref[...] = jnp.full((blocks.span,), -jnp.inf)

    @pl.when(start < visible)
    def _() -> None:
        even, odd = query_ref[0], query_ref[1]
        factors = factors_ref[...]

        def score_block(index: jax.Array, carry: None) -> None:
            position = start + index * blocks.keys + jnp.arange(blocks.keys)
            column = jax.lax.div(position, rows_per_page)
            inside = (position < visible) & (column < table_ref.shape[0])
            page = triton.load(table_ref.at[jnp.where(inside, column, 0)], mask=inside, other=-1)
            found = inside & (page >= 0)
            row = jnp.where(found, page * rows_per_page + jax.lax.rem(position, rows_per_page), 0)
            stored = found[:, None] & (group < scales_ref.shape[1])[None]
            scales = triton.load(
                scales_ref.at[row[:, None], group[None]], mask=stored, other=np.uint8(0)
            )
            codes = triton.load(
                codes_ref.at[row[:, None, None], group[None, :, None], byte[None, None]],
                mask=stored[:, :, None],
                other=np.uint8(0),
            )
            power = decode_e8m0(scales)[:, :, None]
            low, high = (
                (value * power).astype(jnp.bfloat16).reshape(blocks.keys, channels)
                for value in decode_e2m1_pair(codes)
            )
            dots = jnp.dot(low, even, preferred_element_type=jnp.float32)
            dots += jnp.dot(high, odd, preferred_element_type=jnp.float32)
            terms = round_bf16(jnp.maximum(round_bf16(dots), 0.0) * factors[None])
            score = round_bf16(jnp.sum(terms, axis=1))
            # Selection tells -0 from 0; a sum that starts from 0 is never -0.
            score = jnp.where(score == 0, 0.0, score)
            out_ref[pl.ds(index * blocks.keys, blocks.keys)] = jnp.where(found, score, -jnp.inf)

        jax.lax.fori_loop(0, blocks.span // blocks.keys, score_block, None)


def select(scores: jax.Array, *, k: int, implementation: Implementation) -> jax.Array:
    """The kernel of `index_topk.topk_positions`.

    A long row keeps k of each segment, and then k of those. Segments follow each other and each
    is ascending, so a lower place among the kept is a lower position and ties stay what they are.
    """
    rows, length = scores.shape
    tile = min(next_power_of_two(length, 16), 2048)
    blocks = _SelectBlocks(tile, max(16384, 8 * next_power_of_two(k)))
    if length < 2 * blocks.segment:
        return _launch_select(scores, k, blocks.tile, implementation)
    segments = -(-length // blocks.segment)
    split = _pad_columns(scores, segments * blocks.segment).reshape(-1, blocks.segment)
    chosen = _launch_select(split, k, blocks.tile, implementation)
    values = jnp.take_along_axis(split, jnp.maximum(chosen, 0), axis=1)
    values = jnp.where(chosen >= 0, values, -jnp.inf).reshape(rows, segments * k)
    first = jnp.arange(segments, dtype=jnp.int32)[None, :, None] * blocks.segment
    positions = (chosen.reshape(rows, segments, k) + first).reshape(rows, segments * k)
    best = select(values, k=k, implementation=implementation)
    return jnp.where(best >= 0, jnp.take_along_axis(positions, jnp.maximum(best, 0), axis=1), -1)


def _pad_columns(scores: jax.Array, columns: int) -> jax.Array:
    return jnp.pad(scores, ((0, 0), (0, columns - scores.shape[1])), constant_values=-jnp.inf)


def _launch_select(
    scores: jax.Array, k: int, tile: int, implementation: Implementation
) -> jax.Array:
    scores = _pad_columns(scores, -(-scores.shape[1] // tile) * tile)
    rows, length = scores.shape
    return dispatch.launch(
        functools.partial(_select_kernel, k=k, tile=tile),
        scores,
        name="index_select",
        grid=(rows,),
        in_specs=[pl.BlockSpec((None, length), lambda t: (t, 0))],
        out_specs=pl.BlockSpec((None, k), lambda t: (t, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, k), jnp.int32),
        num_warps=8,
        num_stages=2,
        implementation=implementation,
    )


def _select_kernel(scores_ref: jax.Ref, out_ref: jax.Ref, *, k: int, tile: int) -> None:
    # One program per row. bf16 values have 16 bits, ordered like unsigned integers once the
    # negative ones are turned over. The k-th best is found two bits at a time by counting;
    # `above` is how many are greater than anything that still may be the k-th.
    tiles = scores_ref.shape[0] // tile
    lowest = 0x80  # of the values above -inf

    def ordered(index: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(scores_ref[pl.ds(index * tile, tile)], jnp.int32)
        return (jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> 16) + 0x8000

    def add_digit(step: jax.Array, carry: tuple) -> tuple:
        prefix, above = carry
        shift = 14 - 2 * step
        bounds = [prefix + (digit << shift) for digit in (1, 2, 3)]

        def count(index: jax.Array, counts: tuple) -> tuple:
            keys = ordered(index)
            return tuple(
                n + (keys >= bound).astype(jnp.int32)
                for n, bound in zip(counts, bounds, strict=True)
            )

        zeros = jnp.zeros((tile,), jnp.int32)
        counts = jax.lax.fori_loop(0, tiles, count, (zeros,) * 3)
        one, two, three = (jnp.sum(n) for n in counts)
        digit = sum((n >= k).astype(jnp.int32) for n in (one, two, three))
        beaten = jnp.where(digit == 0, one, jnp.where(digit == 1, two, three))
        return prefix + (digit << shift), jnp.where(digit == 3, above, beaten)

    start = (jnp.int32(0), jnp.int32(0))
    kth, above = jax.lax.fori_loop(0, 8, add_digit, start)
    ties = jnp.where(kth >= lowest, k - above, k)  # all that there are, where fewer than k are
    kth = jnp.maximum(kth, lowest)

    def write(index: jax.Array, carry: tuple) -> tuple:
        better, equal = carry
        keys = ordered(index)
        wins, draws = keys > kth, keys == kth
        # Both running counts in one scan: neither exceeds the tile.
        counts = jnp.cumsum(jnp.where(wins, 1 << 16, draws.astype(jnp.int32)))
        wins_so_far, draws_so_far = better + (counts >> 16), equal + (counts & 0xFFFF)
        place = wins_so_far + jnp.minimum(draws_so_far, ties) - 1
        kept = wins | (draws & (draws_so_far <= ties))
        position = index * tile + jnp.arange(tile)
        triton.store(out_ref.at[jnp.where(kept, place, k)], position, mask=kept)
        total = jnp.sum(jnp.where(wins, 1 << 16, draws.astype(jnp.int32)))
        return better + (total >> 16), equal + (total & 0xFFFF)

    better, equal = jax.lax.fori_loop(0, tiles, write, (jnp.int32(0), jnp.int32(0)))
    place = jnp.arange(next_power_of_two(k))
    unused = (place >= better + jnp.minimum(equal, ties)) & (place < k)
    triton.store(
        out_ref.at[jnp.where(unused, place, k)], jnp.full(place.shape, -1, jnp.int32), mask=unused
    )

"""Scores of the indexer over paged keys, and the positions and blocks it keeps."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels import dispatch, formats, numerics
from pallas_kernels.dispatch import Implementation
from pallas_kernels.kernel_math import decode_e2m1_pair, decode_e8m0, next_power_of_two
from pallas_kernels.packed_rows import PackedRows, gather, unpack_index
from pallas_kernels.paging import slot

KEY_CHUNK = 64  # keys scored together; fixed, so that a score does not depend on the context
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


def paged_index_scores(
    q: jax.Array,
    weights: jax.Array,
    keys: PackedRows,
    table: jax.Array,
    visible: jax.Array,
    *,
    rows_per_page: int,
    implementation: Implementation,
) -> jax.Array:
    """Scores of every compressed position that a row can see, keys read page by page.

    Shapes: T rows, H index heads, d index_head_dim, C table columns.

    Args:
      q: float32[T, H, d], dequantized FP4.
      weights: bf16[T, H].
      keys: cache rows of d / 2 codes and d / 32 E8M0 scales.
      table: int32[T, C], pages of each row's request by column; -1 is not kept.
      visible: int32[T], how many positions, from the first, each row may see.
      rows_per_page: positions on one page.
      implementation: which one runs.

    Returns:
      float32[T, C * rows_per_page], bf16 values; -inf where a position is not visible or its
      page not kept.
    """
    chex.assert_rank([q, weights, table, visible], [3, 2, 2, 1])
    if implementation == "xla":
        return paged_index_scores_reference(
            q, weights, keys, table, visible, rows_per_page=rows_per_page
        )
    return _launch_scores(q, weights, keys, table, visible, rows_per_page, implementation)


def paged_index_scores_reference(
    q: jax.Array,
    weights: jax.Array,
    keys: PackedRows,
    table: jax.Array,
    visible: jax.Array,
    *,
    rows_per_page: int,
) -> jax.Array:
    """Defines the result; reads as many chunks of keys as the furthest row sees."""
    capacity = table.shape[1] * rows_per_page

    def score_chunk(index: jax.Array, scores: jax.Array) -> jax.Array:
        position = index * KEY_CHUNK + jnp.arange(KEY_CHUNK, dtype=jnp.int32)[None]
        usable = (position < visible[:, None]) & (position < capacity)
        where = slot(table, jnp.where(usable, position, -1), rows_per_page)
        part = index_scores(q, weights, unpack_index(gather(keys, where)))
        part = jnp.where(where >= 0, part, -jnp.inf)
        return jax.lax.dynamic_update_slice_in_dim(scores, part, index * KEY_CHUNK, 1)

    chunks = -(-capacity // KEY_CHUNK)
    empty = jnp.full((q.shape[0], chunks * KEY_CHUNK), -jnp.inf)
    needed = jnp.minimum((jnp.max(visible) + KEY_CHUNK - 1) // KEY_CHUNK, chunks)
    return jax.lax.fori_loop(0, needed, score_chunk, empty)[:, :capacity]


def index_scores(q: jax.Array, weights: jax.Array, keys: jax.Array) -> jax.Array:
    """Scores of some keys, rounded where the published code rounds.

    Shapes: T rows, H index heads, J keys, D index_head_dim.

    Args:
      q: float32[T, H, D], dequantized FP4.
      weights: bf16[T, H].
      keys: float32[T, J, D], dequantized FP4.

    Returns:
      float32[T, J], bf16 values: sum over heads of relu(q . k) * weight.
    """
    chex.assert_rank([q, weights, keys], [3, 2, 3])
    dots = numerics.round_bf16(jnp.einsum("thd,tjd->thj", q, keys))
    terms = numerics.round_bf16(jax.nn.relu(dots) * weights.astype(jnp.float32)[..., None])
    return numerics.round_bf16(jnp.sum(terms, axis=1))


def _launch_scores(
    q: jax.Array,
    weights: jax.Array,
    keys: PackedRows,
    table: jax.Array,
    visible: jax.Array,
    rows_per_page: int,
    implementation: Implementation,
) -> jax.Array:
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
            terms = _round(jnp.maximum(_round(dots), 0.0) * factors[None])
            score = _round(jnp.sum(terms, axis=1))
            # Selection tells -0 from 0; a sum that starts from 0 is never -0.
            score = jnp.where(score == 0, 0.0, score)
            out_ref[pl.ds(index * blocks.keys, blocks.keys)] = jnp.where(found, score, -jnp.inf)

        jax.lax.fori_loop(0, blocks.span // blocks.keys, score_block, None)


def _round(x: jax.Array) -> jax.Array:
    """float32 rounded to bf16, nearest even; integers, which no compiler takes for a no-op."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def select_candidate_blocks(
    scores: jax.Array,
    newest: jax.Array,
    *,
    block_size: int,
    topk_blocks: int,
    implementation: Implementation,
) -> jax.Array:
    """First level of the two-level top-k.

    The block of the newest visible position is always kept and counts; then the best blocks
    above -inf, ties to the lower block.

    Args:
      scores: float32[T, J], bf16 values, -inf where a position is not visible.
      newest: int32[T], newest visible position; -1 where there is none.
      block_size: positions per block.
      topk_blocks: blocks to keep.
      implementation: which one runs.

    Returns:
      bool[T, ceil(J / block_size)], True in kept blocks.
    """
    chex.assert_rank([scores, newest], [2, 1])
    padding = -scores.shape[1] % block_size
    padded = jnp.pad(scores, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    block = jnp.max(padded.reshape(scores.shape[0], -1, block_size), axis=-1)
    ids = jnp.arange(block.shape[1])[None]
    own = (newest[:, None] // block_size == ids) & (newest >= 0)[:, None]
    block = jnp.where(own, jnp.inf, block)
    kept = min(topk_blocks, block.shape[1])
    if implementation == "xla":
        chosen = _best(block, kept)
    else:
        chosen = _select(block, kept, implementation)
        chosen = jnp.where(chosen >= 0, chosen, block.shape[1])
    rows = jnp.arange(block.shape[0])[:, None]
    return jnp.zeros(block.shape, bool).at[rows, chosen].set(True, mode="drop")


def topk_positions(scores: jax.Array, *, k: int, implementation: Implementation) -> jax.Array:
    """The best positions of each row, ascending.

    Args:
      scores: float32[T, J], bf16 values, -inf where a position may not be chosen.
      k: positions to keep.
      implementation: which one runs.

    Returns:
      int32[T, k], -1 in unused slots, which come last. Ties go to the lower position.
    """
    chex.assert_rank(scores, 2)
    if implementation == "xla":
        return topk_positions_reference(scores, k=k)
    return _select(scores, k, implementation)


def topk_positions_reference(scores: jax.Array, *, k: int) -> jax.Array:
    """Defines the result."""
    available, unused = min(k, scores.shape[1]), scores.shape[1]
    ordered = jnp.sort(_best(scores, available), axis=-1)
    ordered = jnp.where(ordered < unused, ordered, -1)
    return jnp.pad(ordered, ((0, 0), (0, k - available)), constant_values=-1)


def _best(scores: jax.Array, k: int) -> jax.Array:
    """int32[T, k] of float32[T, J], best first; J where nothing is left above -inf."""
    values, chosen = jax.lax.top_k(scores, k)
    return jnp.where(values > -jnp.inf, chosen, scores.shape[1])


def _select(scores: jax.Array, k: int, implementation: Implementation) -> jax.Array:
    """int32[T, k]: like `topk_positions`; a long row keeps k of each segment, then k of those.

    Segments follow each other and each is ascending, so a lower place among the kept is a lower
    position and ties stay what they are.
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
    best = _select(values, k, implementation)
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

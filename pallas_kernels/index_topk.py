"""The indexer: scores over paged FP4 keys, candidate blocks and position top-k."""

import chex
import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.dispatch import Implementation
from pallas_kernels.packed_rows import PackedRows, gather, unpack_index
from pallas_kernels.paging import slot

KEY_CHUNK = 64  # keys scored together; fixed, so that a score does not depend on the context


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
    return paged_index_scores_reference(
        q, weights, keys, table, visible, rows_per_page=rows_per_page
    )


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
      scores: float32[T, J], -inf where a position is not visible.
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
    values, chosen = jax.lax.top_k(block, min(topk_blocks, block.shape[1]))
    chosen = jnp.where(values > -jnp.inf, chosen, block.shape[1])
    rows = jnp.arange(block.shape[0])[:, None]
    return jnp.zeros(block.shape, bool).at[rows, chosen].set(True, mode="drop")


def topk_positions(scores: jax.Array, *, k: int, implementation: Implementation) -> jax.Array:
    """The best positions of each row, ascending.

    Args:
      scores: float32[T, J], -inf where a position may not be chosen.
      k: positions to keep.
      implementation: which one runs.

    Returns:
      int32[T, k], -1 in unused slots, which come last. Ties go to the lower position.
    """
    chex.assert_rank(scores, 2)
    available = min(k, scores.shape[1])
    values, chosen = jax.lax.top_k(scores, available)
    unused = scores.shape[1]
    ordered = jnp.sort(jnp.where(values > -jnp.inf, chosen, unused), axis=-1)
    ordered = jnp.where(ordered < unused, ordered, -1)
    return jnp.pad(ordered, ((0, 0), (0, k - available)), constant_values=-1)

"""Scores of the indexer over paged keys, and the positions and blocks it keeps."""

import dataclasses
import functools
import math
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats, index_kernels, numerics
from pallas_kernels.dispatch import Implementation, resolve
from pallas_kernels.packed_rows import PackedRows, gather, unpack_index
from pallas_kernels.paging import slot

KEY_CHUNK = 64  # keys scored together; fixed, so that a score does not depend on the context


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
    if resolve(implementation) == "xla":
        return paged_index_scores_reference(
            q, weights, keys, table, visible, rows_per_page=rows_per_page
        )
    return index_kernels.paged_scores(
        q,
        weights,
        keys,
        table,
        visible,
        rows_per_page=rows_per_page,
        implementation=implementation,
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
    if resolve(implementation) == "xla":
        chosen = _best(block, kept)
    else:
        chosen = index_kernels.select(block, k=kept, implementation=implementation)
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
    if resolve(implementation) == "xla":
        return topk_positions_reference(scores, k=k)
    return index_kernels.select(scores, k=k, implementation=implementation)


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


Op = Literal["scores", "topk", "candidates"]
_REQUESTS = 4  # of full context that the rows of a shape share


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A real size of one of the three operations.

    Attributes:
      name: for reports.
      op: which operation.
      rows: T.
      positions: J, compressed positions of the longest request.
      rows_per_page: positions on one page.
      heads, dim: H and d.
      k: positions kept.
      block_size, topk_blocks: of the candidates.
    """

    name: str
    op: Op
    rows: int
    positions: int
    rows_per_page: int = 16
    heads: int = 32
    dim: int = 128
    k: int = 512
    block_size: int = 8
    topk_blocks: int = 2048


SHAPES = (
    *(
        Shape(name=f"{op} decode {rows}", op=op, rows=rows, positions=131072)
        for op in ("scores", "topk", "candidates")
        for rows in (1, 4, 16, 64)
    ),
    Shape(name="scores decode 16 ratio 2", op="scores", rows=16, positions=65536, rows_per_page=8),
    *(
        Shape(name=f"{op} prefill 16 of a million", op=op, rows=16, positions=1048576)
        for op in ("scores", "topk", "candidates")
    ),
)


def abstract_arguments(shape: Shape) -> tuple[Any, ...]:
    """Shapes and dtypes of the operation's arrays."""
    rows = shape.rows
    if shape.op != "scores":
        scores = jax.ShapeDtypeStruct((rows, shape.positions), jnp.float32)
        newest = jax.ShapeDtypeStruct((rows,), jnp.int32)
        return (scores, newest) if shape.op == "candidates" else (scores,)
    cached = min(rows, _REQUESTS) * shape.positions
    return (
        jax.ShapeDtypeStruct((rows, shape.heads, shape.dim), jnp.float32),
        jax.ShapeDtypeStruct((rows, shape.heads), jnp.bfloat16),
        PackedRows(
            jax.ShapeDtypeStruct((cached, shape.dim // 2), jnp.uint8),
            jax.ShapeDtypeStruct((cached, shape.dim // formats.FP4_BLOCK), jnp.uint8),
        ),
        jax.ShapeDtypeStruct((rows, shape.positions // shape.rows_per_page), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )


def make_arguments(shape: Shape, rng: np.random.Generator) -> tuple[Any, ...]:
    """Random arguments: every position visible, the pages of a request scattered."""
    abstract = abstract_arguments(shape)
    if shape.op != "scores":
        scores = rng.standard_normal(abstract[0].shape, np.float32)
        scores = jnp.asarray(scores).astype(jnp.bfloat16).astype(jnp.float32)
        newest = jnp.full((shape.rows,), shape.positions - 1, jnp.int32)
        return (scores, newest) if shape.op == "candidates" else (scores,)
    q, weights, keys, table, visible = abstract
    codes = rng.integers(0, 256, keys.codes.shape, np.uint8)
    scales = rng.integers(125, 130, keys.scales.shape, np.uint8)
    halves = rng.integers(-12, 13, q.shape).astype(np.float32) / 2
    requests = min(shape.rows, _REQUESTS)
    pages = rng.permutation(requests * table.shape[1]).reshape(requests, -1)
    return (
        jnp.asarray(halves),
        jnp.asarray(rng.standard_normal(weights.shape), jnp.bfloat16),
        PackedRows(jnp.asarray(codes), jnp.asarray(scales)),
        jnp.asarray(pages[np.arange(shape.rows) % requests], jnp.int32),
        jnp.full(visible.shape, shape.positions, jnp.int32),
    )


def run(shape: Shape, arguments: tuple[Any, ...], *, implementation: Implementation) -> jax.Array:
    """The operation of a shape."""
    if shape.op == "scores":
        return paged_index_scores(
            *arguments, rows_per_page=shape.rows_per_page, implementation=implementation
        )
    if shape.op == "topk":
        return topk_positions(*arguments, k=shape.k, implementation=implementation)
    return select_candidate_blocks(
        *arguments,
        block_size=shape.block_size,
        topk_blocks=shape.topk_blocks,
        implementation=implementation,
    )


def flops(shape: Shape) -> int:
    """Multiplications and additions of the dots; selection only compares."""
    if shape.op != "scores":
        return 0
    return 2 * shape.rows * shape.positions * shape.heads * shape.dim


def bytes(shape: Shape) -> int:
    """Bytes that must move: every argument once, every result once."""
    arguments = abstract_arguments(shape)
    result = jax.eval_shape(functools.partial(run, shape, implementation="xla"), arguments)
    arrays = (*jax.tree.leaves(arguments), result)
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)

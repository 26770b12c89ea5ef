"""Maps row-wise arithmetic over tiles of rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation

ROW_TILE = 16  # rows mapped together on CPU; every T and L is a multiple of it


def map_rows(
    fn: Callable[[Any], Any],
    rows: Any,
    count: jax.Array,
    *,
    implementation: Implementation,
) -> Any:
    """Applies a row-wise function to the first `count` rows, a tile of rows at a time.

    XLA:CPU may round a row differently when other rows stand beside it in one product. Here
    every row is computed in a tile of the same shape by the same compiled loop body, so its
    bits depend on nothing but itself; the cost follows `count`, not the padded size. Kernels
    have the property from their fixed row blocks, so with them this is `fn(rows)`.

    Args:
      fn: maps a pytree of [ROW_TILE, ...] arrays to another; row i of the result depends on
        row i of the arguments only.
      rows: pytree of [T, ...] arrays, T a multiple of ROW_TILE.
      count: int32[], rows that are real; they come first.
      implementation: of the operations in `fn`.

    Returns:
      Pytree of [T, ...] arrays; rows past `count` hold nothing of use.
    """
    if implementation != "xla":
        return fn(rows)
    total = jax.tree.leaves(rows)[0].shape[0]
    if total % ROW_TILE:
        raise ValueError(f"{total} rows do not divide into tiles of {ROW_TILE}; pad the batch")

    fn = jax.jit(fn)  # traced once, for its shapes and for the loop

    def tile(index: jax.Array) -> Any:
        return jax.tree.map(
            lambda a: jax.lax.dynamic_slice_in_dim(a, index * ROW_TILE, ROW_TILE), rows
        )

    def step(index: jax.Array, out: Any) -> Any:
        return jax.tree.map(
            lambda a, part: jax.lax.dynamic_update_slice_in_dim(a, part, index * ROW_TILE, 0),
            out,
            fn(tile(index)),
        )

    shapes = jax.eval_shape(lambda: fn(tile(jnp.int32(0))))
    empty = jax.tree.map(lambda s: jnp.zeros((total, *s.shape[1:]), s.dtype), shapes)
    return jax.lax.fori_loop(0, (count + ROW_TILE - 1) // ROW_TILE, step, empty)


def map_chunks(fn: Callable[[Any], Any], rows: Any, most: int) -> Any:
    """Applies a row-wise function to a few rows at a time, to bound what it holds.

    Args:
      fn: as in `map_rows`, of any number of rows.
      rows: pytree of [T, ...] arrays.
      most: rows at a time, rounded to a power of two of at least `ROW_TILE` that divides T.

    Returns:
      Pytree of [T, ...] arrays.
    """
    total = jax.tree.leaves(rows)[0].shape[0]
    chunk = ROW_TILE
    while 2 * chunk <= most and total % (2 * chunk) == 0:
        chunk *= 2
    if total <= chunk or total % chunk:
        return fn(rows)
    split = jax.tree.map(lambda a: a.reshape(total // chunk, chunk, *a.shape[1:]), rows)
    return jax.tree.map(lambda a: a.reshape(total, *a.shape[2:]), jax.lax.map(fn, split))

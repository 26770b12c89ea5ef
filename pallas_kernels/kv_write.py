"""Writes of quantized rows into the caches."""

from collections.abc import Callable
from typing import Literal

import chex
import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.dispatch import Implementation
from pallas_kernels.packed_rows import PackedRows, pack_index, pack_kv, pack_window, scatter
from pallas_kernels.rope import turn
from pallas_kernels.rowwise import map_rows

RowFormat = Literal["window", "kv", "index_k"]
_PACK: dict[RowFormat, Callable[[jax.Array], PackedRows]] = {
    "window": pack_window,
    "kv": pack_kv,
    "index_k": pack_index,
}


def write_rows(
    cache: PackedRows,
    slots: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    row_format: RowFormat,
    eps: float,
    count: jax.Array,
    implementation: Implementation,
) -> PackedRows:
    """Normalizes rows, turns them, quantizes them and writes them into a cache.

    Shapes: N cache rows, T rows, D channels, of which the last r turn.

    Args:
      cache: [N, ...] rows of `row_format`; overwritten in place where it may be.
      slots: int32[T], distinct cache rows; -1 is not written, as in every row past `count`.
      x: bf16[T, D].
      weight: bf16[D], of the RMSNorm.
      cos, sin: float32[T, r / 2].
      row_format: "window" FP8 with E8M0 scales, "kv" FP4 with E4M3 scales, "index_k" FP4 with
        E8M0 scales.
      eps: added to the mean square.
      count: int32[], rows that are real; they come first.
      implementation: which one runs.

    Returns:
      The cache with the rows written.
    """
    chex.assert_rank([slots, x, weight, cos, sin], [1, 2, 1, 2, 2])

    def pack(rows: tuple[jax.Array, jax.Array, jax.Array]) -> PackedRows:
        rows, cos, sin = rows
        wide = rows.astype(jnp.float32)
        normed = wide * numerics.rsqrt(numerics.mean(jnp.square(wide)) + eps)
        normed = (weight.astype(jnp.float32)[None] * normed).astype(rows.dtype)
        return _PACK[row_format](turn(normed, cos, sin))

    return scatter(cache, slots, map_rows(pack, (x, cos, sin), count, implementation="xla"))

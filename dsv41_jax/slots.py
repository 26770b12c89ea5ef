"""Where a position of a request lives in the paged caches."""

import jax
import jax.numpy as jnp

from pallas_kernels.paging import slot


def group_slots(pages: jax.Array, positions: jax.Array, ratio: int, page_size: int) -> jax.Array:
    """int32[T]: compressed cache row of the group that each row completes, -1 where it is none.

    Args:
      pages: int32[T, C], block-table row of each row's request; -1 throughout in padding.
      positions: int32[T]; a group is complete with the last of its `ratio` positions.
      ratio: positions of a group.
      page_size: positions on one page.
    """
    first = positions - (ratio - 1)
    number = jnp.where(first % ratio == 0, first // ratio, -1)
    return slot(pages, number[:, None], page_size // ratio)[:, 0]


def table_rows(table: jax.Array, requests: jax.Array) -> jax.Array:
    """int32[T, C] block-table rows of int32[T] requests; -1 throughout in padding."""
    rows = table[jnp.maximum(requests, 0)]
    return jnp.where((requests >= 0)[:, None], rows, -1)


def window_positions(positions: jax.Array, earliest: jax.Array, window: int) -> jax.Array:
    """int32[T, window]: what each position sees, ascending, unused slots -1 and last.

    Args:
      positions: int32[T].
      earliest: int32[T], first position that may be seen.
      window: positions seen at most, the own one included.
    """
    seen = jnp.minimum(positions + 1 - earliest, window)[:, None]
    steps = jnp.arange(window, dtype=jnp.int32)[None]
    return jnp.where(steps < seen, positions[:, None] + 1 - seen + steps, -1)

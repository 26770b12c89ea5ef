"""Where a row of a request lives in a paged cache."""

import jax
import jax.numpy as jnp


def slot(pages: jax.Array, positions: jax.Array, rows_per_page: int) -> jax.Array:
    """Cache rows of positions, by their request's block-table row.

    A position outside the table row, or on a page that is not kept, gets -1. XLA would clamp
    the index and return another request's row, hence the mask.

    Args:
      pages: int32[T, C], block-table row of each row's request.
      positions: int32[T, P], position (or compressed row number); negative is padding.
      rows_per_page: positions (or compressed rows) on one page.

    Returns:
      int32[T, P].
    """
    column = positions // rows_per_page
    inside = (positions >= 0) & (column < pages.shape[1])
    page = jnp.take_along_axis(pages, jnp.where(inside, column, 0), axis=1)
    found = page * rows_per_page + positions % rows_per_page
    return jnp.where(inside & (page >= 0), found, -1)

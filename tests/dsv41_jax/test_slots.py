"""Positions map to cache rows of their own request, or to none."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.slots import table_rows
from pallas_kernels.paging import slot

COLUMNS, PAGE = 32, 4
PAGES = jnp.asarray(np.arange(100, 100 + COLUMNS, dtype=np.int32)[None])


@pytest.mark.parametrize("position", [128, 130, 8192, 100000, 493447, 1048575, -1])
def test_position_past_the_table_row_has_no_slot(position):
    found = slot(PAGES, jnp.array([[position]]), PAGE)
    chex.assert_trees_all_equal(found, jnp.array([[-1]]))


@pytest.mark.parametrize("position", [0, 3, 127])
def test_position_inside_maps_to_its_page(position):
    found = slot(PAGES, jnp.array([[position]]), PAGE)
    expected = (100 + position // PAGE) * PAGE + position % PAGE
    chex.assert_trees_all_equal(found, jnp.array([[expected]]))


def test_position_on_a_page_that_is_not_kept_has_no_slot():
    pages = PAGES.at[0, 1].set(-1)
    found = slot(pages, jnp.array([[3, 4, 7, 8]]), PAGE)
    chex.assert_trees_all_equal(found, jnp.array([[403, -1, -1, 408]]))


def test_padding_rows_have_no_table():
    table = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    found = table_rows(table, jnp.array([1, -1, 0]))
    chex.assert_trees_all_equal(found, jnp.array([[3, 4, 5], [-1, -1, -1], [0, 1, 2]]))

"""Sizes of a step that holds any requests of these tests, so that one program runs them all."""

from dsv41_jax.inference import columns_for

ROWS, REQUESTS, POSITIONS = 112, 8, 128


def bucket(config):
    """Padded sizes of the batch."""
    columns = columns_for(config, POSITIONS)
    return dict(tokens=ROWS, requests=REQUESTS, columns=columns, logit_rows=ROWS)


def pools(config):
    """Sizes of the caches: pages for every request."""
    pages = REQUESTS * columns_for(config, POSITIONS)
    return dict(window_pages=pages, global_pages=pages, slots=REQUESTS)

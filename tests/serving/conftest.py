"""One compiled engine over the small checkpoint, for every test that needs the real model."""

import contextlib
import pathlib

import jax
import pytest

from dsv41_jax.checkpoint import load_params
from dsv41_jax.engram_table import EngramTables, read_tokenizer
from dsv41_jax.hf_config import load_config
from serving.detokenizer import vocabulary
from serving.engine import build_engine
from sharding.cache_sizes import cache_bytes

TINY = pathlib.Path(__file__).parents[1] / "golden" / "tiny_b"


@pytest.fixture(scope="session")
def engine():
    """A compiled engine whose caches hold little more than one full request: enough to preempt."""
    config = load_config(TINY)
    page = cache_bytes(config, range(config.num_hidden_layers), 16)
    budget = 12 * page.window_page + 16 * page.global_page + 8 * page.slot
    return build_engine(
        config,
        load_params(TINY, config),
        EngramTables.open(TINY, config),
        vocabulary(read_tokenizer(TINY)),
        kv_cache_memory_bytes=budget,
        max_model_len=160,
        max_num_seqs=8,
        max_num_batched_tokens=48,
    )


@pytest.fixture
def no_compilation():
    """A context in which nothing is compiled."""

    @contextlib.contextmanager
    def watch():
        compiled = []

        def listener(event, duration, **_):
            if "compile" in event:
                compiled.append(event)

        jax.monitoring.register_event_duration_secs_listener(listener)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(listener)
        assert compiled == []

    return watch

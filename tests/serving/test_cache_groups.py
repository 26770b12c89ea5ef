"""Pages by group: what a byte budget buys, which pages a request keeps."""

import dataclasses
import pathlib

import jax
import pytest
from toy_runner import toy_limits

from dsv41_jax.config import ConfigError
from dsv41_jax.hf_config import load_config
from dsv41_jax.state import init_state
from serving.cache_groups import CacheGroups
from sharding.cache_sizes import CacheBytes, CacheSizes, cache_bytes, plan_cache
from sharding.limits import engine_limits

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
UNIT = CacheBytes(window_page=100, global_page=10, slot=7)


@pytest.mark.parametrize("name", ["tiny_a", "tiny_b"])
@pytest.mark.parametrize("stage", [slice(None), slice(0, 2), slice(2, None)])
def test_planned_bytes_are_the_bytes_of_the_state(name, stage):
    config = load_config(GOLDEN / name)
    layers = range(config.num_hidden_layers)[stage]
    limits = engine_limits(config, max_model_len=64, max_num_seqs=3, max_num_batched_tokens=16)
    sizes = CacheSizes(window_pages=5, global_pages=9, slots=3)
    state = jax.eval_shape(lambda: init_state(config, layers, **dataclasses.asdict(sizes)))
    allocated = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert sizes.total_bytes(cache_bytes(config, layers, limits.page_size)) == allocated


def test_released_rows_have_the_deployed_byte_layouts():
    config = load_config("released")
    one_layer = cache_bytes(config, range(1), page_size=1)
    assert (one_layer.window_page, one_layer.global_page, one_layer.slot) == (528, 0, 0)
    ratio_one = next(i for i in config.kv_source_layer_ids if config.compress_ratios[i] == 1)
    source = cache_bytes(config, range(ratio_one, ratio_one + 1), page_size=1)
    assert (source.window_page, source.global_page) == (528, 288 + 68)


def test_without_a_budget_every_running_request_can_reach_max_model_len():
    limits = toy_limits()
    sizes = plan_cache(limits, UNIT, None)
    assert sizes.global_pages == limits.max_num_seqs * limits.columns
    assert sizes.slots == limits.max_num_seqs


def test_a_budget_is_not_exceeded_and_holds_one_request():
    limits = toy_limits(max_model_len=400)
    full = plan_cache(limits, UNIT, None)
    least = 100 * 7 + 10 * limits.columns + 7 * limits.max_num_seqs
    for budget in range(least, full.total_bytes(UNIT) + 500, 97):
        sizes = plan_cache(limits, UNIT, budget)
        assert sizes.total_bytes(UNIT) <= budget
        assert sizes.global_pages >= limits.columns
        assert sizes.window_pages >= 7
    assert plan_cache(limits, UNIT, 10**9) == full


def test_a_budget_below_one_request_is_refused_with_what_is_needed():
    with pytest.raises(ConfigError) as caught:
        plan_cache(toy_limits(), UNIT, 100)
    message = str(caught.value)
    assert "kv_cache_memory_bytes 100 is too small" in message
    assert "one request of max_model_len 64 needs 888 bytes" in message
    assert "16 global pages of 10 bytes" in message and "7 window pages of 100 bytes" in message


def groups_of(pages, **changes):
    limits = toy_limits(**changes)
    return CacheGroups(limits, CacheSizes(window_pages=pages, global_pages=pages, slots=1))


def test_pages_are_taken_as_positions_need_them():
    cache = groups_of(8)
    table = cache.new_table()
    assert cache.room(table, 0) == 32
    cache.reserve(table, 0, 5)
    assert cache.window.num_used == cache.global_.num_used == 2
    cache.reserve(table, 5, 3)
    assert cache.global_.num_used == 2
    cache.reserve(table, 8, 1)
    assert (table.global_ >= 0).sum() == 3
    cache.release(table)
    assert cache.usage == 0
    assert (table.window == -1).all() and (table.global_ == -1).all()


def test_window_pages_no_later_row_reads_are_freed():
    cache = groups_of(16)
    table = cache.new_table()
    cache.reserve(table, 0, 40)
    for start in range(1, 41):
        cache.trim(table, start)
        first_read = max(0, start - 8 + 1)
        held = [column for column in range(10) if table.window[column] >= 0]
        assert held == list(range(first_read // 4, 10))
    assert cache.global_.num_used == 10


def test_reserving_more_than_the_room_is_refused_and_takes_nothing():
    cache = groups_of(2)
    table = cache.new_table()
    with pytest.raises(ValueError, match="positions 0..8 do not fit the free pages"):
        cache.reserve(table, 0, 9)
    assert cache.usage == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be at least 1"),
        ({"max_model_len": 1}, "max_model_len is 1; it must hold a prompt token and a new one"),
        (
            {"max_num_batched_tokens": 3},
            "max_num_batched_tokens 3 is below max_num_seqs 4",
        ),
    ],
)
def test_sizes_that_cannot_work_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        toy_limits(**change)


def test_a_length_beyond_the_models_is_refused():
    config = load_config(GOLDEN / "tiny_a")
    with pytest.raises(ConfigError, match="above the model's max_position_embeddings"):
        engine_limits(config, max_model_len=10**9, max_num_seqs=1, max_num_batched_tokens=16)


@pytest.mark.parametrize(("replay", "positions"), [(False, 0), (True, 32)])
def test_a_prefix_whose_window_is_gone_is_found_with_replay_only(replay, positions):
    limits = toy_limits()
    sizes = CacheSizes(window_pages=16, global_pages=32, slots=1)
    cache = CacheGroups(limits, sizes, prefix_replay=replay)
    table, keys = cache.new_table(), [bytes([page]) for page in range(10)]
    cache.reserve(table, 0, 40)
    cache.remember(table, keys, 0)
    cache.release(table)
    cache.window.allocate(16)  # every window page is handed out for something else
    cache.window.forget_all()
    hit = cache.find(keys)
    assert (len(hit.global_) * 4, hit.window, hit.shared) == (positions, (), 10)


def test_replay_changes_nothing_where_the_window_is_there():
    cache = CacheGroups(
        toy_limits(), CacheSizes(window_pages=16, global_pages=32, slots=1), prefix_replay=True
    )
    table, keys = cache.new_table(), [bytes([page]) for page in range(10)]
    cache.reserve(table, 0, 40)
    cache.remember(table, keys, 0)
    cache.release(table)
    assert (len(cache.find(keys).global_), len(cache.find(keys).window)) == (10, 2)

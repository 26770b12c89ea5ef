"""Bounded replay: late layers see a prompt's last window, and nothing global is lost."""

import dataclasses

import chex
import jax
import numpy as np
import pytest
from step_sizes import bucket, pools

import dsv41_jax
from dsv41_jax.batch import page_size
from dsv41_jax.forward import forward
from dsv41_jax.host_batch import build_batch
from dsv41_jax.inference import prompt_chunks, replay_start, request_rows
from dsv41_jax.state import init_state
from pallas_kernels.packed_rows import PackedRows

TOKENS, DECODED = 90, 6


@pytest.fixture(scope="module")
def model(golden):
    return dsv41_jax.load(golden, progress=False)


@pytest.fixture(scope="module")
def ids(golden):
    return np.load(golden / "golden_text.npz")["input_ids"][: TOKENS + DECODED].tolist()


def run(model, ids, chunk, late_from, poison=False):
    """Logits of the prompt's last row and of the decoded rows, and the caches."""
    config, last_source = model.config, model.config.kv_source_layer_ids[-1]
    state = init_state(config, model.stage.layers, **pools(config))
    if poison:
        late = {
            layer: PackedRows(*jax.tree.map(lambda a: np.full_like(a, 0x7F), (p.codes, p.scales)))
            for layer, p in state.window.items()
            if layer > last_source
        }
        state = dataclasses.replace(state, window={**state.window, **jax.device_put(late)})
    parts = prompt_chunks(config, ids[:TOKENS], chunk, late_from)
    parts += [
        request_rows(config, ids[: i + 1], i, i + 1, chunk, late_from)
        for i in range(TOKENS, len(ids))
    ]
    logits = []
    for part in parts:
        part = dataclasses.replace(part, window_pages=part.global_pages)
        batch = build_batch(
            config,
            [part],
            **bucket(config),
            engram=model.engram,
        )
        out, state = forward(model.stage, model.params, state, batch)
        logits.append(np.asarray(out[: part.logits]))
    return np.concatenate(logits), jax.device_get(state)


@pytest.fixture(scope="module")
def exact(model, ids):
    return run(model, ids, TOKENS, 0)


@pytest.fixture(scope="module")
def replayed(model, ids):
    return run(model, ids, TOKENS, replay_start(model.config, TOKENS))


def test_everything_global_and_everything_early_equals_the_exact_run(model, exact, replayed):
    last_source = model.config.kv_source_layer_ids[-1]
    prompt = {
        layer: TOKENS // ratio
        for layer, ratio in enumerate(model.config.compress_ratios)
        if layer in exact[1].kv
    }
    for kind in ("kv", "index_k"):
        for layer, rows in prompt.items():
            a, b = (getattr(s, kind)[layer] for s in (exact[1], replayed[1]))
            chex.assert_trees_all_equal(a.codes[:rows], b.codes[:rows])
            chex.assert_trees_all_equal(a.scales[:rows], b.scales[:rows])
    for layer in range(last_source):
        a, b = (s.window[layer] for s in (exact[1], replayed[1]))
        chex.assert_trees_all_equal(a.codes[:TOKENS], b.codes[:TOKENS])


def test_late_layers_keep_no_window_before_the_replay(model, replayed):
    start = replay_start(model.config, TOKENS)
    page = page_size(model.config)
    for layer in range(model.config.kv_source_layer_ids[-1] + 1, model.config.num_hidden_layers):
        window = replayed[1].window[layer]
        assert not window.codes[: start // page * page].any()
        assert window.codes[start:TOKENS].any(axis=1).all()


def test_replay_is_an_approximation_of_a_prompt_longer_than_the_window(exact, replayed):
    assert np.isfinite(replayed[0]).all()
    assert not np.array_equal(exact[0], replayed[0])


@pytest.mark.parametrize("chunk", [5, 33])
def test_chunks_change_no_bit(model, ids, replayed, chunk):
    logits, _ = run(model, ids, chunk, replay_start(model.config, TOKENS))
    chex.assert_trees_all_equal(logits, replayed[0])


def test_rows_left_out_are_never_read(model, ids, replayed):
    logits, _ = run(model, ids, 33, replay_start(model.config, TOKENS), poison=True)
    chex.assert_trees_all_equal(logits, replayed[0])


def test_a_prompt_within_the_window_is_exact(model):
    assert replay_start(model.config, model.config.sliding_window) == 0


def test_logits_of_a_row_that_is_left_out_are_refused(model, ids):
    rows = request_rows(model.config, ids[:TOKENS], 0, TOKENS, TOKENS, TOKENS - 4)
    with pytest.raises(ValueError, match="5 logit rows are wanted of a request whose last 4 rows"):
        build_batch(
            model.config,
            [dataclasses.replace(rows, logits=5)],
            **bucket(model.config),
            engram=model.engram,
        )

"""A row's bits depend on its own request alone, however the work is cut and batched."""

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
from dsv41_jax.inference import prompt_chunks, request_rows
from dsv41_jax.state import init_state
from pallas_kernels.packed_rows import PackedRows

TOKENS = 101


@pytest.fixture(scope="module")
def model(golden):
    return dsv41_jax.load(golden, progress=False)


@pytest.fixture(scope="module")
def prompts(golden):
    """Eight prompts of different lengths; the first is the vectors' text."""
    text = np.load(golden / "golden_text.npz")["input_ids"][:TOKENS].tolist()
    return [text] + [text[i : i + 20 + 9 * i] for i in range(1, 8)]


class Batcher:
    """Runs several requests through one program, each with its own pages and slot."""

    def __init__(self, model):
        self.model = model
        self.columns = bucket(model.config)["columns"]
        self.state = init_state(model.config, model.stage.layers, **pools(model.config))

    def rows(self, ids, start, stop, place):
        rows = request_rows(self.model.config, ids, start, stop, stop - start)
        first = place * self.columns
        pages = [first + column for column in range(len(rows.global_pages))]
        return dataclasses.replace(
            rows, window_pages=pages, global_pages=pages, slot=place, logits=stop - start
        )

    def step(self, rows):
        batch = build_batch(
            self.model.config,
            rows,
            **bucket(self.model.config),
            engram=self.model.engram,
        )
        logits, self.state = forward(self.model.stage, self.model.params, self.state, batch)
        return np.asarray(logits[: int(batch.num_logits)])

    def request_rows_of_caches(self, place, tokens):
        """Cache bytes of one request's positions, page by page."""
        page = page_size(self.model.config)

        def own(rows, per_page):
            first = place * self.columns * per_page
            return np.asarray(rows[first : first + tokens * per_page // page])

        caches = {"window": {}, "kv": {}, "index_k": {}}
        for kind in caches:
            for layer, packed in getattr(self.state, kind).items():
                ratio = self.model.config.compress_ratios[layer] if kind != "window" else 1
                caches[kind][layer] = jax.tree.map(lambda a, r=ratio: own(a, page // r), packed)
        return caches


@pytest.fixture(scope="module")
def whole(model, prompts):
    """Logits and caches of each prompt run alone, in one piece."""
    results = []
    for ids in prompts:
        alone = Batcher(model)
        logits = alone.step([alone.rows(ids, 0, len(ids), 3)])
        results.append((logits, alone.request_rows_of_caches(3, len(ids))))
    return results


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 16, 64])
def test_chunks_change_no_bit(model, prompts, whole, chunk):
    ids = prompts[0]
    chunked = Batcher(model)
    logits = [
        chunked.step([chunked.rows(ids, start, min(start + chunk, len(ids)), 0)])
        for start in range(0, len(ids), chunk)
    ]
    expected_logits, expected_caches = whole[0]
    chex.assert_trees_all_equal(np.concatenate(logits), expected_logits)
    chex.assert_trees_all_equal(chunked.request_rows_of_caches(0, len(ids)), expected_caches)


def test_eight_requests_together_equal_each_alone(model, prompts, whole):
    """Each step takes a different number of tokens from each request."""
    together = Batcher(model)
    done = [0] * len(prompts)
    logits = [[] for _ in prompts]
    step = 0
    while any(done[r] < len(ids) for r, ids in enumerate(prompts)):
        share, owners = [], []
        for r, ids in enumerate(prompts):
            take = min(1 + (3 * r + 5 * step) % 14, len(ids) - done[r])
            if take:
                share.append(together.rows(ids, done[r], done[r] + take, r))
                owners.append((r, take))
                done[r] += take
        out = together.step(share)
        for r, take in owners:
            logits[r].append(out[:take])
            out = out[take:]
        step += 1
    for r, (expected_logits, expected_caches) in enumerate(whole):
        chex.assert_trees_all_equal(np.concatenate(logits[r]), expected_logits)
        chex.assert_trees_all_equal(
            together.request_rows_of_caches(r, len(prompts[r])), expected_caches
        )


def test_score_equals_any_chunking_and_the_step_functions(model, prompts, whole):
    chex.assert_trees_all_equal(dsv41_jax.score(model, prompts[0], chunk_size=64), whole[0][0])


def test_unused_cache_rows_may_hold_anything(model, prompts, whole):
    """NaN in every row that no request has written changes no bit of any result."""
    poisoned = Batcher(model)
    ids = prompts[0]

    def poison(state):
        def fill(packed):
            return PackedRows(
                np.full(packed.codes.shape, 0x7F, np.uint8),
                np.full(packed.scales.shape, 0xFF, np.uint8),
            )

        groups = {
            k: jax.tree.map(lambda a: np.full(a.shape, np.nan, a.dtype), v)
            for k, v in state.open_group.items()
        }
        fields = {
            kind: {layer: fill(packed) for layer, packed in getattr(state, kind).items()}
            for kind in ("window", "kv", "index_k")
        }
        return state.__class__(**fields, open_group=groups)

    poisoned.state = jax.device_put(poison(poisoned.state))
    logits = []
    for part in prompt_chunks(model.config, ids, 33):
        start, stop = part.start, part.start + len(part.token_ids)
        logits.append(poisoned.step([poisoned.rows(ids, start, stop, 5)]))
    chex.assert_trees_all_equal(np.concatenate(logits), whole[0][0])
    chex.assert_trees_all_equal(poisoned.request_rows_of_caches(5, len(ids)), whole[0][1])

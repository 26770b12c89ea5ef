"""The model on its kernels, interpreted: within the loose tier, and row by row."""

import pathlib
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_compiler import compiled_anew

from dsv41_jax.batch import page_size
from dsv41_jax.host_batch import RequestRows, build_batch
from dsv41_jax.inference import columns_for
from dsv41_jax.layers.block import Stream
from dsv41_jax.model import Stage
from dsv41_jax.state import init_state
from dsv41_jax.verify import forward as verify_forward
from dsv41_jax.verify import ops as verify_ops
from dsv41_jax.verify import rope as verify_rope
from dsv41_jax.verify.cases import run_cases
from dsv41_jax.verify.vectors import Directory

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TOKENS = 40
SMALL, LARGE = 16, 48  # rows of the two programs
FULL = pytest.mark.full


@pytest.fixture(autouse=True)
def quick():
    modules = (verify_forward, verify_ops, verify_rope)
    patches = [mock.patch.object(module, "compiled", compiled_anew) for module in modules]
    for patch in patches:
        patch.start()
    yield
    for patch in patches:
        patch.stop()


@pytest.mark.parametrize(
    "name, case",
    [
        ("tiny_a", "layers"),
        pytest.param("tiny_a", "ops", marks=FULL),
        pytest.param("tiny_b", "layers", marks=FULL),
        pytest.param("tiny_b", "ops", marks=FULL),
    ],
)
def test_recorded_vectors_are_met_within_the_loose_tier(name, case):
    directory = Directory(GOLDEN / name, progress=False)
    found = list(run_cases(directory, [case], "loose", "pallas_interpret", lambda text: None))
    assert not [(m.phase, m.quantity, m.layer) for m in found if not m.ok]
    if case == "layers":
        judged = {"attn_out", "ffn_out", "engram_out", "topk", "candidates", "caches"}
        assert judged <= {m.quantity for m in found}


class Requests:
    """Requests on one set of caches; a step runs the smallest program that holds it."""

    def __init__(self, directory, stage, step):
        self.stage, self.step, self.engram = stage, step, directory.engram
        self.params = directory.params
        self.columns = columns_for(stage.config, TOKENS)
        pages = 3 * self.columns
        self.state = init_state(
            stage.config, stage.layers, window_pages=pages, global_pages=pages, slots=3
        )

    def run(self, *shares):
        """The stream after the stage, of shares (place, ids, stream, start, stop)."""
        rows, streams = [], []
        for place, ids, stream, start, stop in shares:
            pages = range(place * self.columns, (place + 1) * self.columns)
            history = [-1, -1, -1, *ids[:start]][-3:]
            rows.append(
                RequestRows(
                    token_ids=np.asarray(ids[start:stop], np.int32),
                    start=start,
                    history=np.asarray(history, np.int64),
                    window_pages=pages,
                    global_pages=pages,
                    slot=place,
                    logits=stop - start,
                )
            )
            streams.append(jax.tree.map(lambda a, cut=slice(start, stop): a[cut], stream))
        total = sum(len(row.token_ids) for row in rows)
        tokens = SMALL if total <= SMALL else LARGE
        batch = build_batch(
            self.stage.config,
            rows,
            tokens=tokens,
            requests=3,
            columns=self.columns,
            logit_rows=tokens,
            engram=self.engram,
        )
        joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *streams)
        padded = jax.tree.map(lambda a: jnp.resize(a, (tokens, *a.shape[1:])), joined)
        out, self.state = self.step(self.params, self.state, batch, padded)
        return jax.tree.map(lambda a: np.asarray(a[:total]), out)

    def caches(self, place):
        """Cache bytes of one request's rows."""
        page, ratios = page_size(self.stage.config), self.stage.config.compress_ratios

        def own(packed, ratio):
            first = place * self.columns * page // ratio
            return jax.tree.map(lambda a: np.asarray(a[first : first + TOKENS // ratio]), packed)

        found = {"window": {n: own(rows, 1) for n, rows in self.state.window.items()}}
        for kind in ("kv", "index_k"):
            caches = getattr(self.state, kind)
            found[kind] = {n: own(rows, ratios[n]) for n, rows in caches.items()}
        return found


def random_request(config, rng):
    ids = rng.integers(3, config.vocab_size, TOKENS).tolist()
    x = rng.normal(size=(TOKENS, config.hc_mult, config.hidden_size))
    pre = rng.uniform(size=(TOKENS, config.hc_mult))
    return ids, Stream(jnp.asarray(x, jnp.bfloat16), jnp.asarray(pre, jnp.float32))


# tiny_a: 1 has an Engram, 2 compresses by 2; 5 selects candidates, 7 is masked by them.
@pytest.mark.parametrize("layers", [pytest.param(range(1, 3), marks=FULL), range(5, 9)], ids=str)
def test_a_row_does_not_depend_on_its_batch(layers):
    """One request alone in one piece, and beside two others, in shares, by another program."""
    directory = Directory(GOLDEN / "tiny_a", progress=False)
    stage = Stage(directory.config, layers, implementation="pallas_interpret")

    def run(params, state, batch, stream):
        result = stage(params, state, batch, stream)
        logits = result.head.logits if result.head else None
        return (result.stream, logits), result.state

    step = compiled_anew(run)
    rng = np.random.default_rng(0)
    own, *others = (random_request(directory.config, rng) for _ in range(3))
    alone = Requests(directory, stage, step)
    whole = alone.run((2, *own, 0, TOKENS))

    beside = Requests(directory, stage, step)
    parts, cuts = [], [0, 1, 4, 11, 19, 24, TOKENS]
    for start, stop in zip(cuts, cuts[1:], strict=False):
        before = min(stop - start, 4)
        out = beside.run(
            (1, *others[0], start, start + before),
            (0, *own, start, stop),
            (2, *others[1], start, start + 1),
        )
        kept = slice(before, before + stop - start)
        parts.append(jax.tree.map(lambda a, kept=kept: a[kept], out))
    chex.assert_trees_all_equal(jax.tree.map(lambda *a: np.concatenate(a), *parts), whole)
    chex.assert_trees_all_equal(beside.caches(0), alone.caches(2))

"""The sampler: truncation, seeds, bans, log-probabilities, and rows that stand alone."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv41_jax.sampling import (
    NUM_ALTERNATIVES,
    LogitChanges,
    SamplingBatch,
    mask_words,
    sample,
)

VOCABULARY = 101  # odd, so that vector remainders fall differently in every row
_sample = jax.jit(
    functools.partial(sample, implementation="xla"),
    compiler_options={"xla_allow_excess_precision": False},
)


CHANGED = 5  # K


def batch_of(rows, size=16):
    """A SamplingBatch of `rows` (dicts of overrides), padded to `size`.

    "changes" is {token: (divisor, bias)}, "banned" tokens that are not allowed.
    """
    defaults = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0}
    defaults |= {"step": 0, "target": -1}
    dtypes = {"temperature": "f4", "top_p": "f4", "min_p": "f4", "seed": "u4"}
    arrays = {name: np.zeros(size, dtypes.get(name, "i4")) for name in defaults}
    watched = np.full((size, NUM_ALTERNATIVES), -1, np.int32)
    change_row = np.full(size, -1, np.int32)
    changes = LogitChanges(
        ids=np.full((size, CHANGED), -1, np.int32),
        divisor=np.ones((size, CHANGED), np.float32),
        bias=np.zeros((size, CHANGED), np.float32),
        allowed=np.full((size, mask_words(VOCABULARY)), 2**32 - 1, np.uint32),
    )
    for index, row in enumerate(rows):
        for name, default in defaults.items():
            arrays[name][index] = row.get(name, default)
        watched[index, : len(row.get("watched", ()))] = row.get("watched", ())
        if "changes" in row or "banned" in row:
            place = size - 1 - index  # anywhere but at the row's own number
            change_row[index] = place
            for column, (token, (divisor, bias)) in enumerate(row.get("changes", {}).items()):
                changes.ids[place, column] = token
                changes.divisor[place, column] = divisor
                changes.bias[place, column] = bias
            for token in row.get("banned", ()):
                changes.allowed[place, token // 32] &= ~np.uint32(1 << (token % 32))
    return SamplingBatch(**arrays, watched=watched, change_row=change_row, changes=changes)


def logits_of(rows, seed=0, size=16):
    logits = np.zeros((size, VOCABULARY), np.float32)
    logits[:rows] = np.random.default_rng(seed).normal(scale=3, size=(rows, VOCABULARY))
    return logits


def run(logits, rows):
    return jax.device_get(_sample(logits, batch_of(rows, len(logits)), np.int32(len(rows))))


def draws(logits_row, row, count):
    """`count` tokens of one distribution, by step."""
    size = -(-count // 16) * 16
    logits = np.tile(logits_row, (size, 1))
    return run(logits, [row | {"step": step} for step in range(count)]).tokens[:count]


def test_temperature_zero_takes_the_lowest_of_the_likeliest_tokens():
    logits = logits_of(2)
    logits[0, [7, 40]] = 50.0
    logits[1, 3] = 50.0
    assert run(logits, [{}, {}]).tokens[:2].tolist() == [7, 3]


def test_logprobs_are_of_the_raw_distribution():
    logits = logits_of(3)
    rows = [{"temperature": 0.3, "top_k": 2}, {"banned": (int(logits[1].argmax()),)}, {"target": 9}]
    result = run(logits, rows)
    expected = logits[:3] - np.log(np.exp(logits[:3].astype(np.float64)).sum(1, keepdims=True))
    order = np.argsort(-expected, axis=1)
    chex.assert_shape(result.top_ids, (16, NUM_ALTERNATIVES))
    np.testing.assert_array_equal(result.top_ids[:3], order[:, :NUM_ALTERNATIVES])
    for row in range(3):
        token = result.tokens[row]
        np.testing.assert_allclose(result.logprobs[row], expected[row, token], rtol=1e-5)
        assert result.ranks[row] == 1 + list(order[row]).index(token)
    assert result.tokens[1] == order[1, 1]
    assert result.tokens[2] == 9


def test_sampling_follows_the_softmax_of_the_scaled_logits():
    logits = np.full(VOCABULARY, -30.0, np.float32)
    logits[:4] = np.log([0.1, 0.2, 0.3, 0.4])
    tokens = draws(logits, {"temperature": 0.5, "seed": 5}, 4000)
    shares = np.bincount(tokens, minlength=4)[:4] / len(tokens)
    np.testing.assert_allclose(shares, np.array([1, 4, 9, 16]) / 30, atol=0.03)


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ({"top_k": 2}, {2, 3}),
        ({"top_k": 1}, {3}),
        ({"top_k": 1000}, {0, 1, 2, 3}),
        ({"top_p": 0.35}, {3}),
        ({"top_p": 0.45}, {2, 3}),
        ({"top_p": 0.95}, {0, 1, 2, 3}),
        ({"top_k": 3, "top_p": 0.7}, {2, 3}),
        ({"min_p": 0.4}, {1, 2, 3}),
        ({"min_p": 1.0}, {3}),
        ({"min_p": 0.6, "top_k": 3}, {2, 3}),
        ({"banned": (3, 2)}, {0, 1}),
        ({"banned": (3,), "top_k": 1}, {2}),
        ({"banned": (*range(3), *range(4, VOCABULARY))}, {3}),
        ({"changes": {3: (1, -50), 90: (1, 31)}, "top_k": 2}, {2, 90}),
        ({"changes": {1: (1, 50)}, "banned": (1,), "top_k": 1}, {3}),
        ({"changes": {3: (2, 0)}, "top_k": 1}, {2}),
    ],
)
def test_truncation_keeps_exactly_the_tokens_it_should(row, kept):
    logits = np.full(VOCABULARY, -30.0, np.float32)
    logits[:4] = np.log([0.1, 0.2, 0.3, 0.4])
    assert set(draws(logits, {"temperature": 1.0} | row, 256).tolist()) == kept


def test_the_draw_depends_on_seed_and_step_alone():
    logits = logits_of(16, seed=1)
    row = {"temperature": 1.5, "seed": 2**32 - 1}
    first = draws(logits[0], row, 64)
    np.testing.assert_array_equal(first, draws(logits[0], row, 64))
    assert (first != draws(logits[0], row | {"seed": 8}, 64)).any()
    assert len(set(first.tolist())) > 5


def test_a_rows_bits_do_not_depend_on_its_neighbours():
    generator = np.random.default_rng(4)
    logits = logits_of(48, seed=2, size=48)
    kinds = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 2.0, "top_k": 12, "min_p": 0.01},
        {"target": 5},
        {"changes": {4: (1.3, -0.7), 100: (0.8, 0.1), 7: (1.0, 2.5)}, "watched": (3, 99)},
        {"temperature": 0.9, "banned": (0, 31, 32, 100), "changes": {64: (1.7, 1.1)}},
    ]
    rows = [kinds[i % 7] | {"seed": i, "step": i * 3} for i in range(48)]
    whole = run(logits, rows)
    for index in generator.permutation(48)[:12]:
        alone = run(logits[index : index + 1].repeat(16, 0), [rows[index]])
        for field in dataclasses.fields(whole):
            one, other = getattr(alone, field.name)[0], getattr(whole, field.name)[index]
            np.testing.assert_array_equal(one, other, err_msg=field.name)
    order = generator.permutation(48)
    shuffled = run(logits[order], [rows[i] for i in order])
    chex.assert_trees_all_equal(shuffled, jax.tree.map(lambda a: a[order], whole))


def test_a_penalty_divides_positive_logits_and_multiplies_negative_ones():
    logits = np.full(VOCABULARY, -9.0, np.float32)
    logits[:4] = [2.0, 1.1, -1.0, -1.5]
    tiled = np.tile(logits, (16, 1))
    apart = {0: (2.0, -9), 1: (2.0, 0.0)}
    rows = [
        {"changes": apart},
        {"changes": apart | {2: (0.5, 0.0)}},
        {"changes": {0: (2.0, -9), 1: (2.0, -9), 2: (2.0, 0.0)}},
    ]
    assert run(tiled, rows).tokens[:3].tolist() == [1, 1, 3]
    rows = [{"changes": apart | {1: (4.0, -0.8), 2: (0.25, 0.0)}}]
    assert run(tiled, rows).tokens[0] == 2


def test_logprobs_of_watched_tokens_are_those_of_the_raw_distribution():
    logits = logits_of(2)
    result = run(logits, [{"watched": (5, 100, 5)}, {"banned": (7,), "watched": (7,)}])
    expected = logits[:2] - np.log(np.exp(logits[:2].astype(np.float64)).sum(1, keepdims=True))
    np.testing.assert_allclose(result.watched_logprobs[0, :3], expected[0, [5, 100, 5]], rtol=1e-5)
    np.testing.assert_allclose(result.watched_logprobs[1, 0], expected[1, 7], rtol=1e-5)


def test_a_row_without_changes_is_the_same_beside_one_that_has_some():
    logits = logits_of(2, seed=6)
    plain = {"temperature": 1.0, "seed": 3}
    beside = run(logits, [plain, {"banned": (1, 2, 3)}])
    alone = _sample(logits, dataclasses.replace(batch_of([plain]), changes=None), np.int32(1))
    chex.assert_trees_all_equal(
        jax.tree.map(lambda a: a[0], beside), jax.tree.map(lambda a: a[0], jax.device_get(alone))
    )


def test_wrong_logits_are_refused_while_tracing():
    with pytest.raises(AssertionError):
        _sample(jnp.zeros((16, 4), jnp.bfloat16), batch_of([{}]), np.int32(1))

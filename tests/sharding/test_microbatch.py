"""Cutting a step by tokens: order, histories, logit rows."""

import numpy as np
import pytest

from dsv41_jax.host_batch import RequestRows
from dsv41_jax.sampling import single_request
from sharding.microbatch import cut_rows, join_sampled, microbatch_tokens, sampling_rows


def request(count, *, start=0, logits=0, slot=0):
    ids = np.arange(start, start + count, dtype=np.int32) + 100 * slot
    history = np.array([ids[0] - i if start >= i else -1 for i in (3, 2, 1)])
    return RequestRows(
        token_ids=ids,
        start=start,
        history=history,
        window_pages=[0],
        global_pages=[0],
        slot=slot,
        logits=logits,
    )


@pytest.mark.parametrize("count", [1, 2, 3, 4, 20])
def test_a_cut_keeps_every_token_in_order_and_leaves_no_microbatch_empty(count):
    rows = [request(7), request(1, start=5, slot=1), request(4, slot=2)]
    parts = cut_rows(rows, count)
    assert len(parts) == min(count, 12)
    sizes = [sum(len(row.token_ids) for row in part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    joined = np.concatenate([row.token_ids for part in parts for row in part])
    np.testing.assert_array_equal(joined, np.concatenate([row.token_ids for row in rows]))


def test_a_request_goes_on_with_its_history_position_and_slot():
    first, second = (part[0] for part in cut_rows([request(7, start=2, logits=7, slot=1)], 2))
    assert (first.start, second.start) == (2, 5)
    assert second.slot == 1
    np.testing.assert_array_equal(first.history, [-1, 100, 101])
    np.testing.assert_array_equal(second.history, [102, 103, 104])


def test_a_short_share_keeps_the_older_history():
    parts = cut_rows([request(3)], 3)
    np.testing.assert_array_equal(parts[1][0].history, [-1, -1, 0])
    np.testing.assert_array_equal(parts[2][0].history, [-1, 0, 1])


@pytest.mark.parametrize("logits", [0, 1, 3, 6])
def test_logit_rows_stay_with_their_tokens(logits):
    parts = cut_rows([request(6, logits=logits)], 4)
    wanted = [
        int(token)
        for part in parts
        for row in part
        for token in row.token_ids[len(row.token_ids) - row.logits :]
    ]
    assert wanted == list(range(6))[6 - logits :]


def test_a_step_without_tokens_is_one_empty_microbatch():
    assert cut_rows([], 3) == [[]]


@pytest.mark.parametrize(("tokens", "count", "bucket"), [(64, 1, 64), (64, 4, 16), (65, 2, 48)])
def test_the_bucket_holds_the_largest_microbatch(tokens, count, bucket):
    assert microbatch_tokens(tokens, count) == bucket


def test_sampling_rows_follow_the_microbatches():
    sampling = single_request(0.0, 0, 0)
    sampling.step[:4] = [10, 11, 12, 13]
    second = sampling_rows(sampling, 2, 16)
    np.testing.assert_array_equal(second.step[:2], [12, 13])
    assert all(len(leaf) == 16 for leaf in vars(second).values() if leaf is not None)


def test_results_join_in_the_order_of_the_step():
    parts = [np.array([1, 2, 0]), np.array([3, 0, 0])]
    joined = join_sampled([{"tokens": part} for part in parts], [2, 1], 5)
    np.testing.assert_array_equal(joined["tokens"], [1, 2, 3, 0, 0])

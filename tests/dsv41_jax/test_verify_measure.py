"""Comparisons and their figures."""

import numpy as np
import pytest

from dsv41_jax.verify.measure import (
    compare_bf16,
    compare_exact,
    compare_logits,
    compare_masks,
    compare_rows,
    compare_sets,
    figures,
    judge,
    uncompared,
)
from dsv41_jax.verify.report import heading, table
from dsv41_jax.verify.tolerances import at_least, at_most, layer_limits
from dsv41_jax.verify.vectors import VectorError


def test_relative_error_is_a_rows_norm_of_the_difference_over_its_norm():
    want = np.array([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0]])
    rows = compare_rows("x", want + np.array([[0, 0.5], [0, 0], [0, 1]]), want)
    assert rows.rel.tolist() == [0.1, 0.0, np.inf]
    assert rows.equal.tolist() == [False, True, False]


def test_share_of_equal_rows_counts_whole_rows():
    want = np.zeros((4, 3))
    got = want.copy()
    got[1, 2] = got[3, 0] = 1
    assert figures(compare_rows("x", got, want))["equal"] == 0.5


def test_not_a_number_keeps_no_limit():
    rows = compare_rows("x", np.full((2, 2), np.nan), np.ones((2, 2)))
    limits = (at_most("mean_rel", 1e9),)
    (measure,) = judge("layers", "prefill", "x_out", {None: rows}, limits)
    assert not measure.ok
    assert measure.json()["mean_rel"] is None


def test_bf16_distance_counts_values_in_between_across_zero():
    step = np.float32(2.0**-7)
    got = np.array([1 + step, 1.0, 2.0**-133, np.nan], np.float32)
    want = np.array([1.0, 1 + 2 * step, -(2.0**-133), 1.0], np.float32)
    assert compare_bf16("x", got, want).distance.tolist() == [1, 2, 2, np.inf]


def test_sets_ignore_order_and_unused_slots():
    got = np.array([[3, 1, -1], [1, 2, 3], [-1, -1, -1], [4, 5, 6]])
    want = np.array([[1, 3], [1, 2], [-1, -1], [7, 8]])
    rows = compare_sets("topk", got, want)
    np.testing.assert_allclose(rows.overlap, [1, 2 / 3, 1, 0])
    assert rows.equal.tolist() == [True, False, True, False]


def test_masks_overlap_as_sets():
    got = np.array([[True, True, False], [False, False, False]])
    want = np.array([[True, False, False], [False, False, False]])
    assert compare_masks("candidates", got, want).overlap.tolist() == [0.5, 1]


def test_logits_compare_the_arg_max():
    rows = compare_logits("logits", np.array([[1.0, 2], [2, 1]]), np.array([[0.0, 5], [0, 1]]))
    assert rows.overlap.tolist() == [1, 0]


def test_shapes_that_differ_are_named():
    with pytest.raises(
        VectorError, match=r"L0.x_out is recorded with shape \(2, 3\), but .*\(2, 4\)"
    ):
        compare_rows("L0.x_out", np.zeros((2, 4)), np.zeros((2, 3)))


def test_scalars_and_empty_arrays_compare():
    assert compare_exact("n", np.int64(3), np.int32(3)).equal.tolist() == [True]
    assert (
        judge("layers", "decode", "x_out", {0: compare_rows("x", *[np.zeros((0, 2))] * 2)}, ())
        == []
    )


def test_limits_hold_for_all_layers_together():
    good = compare_rows("x", np.ones((3, 2)), np.ones((3, 2)))
    bad = compare_rows("x", np.zeros((1, 2)), np.ones((1, 2)))
    limits = (at_least("equal", 0.7),)
    pooled, *layers = judge("layers", "prefill", "attn_out", {0: good, 4: bad}, limits)
    assert (pooled.layer, pooled.rows, pooled.figures["equal"]) == (None, 4, 0.75)
    assert [(m.layer, m.rows, m.ok) for m in layers] == [(0, 3, True), (4, 1, True)]


def test_loose_tier_is_the_wider_one():
    assert layer_limits("strict", "decode", "topk") == (("overlap", ">=", 0.995),)
    assert layer_limits("loose", "decode", "topk") == (("overlap", ">=", 0.985),)
    assert layer_limits("loose", "prefill", "pre_out") == ()


def test_json_line_has_the_named_keys():
    line = uncompared("draft", "case", "not supported yet").json()
    keys = "case, phase, quantity, layer, rows, equal, mean_rel, p99_rel, max_rel, overlap, ok"
    assert list(line) == keys.split(", ")
    assert line["ok"] is False


def test_table_shows_the_layers_of_what_falls_short():
    good = compare_rows("x", np.ones((1, 2)), np.ones((1, 2)))
    bad = compare_rows("x", np.zeros((1, 2)), np.ones((1, 2)))
    measures = judge("layers", "end", "caches", {0: good, 1: bad}, (at_least("equal", 0.95),))
    lines = list(table(measures))
    assert heading().split() == ["what", "rows", "worst", "figure", "tolerance", "ok"]
    assert [line.split()[-1] for line in lines] == ["NO", "yes", "NO"]
    assert "layers end caches layer 1" in lines[2]
    assert "equal 0.5" in lines[0]
    assert "equal >= 0.95" in lines[0]

"""Single operations against the recorded vectors."""

import pathlib

import numpy as np
import pytest

from dsv41_jax.verify import Directory
from dsv41_jax.verify.ops import check_ops, unchecked_ops

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
EXACT = ("act_quant.", "fp4_act_quant.", "window_idx.", "select_candidate_blocks.")
BF16 = ("sparse_attn.", "rmsnorm.", "rope.apply.", "hc_block.hc_", "compressor.r1.prefill")


@pytest.fixture(scope="module", params=["tiny_a", "tiny_b"])
def measures(request):
    directory = Directory(GOLDEN / request.param)
    found = check_ops(directory.config, directory.vectors("ops"), "xla")
    return {m.quantity: m for m in found}


def of(measures, *prefixes):
    found = [m for name, m in measures.items() if name.startswith(prefixes)]
    assert found
    return found


def test_every_operation_is_within_its_tolerance(measures):
    assert not [name for name, measure in measures.items() if not measure.ok]


def test_formats_and_tables_are_exact(measures):
    assert all(m.figures["equal"] == 1 for m in of(measures, *EXACT))
    assert all(m.figures["equal"] == 1 for n, m in measures.items() if n.endswith("w_dequant"))
    assert all(m.figures["equal"] == 1 for n, m in measures.items() if n.endswith(".ids"))


def test_matmuls_round_as_recorded(measures):
    for measure in of(measures, "fp8_gemm", "fp4_gemm"):
        if measure.quantity.endswith("y_fp32"):
            assert measure.figures["max_rel"] <= 1e-6
        elif measure.quantity.endswith(".y"):
            assert measure.figures["far"] <= 1
            assert measure.figures["equal"] >= 0.999


def test_bf16_results_are_within_one_unit_in_the_last_place(measures):
    for measure in of(measures, *BF16):
        assert measure.figures["far"] <= 1
        assert measure.figures["equal"] >= 0.99


def test_sinkhorn_and_expert_are_close(measures):
    assert all(m.figures["far"] <= 1e-5 for m in of(measures, "hc_split_sinkhorn"))
    assert all(m.figures["mean_rel"] <= 5e-3 for m in of(measures, "expert."))


def test_rope_tables_are_close(measures):
    for name, measure in measures.items():
        if name.startswith("rope.") and name.endswith((".cos", ".sin")):
            assert measure.figures["far"] <= 1e-6
        if name.startswith("rope.") and name.endswith(".stored"):
            assert measure.figures["far"] <= 1e-7


@pytest.mark.parametrize("name", ["tiny_a", "tiny_b"])
def test_operations_without_a_check_belong_to_the_draft_and_to_vision(name):
    vectors = Directory(GOLDEN / name).vectors("ops")
    assert unchecked_ops(vectors) == ["dspark_idx", "plan_image_grid", "vision_rope"]


def test_file_without_operations_falls_short():
    directory = Directory(GOLDEN / "tiny_a")
    (measure,) = check_ops(directory.config, {"other": np.zeros(1)}, "xla")
    assert not measure.ok
    assert measure.note == "no operation is recorded"

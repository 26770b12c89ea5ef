"""Bytes and operations that a step cannot avoid, against sums made another way."""

import json

import pytest

from dsv41_jax.hf_config import load_config
from pallas_kernels import grouped_matmul, hyper_connections, kv_write, sparse_attention
from sharding.limits import engine_limits
from sharding.memory import stage_bytes
from sharding.roofline import CHIPS, Row, active_experts, roofline, step_seconds
from sharding.roofline_report import plan_rooflines, roofline_facts, roofline_text
from sharding.stage_plan import build_stage_plan
from sharding.step_cost import layer_costs
from sharding.tensor_plan import plan_tensor_parallel

EXPERT = 3 * 5120 * 2304 * 17 // 32  # FP4 codes and a scale byte for 32 of them
LAYERS = 40


@pytest.fixture(scope="module")
def released():
    return load_config("released")


@pytest.fixture(scope="module")
def whole(released):
    return build_stage_plan(released, stages=(LAYERS,))


@pytest.fixture(scope="module")
def halves(released):
    return build_stage_plan(released, stages=(20, 20))


def rows_of(config, plan, devices=1, *, expert_parallel=False, stage=0, **step):
    tensor = plan_tensor_parallel(config, devices, expert_parallel=expert_parallel)
    step = {"tokens": 1, "requests": 1, "context": 4095, **step}
    return {row.op: row for row in plan_rooflines(config, plan, tensor, **step)[stage]}


def total(rows, field, *without):
    return sum(getattr(row, field) for op, row in rows.items() if op not in without)


@pytest.mark.parametrize(("devices", "expert_parallel"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_reads_every_dense_byte_of_its_stage_once(
    released, halves, devices, expert_parallel, stage
):
    tensor = plan_tensor_parallel(released, devices, expert_parallel=expert_parallel)
    limits = engine_limits(released, max_model_len=4096, max_num_seqs=1, max_num_batched_tokens=64)
    held = stage_bytes(released, halves, tensor, limits, microbatches=2)[stage]
    rows = rows_of(released, halves, devices, expert_parallel=expert_parallel, stage=stage)
    head = held.embedding if stage else 0
    read = total(rows, "parameters", "ffn.experts", "embed")
    assert read == held.dense + held.other + head


def test_a_decode_token_reads_the_bytes_that_balance_the_stages(released, whole):
    rows = rows_of(released, whole)
    assert total(rows, "parameters", "embed") == sum(layer_costs(released))
    assert rows["embed"].parameters == 2 * 5120


@pytest.mark.parametrize(
    ("devices", "expert_parallel", "share"), [(1, False, 1), (2, False, 2), (2, True, 2)]
)
def test_experts_read_those_that_are_active(released, whole, devices, expert_parallel, share):
    rows = rows_of(
        released, whole, devices, expert_parallel=expert_parallel, tokens=16, requests=16, active=80
    )
    experts = rows["ffn.experts"]
    assert experts.parameters == LAYERS * 80 * EXPERT / share
    assert experts.flops == LAYERS * 2 * 16 * 6 * 3 * 5120 * 2304 / share


def test_all_experts_are_read_once_all_are_active(released, whole):
    tensor = plan_tensor_parallel(released, 1)
    limits = engine_limits(released, max_model_len=4096, max_num_seqs=1, max_num_batched_tokens=64)
    held = stage_bytes(released, whole, tensor, limits, microbatches=1)[0]
    rows = rows_of(released, whole, active=384)
    assert rows["ffn.experts"].parameters == held.experts + held.expert_scales


def test_active_experts_are_expected_of_random_choices(released):
    assert active_experts(released, 1) == 6
    assert active_experts(released, 2) == pytest.approx(6 + 6 * 378 / 384)
    assert 383 < active_experts(released, 512) < 384


def test_attention_reads_the_window_and_the_chosen_rows_of_every_request(released, whole):
    window, chosen, ratios = 128 * 528, 512 * 288, released.compress_ratios[:LAYERS]
    with_chosen = sum(1 for ratio in ratios if ratio)
    rows = rows_of(released, whole, tokens=4, requests=4)
    attention = rows["sparse_attention"]
    assert released.index_topk == 512
    assert attention.caches == 4 * (LAYERS * window + with_chosen * chosen)
    assert attention.flops == 4 * 4 * 64 * 512 * (LAYERS * 128 + with_chosen * 512)


def test_tokens_of_a_prompt_share_the_rows_they_read(released, whole):
    rows = rows_of(released, whole, tokens=256, requests=1, context=0)
    ratios = [ratio for ratio in released.compress_ratios[:LAYERS] if ratio]
    compressed = sum(256 // ratio for ratio in ratios)
    assert rows["sparse_attention"].caches == LAYERS * 256 * 528 + compressed * 288
    keys = LAYERS * (128 * 129 // 2 + 128 * 128)
    keys += sum(sum(position // ratio for position in range(1, 257)) for ratio in ratios)
    assert rows["sparse_attention"].flops == 4 * 64 * 512 * keys


def test_index_scores_read_every_visible_key_once_per_request(released, whole):
    rows = rows_of(released, whole, tokens=2, requests=2, context=8191)
    ratios = [released.compress_ratios[layer] for layer in released.index_source_layer_ids]
    visible = sum(8192 // ratio for ratio in ratios)
    assert rows["index_scores"].caches == 2 * 68 * visible
    assert rows["index_scores"].flops == 2 * 2 * 32 * 128 * visible


def test_caches_are_written_with_every_token_and_every_complete_group(released, whole):
    rows = rows_of(released, whole, tokens=64, requests=1, context=0)
    sources = [released.compress_ratios[layer] for layer in released.kv_source_layer_ids]
    groups = sum(64 // ratio for ratio in sources)
    assert rows["kv_write"].caches == LAYERS * 64 * 528 + groups * (288 + 68)
    odd = rows_of(released, whole, context=4)
    complete = sum(1 for ratio in sources if ratio == 1)
    assert odd["kv_write"].caches == LAYERS * 528 + complete * (288 + 68)


def test_dense_products_count_two_operations_per_weight_and_token(released, whole):
    rows = rows_of(released, whole, tokens=16, requests=16)
    for op, weights in (
        ("attn.wq_a", 1280 * 5120),
        ("attn.wq_b", 64 * 512 * 1280),
        ("attn.wo_a", 8 * 1024 * 4096),
        ("attn.wo_b", 5120 * 8192),
        ("ffn.gate", 384 * 5120),
        ("ffn.shared_experts", 3 * 2304 * 5120),
    ):
        assert rows[op].flops == LAYERS * 2 * 16 * weights
    assert rows["head"].flops == 2 * 16 * 129280 * 5120


def test_hyper_connections_count_what_their_kernels_do(released, whole):
    rows = rows_of(released, whole, tokens=16, requests=16)
    for shape in hyper_connections.SHAPES:
        if shape.rows == 16:
            row = rows[f"hc.{shape.op}"]
            calls = 2 * LAYERS + (shape.op == "collapse_norm")  # and once before the head
            assert row.calls == calls
            assert row.bytes == calls * hyper_connections.bytes(shape)
            assert row.flops == calls * hyper_connections.flops(shape)


def test_attention_counts_what_its_kernel_does_once_every_slot_is_used(released, whole):
    rows = rows_of(released, whole, 2, tokens=16, requests=16)
    attention = rows["sparse_attention"]
    shapes = {shape.name: shape for shape in sparse_attention.SHAPES}
    window_only = sum(1 for ratio in released.compress_ratios[:LAYERS] if not ratio)
    kinds = ((shapes["decode 16 tp2 window"], window_only),)
    kinds += ((shapes["decode 16 tp2"], LAYERS - window_only),)
    assert attention.flops == sum(n * sparse_attention.flops(shape) for shape, n in kinds)
    moved = sum(n * sparse_attention.bytes(shape) for shape, n in kinds)
    assert attention.bytes - attention.parameters == moved


def test_cache_writes_count_what_their_kernel_does(released, whole):
    rows = rows_of(released, whole, tokens=64, requests=64)
    shapes = {shape.row_format: shape for shape in kv_write.SHAPES if shape.rows == 64}
    sources = len(released.kv_source_layer_ids)  # every group is complete at position 4095
    for field, counted in (("bytes", kv_write.bytes), ("flops", kv_write.flops)):
        groups = counted(shapes["kv"]) + counted(shapes["index_k"])
        assert getattr(rows["kv_write"], field) == LAYERS * counted(shapes["window"]) + (
            sources * groups
        )


@pytest.mark.parametrize(("partition", "devices"), [("tp1", 1), ("tp2", 2), ("ep2", 2)])
def test_experts_count_what_their_kernel_does(released, whole, partition, devices):
    shape = next(s for s in grouped_matmul.SHAPES if s.name == f"decode 16 {partition}")
    expert_parallel = partition == "ep2"
    active = 96 / devices if expert_parallel else 96
    rows = rows_of(
        released, whole, devices, expert_parallel=expert_parallel, tokens=16, requests=16, active=96
    )
    assert rows["ffn.experts"].flops == LAYERS * grouped_matmul.flops(shape)
    assert rows["ffn.experts"].bytes == LAYERS * grouped_matmul.bytes(shape, active)


def test_devices_of_a_stage_send_what_sums_and_boundaries_take(released, halves):
    alone = rows_of(released, halves, tokens=8, requests=8)
    stream = 4 * (2 * 5120 + 4)
    assert {op: row.sent for op, row in alone.items() if row.sent} == {"send": 8 * stream}
    first = rows_of(released, halves, 2, tokens=8, requests=8)
    assert {op: row.sent for op, row in first.items() if row.sent} == {
        "all-reduce of embed": 8 * 2 * 5120,
        "all-reduce of wo_b": 20 * 8 * 4 * 5120,
        "all-reduce of ffn": 20 * 8 * 4 * 5120,
        "send": 4 * stream,
    }
    last = rows_of(released, halves, 2, stage=1, tokens=8, requests=8)
    assert last["receive"].sent == 4 * stream
    assert last["all-gather of head"].sent == 8 * 4 * 129280 / 2
    whole_experts = rows_of(released, halves, 2, expert_parallel=True, tokens=8, requests=8)
    assert whole_experts["all-reduce of ffn"].sent == 2 * first["all-reduce of ffn"].sent


def test_relayed_rows_are_sent_by_every_device(released):
    plan = build_stage_plan(released, stages=(10, 10, 10, 10), relay=True)
    boundary = plan.boundaries[2]
    rows = rows_of(released, plan, 2, stage=2, tokens=8, requests=8)
    relayed = 8 * boundary.relay_bytes_per_token
    assert rows["send"].sent == 4 * boundary.stream_bytes_per_token + relayed > relayed > 0


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_time_is_that_of_the_slowest_resource(chip):
    memory = Row(op="a", activations=chip.memory, flops=chip.flops / 2)
    compute = Row(op="b", parameters=chip.memory, flops=3 * chip.flops)
    link = Row(op="c", sent=chip.link / 2)
    assert [row.bound(chip) for row in (memory, compute, link)] == ["memory", "compute", "link"]
    assert step_seconds((memory, compute, link), chip) == 1 + 3 + 0.5


def test_tokens_that_requests_do_not_share_equally_are_refused(released, whole):
    tensor = plan_tensor_parallel(released, 1)
    with pytest.raises(ValueError, match="5 tokens do not divide equally over 2 requests"):
        roofline(released, whole.stages[0], tensor, tokens=5, requests=2, context=0)


def test_every_configuration_has_a_roofline(golden):
    config = load_config(str(golden))
    plan = build_stage_plan(config)
    facts = roofline_facts(config, plan, plan_tensor_parallel(config, 1), context=64)
    for step in facts["steps"]:
        assert step["stages"][0]["bytes"] > 0


def test_table_has_a_line_for_every_step_and_stage(released, halves):
    facts = roofline_facts(released, halves, plan_tensor_parallel(released, 2), context=4096)
    json.dumps(facts)
    title, header, *lines = roofline_text(facts)
    assert "4096 tokens" in title
    assert all(f"{chip.name} ms" in header for chip in CHIPS)
    assert len(lines) == 2 * len(facts["steps"]) == 14
    decode = facts["steps"][0]["stages"][0]
    assert lines[0].split()[:5] == ["decode", "1", "6.0", "0", f"{decode['bytes'] / 1e9:.3f}"]

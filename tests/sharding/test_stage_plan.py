"""Partitions: the eight rules, crossings, relay traffic and the best legal choice."""

import dataclasses
import itertools
import pathlib
import re

import pytest

from dsv41_jax.config import ConfigError
from dsv41_jax.hf_config import load_config
from sharding.dependencies import legal_cuts, relay_items
from sharding.partitions import balanced_partition, counts_of, nearest_partitions
from sharding.stage_plan import (
    PartitionError,
    build_stage_plan,
    check_ranges,
    lay_out,
    ranges_of,
)
from sharding.step_cost import layer_costs
from sharding.tensor_plan import plan_tensor_parallel

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"


@pytest.fixture(scope="module")
def released():
    return load_config("released")


@pytest.fixture(scope="module")
def tiny_a():
    return load_config(GOLDEN / "tiny_a")


@pytest.fixture(scope="module")
def tiny_b():
    return load_config(GOLDEN / "tiny_b")


def counts(cuts, num_layers=40):
    return counts_of(tuple(cuts), num_layers)


def crossings(config, stages):
    plan = lay_out(config, ranges_of(stages), relay=False)
    return {(d.kind, d.source, d.consumer) for d in plan.crossings}


@pytest.mark.parametrize(
    "cuts",
    [[], [20], [8, 14, 20], [2, 8, 14, 20], [1], [2], [1, 2], [1, 2, 8, 14, 20]],
    ids=str,
)
def test_released_legal_cuts_are_accepted_without_the_relay(released, cuts):
    plan = build_stage_plan(released, stages=counts(cuts))
    assert plan.crossings == ()
    assert plan.counts == counts(cuts)


def test_released_legal_cuts_are_exactly_these(released):
    assert legal_cuts(released) == (1, 2, 8, 14, 20)


@pytest.mark.parametrize("cut", [3, 7, 9, 13, 15, 19, 21, 24, 28, 32, 36, 39])
def test_released_cuts_between_source_and_consumer_are_refused(released, cut):
    with pytest.raises(PartitionError, match="cuts through what layers share"):
        build_stage_plan(released, stages=counts([cut]))


def test_ten_layers_each_is_refused_with_the_crossings_named(released):
    found = crossings(released, [10] * 4)
    assert {("kv", 8, 10), ("index", 28, 30), ("candidate", 20, 32)} <= found
    assert len(found) == 24
    message = (
        "partition 10,10,10,10 cuts through what layers share: "
        "kv of layer 8 (stage 0) is read by layer 10 (stage 1); "
        "index of layer 8 (stage 0) is read by layer 10 (stage 1); "
        "kv of layer 8 (stage 0) is read by layer 11 (stage 1); "
        "index of layer 8 (stage 0) is read by layer 11 (stage 1); and 20 more. "
        "Nearest legal: 8,6,6,20 (18 layers moved)"
    )
    with pytest.raises(PartitionError, match=re.escape(message)) as caught:
        build_stage_plan(released, stages=[10] * 4)
    assert "--pipeline-relay" in str(caught.value)


def test_few_crossings_are_all_named(released):
    with pytest.raises(PartitionError) as caught:
        build_stage_plan(released, stages=[19, 21])
    assert "kv of layer 14 (stage 0) is read by layer 19 (stage 1)" in str(caught.value)
    assert "more." not in str(caught.value)
    assert "Nearest legal: 20,20 (1 layer moved)" in str(caught.value)


def test_dependencies_are_those_of_the_model(released):
    plan = lay_out(released, ranges_of([40]), relay=False)
    found = {(d.kind, d.source, d.consumer) for d in plan.dependencies}
    expected = set()
    for source, last in ((2, 7), (8, 13), (14, 19), (20, 39)):
        expected |= {("kv", source, layer) for layer in range(source + 1, last + 1)}
    indexes = (2, 8, 14, 20, 24, 28, 32, 36, 40)
    for source, following in itertools.pairwise(indexes):
        expected |= {("index", source, layer) for layer in range(source + 1, following)}
    expected |= {(kind, 20, layer) for kind in ("index_k", "candidate") for layer in indexes[4:8]}
    assert found == expected
    assert len(plan.dependencies) == len(expected)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "stage ranges none are refused: there is no stage"),
        ([20, 19], "[0, 20), [20, 39) are refused: the stages end at layer 39, but num_hidden"),
        ([20, 21], "the stages end at layer 41, but num_hidden_layers is 40"),
        ([20, 0, 20], "stage 1 has no layers"),
        ([41, -1], "[0, 41), [41, 40) are refused: stage 1 has no layers"),
        ([10**30], f"[0, {10**30}) are refused: the stages end at layer"),
    ],
    ids=str,
)
def test_layer_counts_that_are_no_partition_are_refused(released, stages, message):
    with pytest.raises(PartitionError, match=re.escape(message)) as caught:
        build_stage_plan(released, stages=stages)
    assert "stages must partition all layers 0 to 39 in order" in str(caught.value)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 20), (21, 40)], "[0, 20), [21, 40) are refused: the stages leave a hole at layer 20"),
        ([(0, 20), (19, 40)], "stages 0 and 1 overlap at layer 19"),
        ([(1, 40)], "the stages do not start at layer 0"),
        ([(-1, 40)], "the stages do not start at layer 0"),
        ([(20, 40), (0, 20)], "the stages do not start at layer 0"),
    ],
    ids=str,
)
def test_ranges_with_holes_and_overlaps_are_refused(released, ranges, message):
    with pytest.raises(PartitionError, match=re.escape(message)):
        check_ranges([range(*bounds) for bounds in ranges], 40)
    with pytest.raises(PartitionError, match=re.escape(message)):
        lay_out(released, [range(*bounds) for bounds in ranges], relay=True)


def test_no_partition_still_names_the_nearest_legal_ones(released):
    with pytest.raises(PartitionError, match=r"Nearest legal: 20,20 \(1 layer moved\)"):
        build_stage_plan(released, stages=[20, 19])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compress_ratios": (0,) * 40}, "compress_ratios has 40 entries"),
        ({"kv_source_layer_ids": (8, 2)}, "names layer 2 after layer 8"),
        ({"kv_source_layer_ids": (2, 2)}, "names layer 2 after layer 2"),
        ({"kv_source_layer_ids": (0, 2)}, "names layer 0, whose compress_ratios entry is 0"),
        ({"kv_source_layer_ids": (-1, 2)}, "names layer -1: the backbone has layers 0 to 39"),
        ({"kv_source_layer_ids": (2, 40)}, "names layer 40: the backbone has layers 0 to 39"),
        ({"kv_source_layer_ids": (True, 2)}, "names True: layers must be integers"),
        ({"index_source_layer_ids": (2, 8, 20)}, "layer 14 is in kv_source_layer_ids"),
        ({"kv_source_layer_ids": (8, 14, 20)}, "layer 2 (compress_ratios entry 2) has no KV"),
        ({"kv_source_layer_ids": (2, 8, 14)}, "layer 20 has compress_ratios entry 1, but its KV"),
        ({"candidate_source_layer_id": 21}, "candidate_source_layer_id is 21"),
    ],
    ids=str,
)
def test_the_plan_checks_the_configuration_first(released, change, message):
    broken = dataclasses.replace(released, **change)
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_stage_plan(broken, stages=[1, 2])


@pytest.mark.parametrize(
    ("num_stages", "expected"),
    [
        (None, (40,)),
        (1, (40,)),
        (2, (20, 20)),
        (3, (8, 12, 20)),
        (4, (8, 6, 6, 20)),
        (5, (2, 6, 6, 6, 20)),
        (6, (1, 1, 6, 6, 6, 20)),
    ],
)
def test_best_legal_partition_of_the_released_model(released, num_stages, expected):
    assert build_stage_plan(released, num_stages=num_stages).counts == expected


def test_more_stages_than_legal_cuts_allow_are_refused(released):
    message = (
        "no partition into 7 stages is legal: the finest legal partition has 6: 1,1,6,6,6,20. "
        "Or turn on --pipeline-relay"
    )
    with pytest.raises(PartitionError, match=re.escape(message)):
        build_stage_plan(released, num_stages=7)
    with pytest.raises(PartitionError, match="0 pipeline stages are wanted"):
        build_stage_plan(released, num_stages=0)


def test_stage_number_and_layer_counts_must_agree(released):
    with pytest.raises(PartitionError, match="3 pipeline stages are wanted, but the layer counts"):
        build_stage_plan(released, stages=[20, 20], num_stages=3)


def test_stages_own_only_what_belongs_to_their_layers(released):
    first, second, third, last = build_stage_plan(released, num_stages=4).stages
    assert (first.kv_sources, first.engram_layers, first.open_groups) == ((2,), (1,), (2,))
    assert (second.kv_sources, second.engram_layers) == ((8,), ())
    assert (third.kv_sources, third.engram_layers) == ((14,), (14,))
    assert last.index_sources == (20, 24, 28, 32, 36)
    assert (last.candidate_source, last.open_groups, last.engram_layers) == (20, (), ())
    assert [first.embedding, first.vision, first.head, first.draft] == [True, True, False, False]
    assert [last.embedding, last.vision, last.head, last.draft] == [False, False, True, True]


def test_window_only_stage_owns_no_compressed_cache(released):
    first = build_stage_plan(released, stages=[2, 38]).stages[0]
    assert (first.kv_sources, first.index_sources, first.open_groups, first.replicas) == ((),) * 4


def test_stream_crosses_every_boundary(released):
    plan = build_stage_plan(released, num_stages=4)
    assert [boundary.cut for boundary in plan.boundaries] == [8, 14, 20]
    assert {b.stream_bytes_per_token for b in plan.boundaries} == {4 * 5120 * 2 + 4 * 4}
    assert not any(boundary.relay for boundary in plan.boundaries)


def relayed(boundary):
    return {(item.kind, item.source): item.bytes_per_token for item in boundary.relay}


def test_relay_makes_any_cut_legal_and_counts_packed_bytes(released):
    plan = build_stage_plan(released, stages=[10] * 4, relay=True)
    assert len(plan.crossings) == 24
    assert [relayed(boundary) for boundary in plan.boundaries] == [
        {("kv", 8): 288, ("index", 8): 2048},
        {},
        {("kv", 20): 288, ("index_k", 20): 68, ("index", 28): 2048, ("candidate", 20): 8192},
    ]
    assert [stage.replicas for stage in plan.stages] == [
        (),
        (("kv", 8),),
        (),
        (("kv", 20), ("index_k", 20)),
    ]


def test_source_read_two_stages_later_takes_every_hop_once(released):
    plan = build_stage_plan(released, stages=[21, 2, 17], relay=True)
    first, second = (relayed(boundary) for boundary in plan.boundaries)
    assert first == second
    assert set(first) == {("kv", 20), ("index_k", 20), ("index", 20), ("candidate", 20)}
    assert plan.stages[1].replicas == (("kv", 20),)
    assert set(plan.stages[2].replicas) == {("kv", 20), ("index_k", 20)}
    assert plan.stages[1].open_groups == plan.stages[2].open_groups == ()


def test_open_group_stays_with_its_producer(released):
    plan = build_stage_plan(released, stages=[5, 35], relay=True)
    assert [stage.open_groups for stage in plan.stages] == [(2,), (8, 14)]


def test_relay_budget_refuses_a_larger_hop(released):
    build_stage_plan(released, stages=[10] * 4, relay=True, relay_max_bytes=10596)
    message = (
        "partition 10,10,10,10 makes the relay carry 10596 bytes per token from stage 2 to "
        "stage 3 (kv of layer 20: 288, index of layer 28: 2048, index_k of layer 20: 68, "
        "candidate of layer 20: 8192), more than the allowed 10595. Nearest legal: "
    )
    with pytest.raises(PartitionError, match=re.escape(message)):
        build_stage_plan(released, stages=[10] * 4, relay=True, relay_max_bytes=10595)


def test_chosen_partition_keeps_the_relay_budget(released):
    free = build_stage_plan(released, num_stages=4, relay=True)
    bound = build_stage_plan(released, num_stages=4, relay=True, relay_max_bytes=3000)
    assert free.balance > bound.balance > build_stage_plan(released, num_stages=4).balance
    assert all(boundary.relay_bytes_per_token <= 3000 for boundary in bound.boundaries)


def test_traffic_of_a_cut_agrees_with_the_dependencies_that_span_it(released, tiny_a, tiny_b):
    for config in (released, tiny_a, tiny_b):
        for cut in range(1, config.num_hidden_layers):
            carried = {(item.kind, item.source) for item in relay_items(config, cut)}
            spanning = crossings(config, counts([cut], config.num_hidden_layers))
            assert carried == {(kind, source) for kind, source, _ in spanning}


def test_legal_cuts_of_the_small_checkpoints(tiny_a, tiny_b):
    assert legal_cuts(tiny_a) == (1, 2, 4, 5)
    assert legal_cuts(tiny_b) == (1, 2, 4)
    assert build_stage_plan(tiny_b, num_stages=2).counts == (4, 4)
    with pytest.raises(PartitionError, match="index_k of layer 5"):
        build_stage_plan(tiny_a, stages=[7, 2])
    with pytest.raises(PartitionError, match="kv of layer 2"):
        build_stage_plan(tiny_b, stages=[3, 5])


def test_without_candidates_nothing_reads_them(tiny_a):
    plain = dataclasses.replace(tiny_a, candidate_source_layer_id=-1)
    plan = lay_out(plain, ranges_of([9]), relay=False)
    assert not any(dependency.kind == "candidate" for dependency in plan.dependencies)
    assert plan.stages[0].candidate_source is None


def test_window_only_model_may_be_cut_anywhere(tiny_b):
    ratios = (0,) * 11
    plain = dataclasses.replace(
        tiny_b,
        compress_ratios=ratios,
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        candidate_source_layer_id=-1,
    )
    assert legal_cuts(plain) == tuple(range(1, 8))
    assert build_stage_plan(plain, stages=[3, 3, 2]).dependencies == ()


def test_model_without_optional_parts_owns_none(tiny_b):
    plain = dataclasses.replace(
        tiny_b, engram=None, draft=None, vision=None, compress_ratios=tiny_b.compress_ratios[:8]
    )
    (stage,) = build_stage_plan(plain).stages
    assert (stage.engram_layers, stage.draft, stage.vision) == ((), False, False)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_searches_find_what_trying_everything_finds(num_stages):
    num_layers, legal = 11, (1, 2, 4, 5, 8, 9)
    costs = [3.0, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    wanted = ranges_of([11 - 2 * (num_stages - 1)] + [2] * (num_stages - 1))
    every = list(itertools.combinations(legal, num_stages - 1))

    def stage_costs(cuts):
        return [sum(costs[layer] for layer in r) for r in ranges_of(counts(cuts, num_layers))]

    def moved(cuts):
        pairs = zip(ranges_of(counts(cuts, num_layers)), wanted, strict=True)
        return num_layers - sum(len(set(a) & set(b)) for a, b in pairs)

    def rank(cuts):
        return max(stage_costs(cuts)), sum(cost**2 for cost in stage_costs(cuts))

    best = balanced_partition(costs, num_stages, legal)
    assert rank(best) == min(map(rank, every))
    nearest = nearest_partitions(wanted, num_layers, legal, limit=3)
    assert [distance for distance, _ in nearest] == sorted(map(moved, every))[:3]
    assert all(moved(cuts) == distance for distance, cuts in nearest)


def test_step_cost_counts_the_weights_a_token_reads(released):
    costs = layer_costs(released)
    assert len(costs) == 40
    assert costs[39] - costs[38] == 2 * (129280 + 1) * 5120  # head and norm
    assert costs[1] - costs[0] == pytest.approx(24 * 256 * 5120 * 5, rel=1e-2)
    assert 270e6 < costs[3] < 300e6


def test_devices_of_a_stage_share_its_parameters(released):
    plan = plan_tensor_parallel(released, 2)
    assert (plan.heads, plan.output_groups, plan.vocabulary) == (32, 4, 64640)
    assert (plan.experts, plan.expert_intermediate, plan.padding_experts) == (384, 1152, 0)
    plan = plan_tensor_parallel(released, 2, expert_parallel=True)
    assert (plan.experts, plan.expert_intermediate, plan.padding_experts) == (192, 2304, 0)


def test_experts_that_do_not_divide_are_padded(tiny_a):
    plan = plan_tensor_parallel(tiny_a, 2, expert_parallel=True)
    assert (plan.experts, plan.padding_experts) == (3, 1)


@pytest.mark.parametrize(
    ("change", "devices", "message"),
    [
        ({}, 0, "tensor parallel size is 0: it must be at least 1"),
        ({}, 3, "attn.wq_b.weight and attn.attn_sink has 64 heads (num_attention_heads)"),
        ({}, 16, "attn.wo_a.weight has 8 output groups (o_groups)"),
        ({"vocab_size": 129281}, 2, "embed.weight and head.weight has 129281 rows (vocab_size)"),
        ({"o_lora_rank": 4}, 2, "attn.wo_b.weight has 32 input channels (o_groups * o_lora_rank)"),
        (
            {"moe_intermediate_size": 2336},
            2,
            "ffn.shared_experts.w2.weight has 2336 input channels (moe_intermediate_size)",
        ),
    ],
    ids=str,
)
def test_parameters_that_do_not_divide_are_refused_by_name(released, change, devices, message):
    with pytest.raises(PartitionError, match=re.escape(message)):
        plan_tensor_parallel(dataclasses.replace(released, **change), devices)

"""Bytes by stage and component: equal to the abstract trees, and whether they fit."""

import functools
import importlib.resources
import json
import math
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import pytest

from dsv41_jax.hf_config import load_config
from dsv41_jax.layer_plan import layer_plan
from dsv41_jax.layers.embedding import Embedding, Head
from dsv41_jax.layers.linear import RMSNorm
from dsv41_jax.model import Stage
from dsv41_jax.state import init_state
from pallas_kernels.dispatch import check_offsets
from sharding import plan as plan_command
from sharding.cache_sizes import CacheBudgetError, plan_cache
from sharding.fit import (
    DEVICE_KINDS,
    FitError,
    Workload,
    check_devices,
    check_fit,
    largest,
    parse_devices,
)
from sharding.memory import plan_stage_caches, stage_bytes, stage_cache_bytes
from sharding.placement import TablePlacement
from sharding.relay import add_replicas
from sharding.rules import partition_of
from sharding.stage_plan import build_stage_plan
from sharding.tensor_plan import plan_tensor_parallel

GIB = 2**30
# stages, tensor parallel size, expert parallel, relay
PLANS = {
    "TP2 x PP2": ((20, 20), 2, False, False),
    "TP2 x PP2, whole experts": ((20, 20), 2, True, False),
    "TP4": ((40,), 4, False, False),
    "TP8": ((40,), 8, False, False),
    "PP4 8/6/6/20": ((8, 6, 6, 20), 1, False, False),
    "PP4 10/10/10/10, relay": ((10, 10, 10, 10), 1, False, True),
}
RARE = ("TP2 x PP2, whole experts", "TP4", "TP8")  # the other plans have every kind of share


def workload(stages, devices, expert_parallel, relay, **sizes):
    config = load_config("released")
    plan = build_stage_plan(config, stages=stages, relay=relay)
    chosen = {
        "max_model_len": 131072,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
        "microbatches": len(stages),
    }
    tensor = plan_tensor_parallel(config, devices, expert_parallel=expert_parallel)
    return Workload(config=config, plan=plan, tensor=tensor, **{**chosen, **sizes})


def tree_bytes(tree):
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@functools.cache
def one_layer_bytes(partition, kind):
    """Bytes of one device's parameters of a layer of a kind, without making them."""
    config = load_config("released")
    layer = next(s.layer for s in layer_plan(config) if kind_of(s) == kind)
    return abstract_bytes(Stage(config, range(layer, layer + 1), partition).block(layer).init)


def kind_of(spec):
    return spec.mode, spec.ratio, spec.engram is not None


def abstract_bytes(init):
    named = jax.vmap(
        jax.vmap(
            functools.partial(init, jax.random.key(0)),
            axis_name="tensor",
            axis_size=8,
            out_axes=None,
        ),
        axis_name="expert",
        axis_size=1,
        out_axes=None,
    )
    return tree_bytes(jax.eval_shape(named))


def parameter_bytes(config, stage, partition):
    specs = layer_plan(config)
    total = sum(one_layer_bytes(partition, kind_of(specs[layer])) for layer in stage.layers)
    rows = jnp.zeros((16, config.hidden_size), jnp.bfloat16)
    if stage.embedding:
        ids = jnp.zeros((16,), jnp.int32)
        total += abstract_bytes(lambda key: Embedding(config, partition).init(key, ids))
    if stage.head:
        total += abstract_bytes(lambda key: Head(config, partition, "xla").init(key, rows))
        total += abstract_bytes(lambda key: RMSNorm(rows.shape[1], 0.0, "xla").init(key, rows))
    return total


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full) if n in RARE else n for n in PLANS]
)
def test_bytes_are_those_of_the_abstract_trees(name):
    case = workload(*PLANS[name])
    config, limits = case.config, case.limits()
    sizes = plan_stage_caches(config, case.plan, limits, None)
    pages = dataclass_dict(sizes)
    for contents, held in zip(case.plan.stages, case.stages(), strict=True):
        partition = partition_of(case.tensor)
        assert held.parameters == parameter_bytes(config, contents, partition)

        def state(contents=contents):
            own = init_state(config, contents.layers, **pages)
            return add_replicas(config, own, contents.replicas, global_pages=pages["global_pages"])

        tree = jax.eval_shape(state)
        assert held.caches == tree_bytes(tree)
        assert held.window == tree_bytes(tree.window)
        assert held.kv + held.index_k + held.replicas == tree_bytes((tree.kv, tree.index_k))
        assert held.open_groups == tree_bytes(tree.open_group)
        assert held.caches == sizes.total_bytes(
            stage_cache_bytes(config, contents, limits.page_size)
        )


def dataclass_dict(value):
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def test_figures_of_the_reference_partition():
    first, second = workload((20, 20), 2, False, False).stages()
    for stage in (first, second):
        assert (stage.experts + stage.expert_scales) / GIB == pytest.approx(67.24, abs=0.01)
        assert stage.embedding / GIB == pytest.approx(0.62, abs=0.01)
    assert first.kv + first.index_k > 0.9 * (second.kv + second.index_k)


def test_tables_count_where_they_are():
    plan = PLANS["TP2 x PP2"]
    host = workload(*plan)
    placed = workload(*plan, placement=TablePlacement(engram="device", embedding="host"))
    tables = sum(host.config.engram.num_embeddings) * 264
    assert host.host().engram == tables and placed.host().engram == 0
    before, after = host.stages(), placed.stages()
    assert [stage.engram for stage in before] == [0, 0]
    assert tables / 2 <= after[0].engram <= tables / 2 + 2 * 264 and after[1].engram == 0
    assert before[0].embedding == 129280 * 5120 and after[0].embedding == 0
    assert after[1].embedding == before[1].embedding
    assert placed.host().embedding == 129280 * 5120 * 2 and host.host().embedding == 0
    for old, new in zip(before, after, strict=True):
        assert new.total == old.total + new.engram - (old.embedding - new.embedding)


def test_tables_that_devices_cannot_hold_are_named(capsys):
    partition = ["--model", "released", "--pipeline-stages", "20,20", "--tensor-parallel-size", "2"]
    devices = ["--devices", "4xh200-141"]
    assert plan_command.main([*partition, *devices]) == 0
    assert "of Engram tables, memory-mapped;" in capsys.readouterr().out
    assert plan_command.main([*partition, *devices, "--engram-placement", "device"]) == 4
    printed = capsys.readouterr()
    assert "The largest: Engram tables 94.4" in printed.err
    assert "(--engram-placement mmap)" in printed.err
    assert "Engram tables are on the devices;" in printed.out


def test_every_stage_gets_the_pages_of_the_poorest():
    case = workload((8, 6, 6, 20), 1, False, False)
    config, limits = case.config, case.limits()
    budget = 200 << 20
    sizes = plan_stage_caches(config, case.plan, limits, budget)
    alone = [
        plan_cache(limits, stage_cache_bytes(config, stage, limits.page_size), budget)
        for stage in case.plan.stages
    ]
    assert sizes.window_pages == min(size.window_pages for size in alone)
    assert sizes.global_pages == min(size.global_pages for size in alone)
    stages = stage_bytes(config, case.plan, case.tensor, limits, microbatches=4, budget=budget)
    assert max(stage.caches for stage in stages) <= budget


def test_twenty_layers_do_not_fit_one_h200_but_a_b200():
    case = workload((8, 6, 6, 20), 1, False, False, max_model_len=4096)
    for name in ("h100-80", "h200-141"):
        with pytest.raises(FitError, match=r"stage 3 needs 139\.\d+ GiB on each device") as error:
            check_fit(case, DEVICE_KINDS[name].usable, name)
        assert "The largest: routed experts 126.56 GiB, expert scales 7.91 GiB" in str(error.value)
        assert "It fits b200-192" in str(error.value)
    assert len(check_fit(case, DEVICE_KINDS["b200-192"].usable, "b200-192")) == 4


def test_largest_sizes_fit_and_larger_ones_do_not():
    case = workload((20, 20), 2, False, False)
    usable = DEVICE_KINDS["h100-80"].usable
    found = largest(case, usable)
    for size, step in (("max_num_seqs", 1), ("max_model_len", 16)):
        most = getattr(found, size)
        good = workload((20, 20), 2, False, False, **{size: most})
        check_fit(good, usable, "h100-80")
        if size == "max_num_seqs":
            with pytest.raises((FitError, CacheBudgetError)):
                more = workload((20, 20), 2, False, False, **{size: most + step})
                check_fit(more, usable, "h100-80")
    assert found.max_num_seqs > 4 and found.max_model_len > 131072


def run(capsys, *options):
    status = plan_command.main(["--model", "released", *options])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


REFERENCE = ("--pipeline-stages", "20,20", "--tensor-parallel-size", "2")


def test_command_prints_the_table_and_what_fits(capsys):
    status, out, err = run(
        capsys, *REFERENCE, "--devices", "4xh100-80", "--kv-cache-memory-bytes", "4G"
    )
    assert (status, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "routed experts 63.281 63.281" in lines
    assert "Devices: 4 h100-80 with 77.60 GiB each for arrays: fits" in lines
    assert any(line.startswith("Hosts: 188.83 GiB of Engram tables") for line in lines)
    assert any(line.startswith("Largest that fits: ") for line in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--pipeline-stages", "8,6,6,20", "--devices", "4xh200-141"), "0.80 GiB short"),
        ((*REFERENCE, "--devices", "2xb200-192"), "needs 4 devices, but 2 are given"),
        ((*REFERENCE, "--kv-cache-memory-bytes", "1K"), "kv_cache_memory_bytes 1024 is too small"),
    ],
)
def test_what_does_not_fit_exits_with_four(capsys, options, message):
    status, _, err = run(capsys, *options)
    assert status == 4
    assert err.startswith("does not fit: ") and message in err


def test_json_has_the_bytes(capsys):
    status, out, _ = run(capsys, *REFERENCE, "--devices", "h100-80", "--json")
    facts = json.loads(out)
    assert status == 0 and facts["fit"]["devices"] == 4
    assert facts["fit"]["kinds_that_fit"] == list(DEVICE_KINDS)
    first, _ = facts["memory"]["per_device"]
    assert first["total"] == first["parameters"] + first["caches"] + first["temporaries"]
    assert facts["memory"]["host"]["engram"] == (384006168 + 384016682) * 264


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "4xh300"], "known kinds are h100-80, h200-141, b200-192"),
        (["--kv-cache-memory-bytes", "much"], "'much' is not a size"),
        (["--max-num-seqs", "300"], "--max-num-batched-tokens 256 is below --max-num-seqs 300"),
    ],
)
def test_wrong_usage_of_the_sizes(capsys, options, message):
    with pytest.raises(SystemExit) as caught:
        run(capsys, *options)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_devices_without_a_number_are_as_many_as_needed():
    assert parse_devices("h200-141", 4) == (4, DEVICE_KINDS["h200-141"])


class Told:
    """A device that tells its memory."""

    device_kind = "small device"

    def __init__(self, stats):
        self.memory_stats = lambda: stats


def test_devices_that_tell_their_memory_are_checked():
    case = workload((20, 20), 2, False, False)
    check_devices(case, [Told(None), Told({})])
    check_devices(case, [Told({"bytes_limit": 80 * GIB})])
    with pytest.raises(FitError, match=r"but a small device has 8\.00 GiB for arrays"):
        check_devices(case, [Told({"bytes_limit": 80 * GIB}), Told({"bytes_limit": 8 * GIB})])


def test_picture_has_a_bar_for_every_stage(capsys, tmp_path):
    path = tmp_path / "plan.svg"
    options = ("--pipeline-stages", "8,6,6,20", "--devices", "h200-141", "--picture", str(path))
    run(capsys, *options)
    root = ET.parse(path).getroot()
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    for text in ("Memory of each device", "device: 138.3 GiB", "routed experts", "139.15 GiB"):
        assert text in texts
    titles = [node.text for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 4 * 13 and "expert scales: 7.91 GiB" in titles


def test_caches_that_kernels_cannot_address_are_refused_and_a_budget_buys_fewer():
    sizes = {"max_num_seqs": 16, "max_model_len": 1048576}
    whole = workload(*PLANS["TP8"], **sizes)
    with pytest.raises(CacheBudgetError, match="give kv_cache_memory_bytes 7628455936"):
        plan_stage_caches(whole.config, whole.plan, whole.limits(), None)
    assert largest(whole, DEVICE_KINDS["b200-192"].usable).max_num_seqs == 8
    for budget in (7628455936, 64 * GIB):
        held = plan_stage_caches(whole.config, whole.plan, whole.limits(), budget)
        assert whole.limits().columns <= held.global_pages <= 524288
        state = jax.eval_shape(
            lambda pages=held.global_pages: init_state(
                whole.config, range(40), window_pages=1, global_pages=pages, slots=1
            )
        )
        for array in jax.tree.leaves(state):
            check_offsets("any", array.shape, array.dtype.itemsize)


def test_a_head_dimension_that_kernels_cannot_take_still_has_a_plan(capsys, tmp_path):
    released = importlib.resources.files("dsv41_jax") / "released_config.json"
    config = json.loads(released.read_text())
    config["text_config"]["head_dim"] = 384
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert plan_command.main(["--model", str(tmp_path / "config.json")]) == 0
    assert "temporaries (estimate)" in capsys.readouterr().out

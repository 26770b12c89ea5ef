"""Routed experts in host memory: the same bits, in the right memory, by the plan's numbers."""

import dataclasses
import json
import os
import re
import types

import jax
import numpy as np
import pytest
from test_memory import workload
from tiny_pipeline import LENGTH, run, step_sizes, tiny_config

from dsv41_jax.engram_table import empty_rows
from dsv41_jax.expert_offload import BUFFERS, HOST
from dsv41_jax.host_batch import build_batch
from dsv41_jax.state import init_state
from sharding import plan as plan_command
from sharding.fit import (
    DEVICE_KINDS,
    FitError,
    check_devices,
    check_fit,
    fits,
    least_offload,
    offload_news,
)
from sharding.memory import layer_expert_bytes, stage_offloads
from sharding.mesh import stage_meshes
from sharding.offload import NOTHING_OFFLOADED, allow_pinned, plan_offload
from sharding.pipeline import build_pipeline, stage_steps
from sharding.placement import TablePlacement
from sharding.rules import abstract_parameters, parameter_shardings, parameter_specs
from sharding.stage_plan import PartitionError, build_stage_plan
from sharding.stage_runner import stage_program
from sharding.tensor_plan import plan_tensor_parallel

GIB = 2**30
REFERENCE = ("--model", "released", "--tensor-parallel-size", "2")


def division_of(devices, expert=False):
    return plan_tensor_parallel(tiny_config(), devices, expert_parallel=expert)


def offloading(tiny, stages, count, tensor=1, expert=False):
    """A pipeline whose budget holds the experts of `count` layers."""
    config, division = tiny_config(), division_of(tensor, expert)
    size = count * sum(layer_expert_bytes(config, division))
    return build_pipeline(
        tiny,
        build_stage_plan(config, stages=stages),
        division,
        placement=TablePlacement(cpu_offload_bytes=size),
        progress=False,
    )


def kinds_of(params):
    """Memory kinds by layer: those of its routed experts, and those of everything else."""
    experts, rest = {}, set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        keys = [key.key for key in path]
        if keys[1:3] == ["ffn", "experts"]:
            experts.setdefault(int(keys[0].removeprefix("layers_")), set()).add(
                leaf.sharding.memory_kind
            )
        else:
            rest.add(leaf.sharding.memory_kind)
    return experts, rest


@pytest.mark.parametrize(
    ("stages", "count", "tensor", "expert", "expected"),
    [
        ((6,), 4, 1, False, [{2, 3, 4, 5}]),
        pytest.param((3, 3), 3, 1, False, [{0, 1, 2}, {3, 4, 5}], marks=pytest.mark.full),
        pytest.param((1, 5), 3, 1, False, [set(), {3, 4, 5}], marks=pytest.mark.full),
        ((3, 3), 3, 2, False, [{0, 1, 2}, {3, 4, 5}]),
        pytest.param((3, 3), 9, 2, True, [{0, 1, 2}, {3, 4, 5}], marks=pytest.mark.full),
    ],
)
def test_experts_in_host_memory_give_the_same_bits(
    tiny, token_ids, logits_of, stages, count, tensor, expert, expected
):
    pipeline = offloading(tiny, stages, count, tensor, expert)
    on_device = jax.devices()[0].default_memory().kind
    for stage, layers in zip(pipeline.stages, expected, strict=True):
        experts, rest = kinds_of(stage.params)
        assert {layer for layer, kinds in experts.items() if kinds == {HOST}} == layers
        assert all(kinds == {on_device} for k, kinds in experts.items() if k not in layers)
        assert rest == {on_device}
    found = run(pipeline, token_ids, LENGTH)[0]
    np.testing.assert_array_equal(found, logits_of(stages, tensor=tensor, expert=expert))
    assert np.abs(found).max() > 0


@pytest.mark.parametrize(("tensor", "expert"), [(1, False), (2, False), (2, True)])
def test_the_plan_counts_the_bytes_of_the_leaves(tiny, tensor, expert):
    pipeline = offloading(tiny, (1, 5), 3, tensor, expert)
    config, division = tiny_config(), division_of(tensor, expert)
    size = 3 * sum(layer_expert_bytes(config, division))
    placement = TablePlacement(cpu_offload_bytes=size)
    first, second = stage_offloads(config, pipeline.plan, division, placement)
    assert first == NOTHING_OFFLOADED and second.layers == (3, 4, 5)
    leaves = [
        leaf
        for leaf in jax.tree.leaves(pipeline.stages[1].params)
        if leaf.sharding.memory_kind == HOST
    ]
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert held == second.host == size
    assert second.saved == second.host - second.arriving == held // 3


def offloading_stage():
    """Six layers, the last four offloaded; parameters, caches and a batch without arrays."""
    config = tiny_config()
    (step,) = stage_steps(
        config,
        build_stage_plan(config, stages=(6,)),
        division_of(1),
        "xla",
        offloaded=[(2, 3, 4, 5)],
    )
    (mesh,) = stage_meshes(1, 1, jax.devices()[:1])
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        abstract_parameters(step.stage, mesh),
        parameter_shardings(step.stage, mesh, parameter_specs(step.stage)),
    )
    bucket, pools = step_sizes()
    state = jax.eval_shape(lambda: init_state(config, range(6), **pools))
    batch = build_batch(config, (), **dataclasses.asdict(bucket), engram=None)
    batch = dataclasses.replace(batch, engram=empty_rows(config.engram, (2,), bucket.tokens))
    program = stage_program(step, mesh, parameter_specs(step.stage))
    return step.stage, program, (params, state, batch)


def test_each_copy_waits_for_the_layer_two_before_and_not_for_the_last():
    """So two layers' experts are on the device, and one is copied while the other computes."""
    stage, _, arguments = offloading_stage()
    jaxpr = jax.make_jaxpr(lambda *arrays: stage(*arrays).head.logits)(*arguments).jaxpr
    known = {variable: frozenset() for variable in jaxpr.invars}  # copies that a value needs
    waits, copied = [], {}
    for equation in jaxpr.eqns:
        inputs = [v for v in equation.invars if not isinstance(v, jax.extend.core.Literal)]
        needs = frozenset().union(*(known.get(variable, frozenset()) for variable in inputs))
        if equation.primitive.name == "optimization_barrier" and len(inputs) == 8:
            for variable in equation.outvars[:6]:
                copied[variable] = len(waits)
            waits.append(needs)
        elif equation.primitive.name == "device_put":
            needs |= {copied[variable] for variable in inputs if variable in copied}
        known |= dict.fromkeys(equation.outvars, needs)
    # the barrier lets the stream through, not the copy: what follows needs copies it reads alone
    assert waits == [set(), set(), {0}, {0, 1}]
    assert known[jaxpr.outvars[0]] == {0, 1, 2, 3}


def test_a_gpu_program_takes_experts_from_pinned_memory():
    _, program, (params, state, batch) = offloading_stage()
    lowered = program.trace(params, state, batch, None, None).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count(f'mhlo.memory_kind = "{HOST}"') == 4 * 6
    barriers = re.findall(r"(%\d+):8 = stablehlo.optimization_barrier", text)
    assert len(barriers) == 4
    for barrier in barriers:
        assert len(re.findall(rf"@annotate_device_placement\({barrier}#[0-5]\)", text)) == 6


def test_what_saves_nothing_is_refused():
    config = tiny_config()
    plan = build_stage_plan(config, stages=(3, 3))
    assert plan_offload(plan, 10, 0) == (NOTHING_OFFLOADED,) * 2
    for budget, held in ((9, "no layer's"), (19, "of 1 layer "), (29, "of 2 layers ")):
        with pytest.raises(
            PartitionError, match=f"holds .*{held}.*saves nothing.*give 0.1 or more"
        ):
            plan_offload(plan, 10, budget)
    assert [stage.layers for stage in plan_offload(plan, 10, 30)] == [(0, 1, 2), (3, 4, 5)]
    assert [stage.host for stage in plan_offload(plan, 10, 10**9)] == [30, 30]
    short = build_stage_plan(config, stages=(1, 2, 1, 2), relay=True)
    with pytest.raises(PartitionError, match="no stage has more than 2 layers, so leave it at 0"):
        plan_offload(short, 10, 1000)


def test_the_limit_of_pinned_memory_is_raised_unless_it_is_set(monkeypatch):
    name = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
    monkeypatch.setenv(name, "300")
    allow_pinned(100 * GIB + 1)
    assert os.environ[name] == "300"
    monkeypatch.delenv(name)
    allow_pinned(100 * GIB + 1)
    assert os.environ[name] == "165"


def test_enough_offload_makes_a_plan_fit():
    kind = DEVICE_KINDS["h100-80"]
    whole = workload((40,), 2, False, False, max_model_len=4096)
    with pytest.raises(
        FitError, match=r"or keep experts in host memory \(--cpu-offload-gb"
    ) as error:
        check_fit(whole, kind.usable, kind.name)
    needed = least_offload(whole, kind.usable)
    assert f"--cpu-offload-gb {needed})" in str(error.value)
    (stage,) = check_fit(whole.offloading(int(needed * GIB)), kind.usable, kind.name)
    (offload,) = whole.offloading(int(needed * GIB)).offloads()
    (before,) = whole.stages()
    assert before.total - stage.total == offload.saved > 0
    layer = sum(layer_expert_bytes(whole.config, whole.tensor))
    assert offload.host == len(offload.layers) * layer and stage.arriving == BUFFERS * layer
    assert whole.offloading(int(needed * GIB)).host().experts == 2 * offload.host
    assert not fits(whole.offloading(int(needed * GIB) - layer), kind.usable)
    assert least_offload(whole, 6 * GIB) is None


def test_a_server_refuses_fits_and_says_what_is_not_needed():
    kind = DEVICE_KINDS["h100-80"]
    stats = {"bytes_limit": kind.usable}
    device = types.SimpleNamespace(memory_stats=lambda: stats, device_kind="H100")
    silent = types.SimpleNamespace(memory_stats=lambda: None, device_kind="cpu")
    large = workload((40,), 2, False, False, max_model_len=4096)
    with pytest.raises(FitError):
        check_devices(large, [device])
    assert offload_news(large, [device]) == []
    check_devices(large.offloading(75 * GIB), [device])
    (line,) = offload_news(large.offloading(75 * GIB), [device])
    assert "layers 18-39 in host memory" in line and "PCIe" in line
    small = workload((40,), 4, False, False, max_model_len=4096).offloading(50 * GIB)
    assert offload_news(small, [device])[1].startswith("--cpu-offload-gb is NOT needed")
    assert len(offload_news(small, [silent])) == 1


def test_command_shows_what_moves(capsys):
    assert plan_command.main([*REFERENCE, "--devices", "2xh100-80"]) == 4
    assert "or keep experts in host memory (--cpu-offload-gb " in capsys.readouterr().err
    options = [*REFERENCE, "--devices", "2xh100-80", "--cpu-offload-gb", "75"]
    assert plan_command.main(options) == 0
    text = capsys.readouterr().out
    assert "routed experts of layers 18-39 in host memory: 73.96 GiB for each device save" in text
    assert "147.92 GiB of routed experts, pinned" in text and "NOT needed" not in text
    assert plan_command.main([*options, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    (stage,) = facts["memory"]["offload"]
    assert stage["layers"] == list(range(18, 40)) and facts["fit"]["offload_needed"]
    assert stage["saved"] == stage["host"] - stage["arriving"] == stage["host"] * 20 // 22
    assert facts["memory"]["host"]["experts"] == 2 * stage["host"]


def test_command_says_that_offload_is_not_needed(capsys):
    options = ["--model", "released", "--tensor-parallel-size", "4", "--cpu-offload-gb", "50"]
    assert plan_command.main([*options, "--devices", "4xh100-80"]) == 0
    assert "--cpu-offload-gb is NOT needed: it fits without" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--cpu-offload-gb", "5"], 3, "refused: --cpu-offload-gb 5 holds the routed experts of 1"),
        (["--cpu-offload-gb", "1"], 3, "holds no layer's routed experts (3.362 GiB a layer"),
        (["--cpu-offload-gb", "-1"], 2, "'-1' is not a number of GiB from 0"),
        (["--cpu-offload-gb", "nan"], 2, "'nan' is not a number of GiB from 0"),
        (["--cpu-offload-gb", "1e9"], 2, "'1e9' is not a number of GiB from 0 to 1048576"),
        (["--cpu-offload-gb", "20", "--compile"], 2, "--compile cannot be combined with"),
    ],
)
def test_wrong_sizes_are_refused_in_one_sentence(capsys, options, status, message):
    try:
        found = plan_command.main([*REFERENCE, *options])
    except SystemExit as error:
        found = error.code
    assert found == status
    assert message in capsys.readouterr().err

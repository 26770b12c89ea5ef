"""Full-size layers with random weights on one device: times of each kind, and of a stage."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from dsv41_jax.axes import Partition
from dsv41_jax.batch import TokenBatch
from dsv41_jax.config import ModelConfig
from dsv41_jax.forward import COMPILER_OPTIONS
from dsv41_jax.layer_plan import LayerSpec, layer_plan, layer_spec
from dsv41_jax.layers.block import Stream
from dsv41_jax.model import Stage
from dsv41_jax.shared_state import ROW_KINDS, SharedState
from dsv41_jax.state import StageState
from serving.bench.device_arrays import (
    Step,
    published,
    random_batch,
    random_caches,
    random_parameters,
)
from serving.bench.device_ops import FIRST_ROWS, speed
from serving.bench.device_setting import Setting
from serving.bench.device_tasks import Facts, Measure, Task, median_seconds
from sharding.mesh import AXES
from sharding.roofline import roofline
from sharding.rules import abstract_parameters
from sharding.stage_plan import StageContents
from sharding.tensor_plan import plan_tensor_parallel

PART = "layers"
DECODE_ROWS = (1, 4, 16, 64)
PREFILL_TOKENS = 512


def kind_of(spec: LayerSpec) -> str:
    """What a layer computes, in words: layers of one kind take the same time."""
    parts = [spec.mode.value]
    if spec.ratio:
        parts.append(f"ratio {spec.ratio}")
    if spec.publishes_candidates:
        parts.append("candidates")
    if spec.candidate_source is not None:
        parts.append("masked")
    if spec.engram is not None:
        parts.append("engram")
    return " ".join(parts)


def kinds(config: ModelConfig) -> dict[str, list[int]]:
    """Layers by kind."""
    found: dict[str, list[int]] = {}
    for spec in layer_plan(config):
        found.setdefault(kind_of(spec), []).append(spec.layer)
    return found


def steps_of(*, context: int, decode: Sequence[int], prefill: int) -> list[Step]:
    """Decode steps after `context` tokens each, and a prompt of `prefill` tokens."""
    steps = [
        Step(name=f"decode {rows}", tokens=rows, requests=rows, context=context) for rows in decode
    ]
    return [*steps, Step(name=f"prefill {prefill}", tokens=prefill, requests=1, context=0)]


def layer_tasks(
    config: ModelConfig,
    setting: Setting,
    steps: Sequence[Step],
    *,
    tensor: Sequence[int],
    chosen: Sequence[str],
) -> list[Task]:
    """A task for each kind of layer and share of it, in two parts: first steps, and the rest.

    Args:
      config: the model.
      setting: the device.
      steps: to time.
      tensor: tensor parallel sizes, the most important first.
      chosen: kinds of `kinds(config)`.
    """
    tasks = []
    layers = kinds(config)
    first = [step for step in steps if step.tokens in FIRST_ROWS] or list(steps[:1])
    rest = [step for step in steps if step not in first]
    for rank, size in enumerate(tensor):
        for priority, part in ((1, first), (4, rest)):
            tasks += [
                Task(
                    part=PART,
                    name=f"layer {kind}, tp{size}, {', '.join(step.name for step in part)}",
                    priority=priority + 5 * rank,
                    prepare=functools.partial(
                        prepare_layer, config, setting, layers[kind][0], size, part
                    ),
                    guess=8.0 * len(part),
                )
                for kind in chosen
                if part
            ]
    return tasks


def one_device_mesh(device: jax.Device) -> Mesh:
    """A stage's mesh with one device: what several would sum stays one share of it."""
    return Mesh(np.array([device]).reshape(1, 1, 1), AXES)


def prepare_layer(
    config: ModelConfig, setting: Setting, layer: int, tensor: int, steps: Sequence[Step]
) -> Measure:
    """Compiles loops over one layer, at the shapes of one of `tensor` devices."""
    mesh = one_device_mesh(setting.device)
    how = setting.layer_implementation
    stage = Stage(config, range(layer, layer + 1), Partition(tensor=tensor), how)
    abstract = abstract_parameters(stage, mesh)
    programs = {}
    for step in steps:
        moved, flops = layer_work(config, stage, step, None)
        rounds = setting.rounds(moved, flops, 1)
        given = jax.eval_shape(lambda step=step: _placed(stage, step, setting.seed))
        program = jax.jit(_loop(stage, mesh, rounds), compiler_options=COMPILER_OPTIONS)
        programs[step] = program.lower(abstract, *given).compile(), rounds

    def measure() -> list[Facts]:
        params = random_parameters(abstract, setting.seed)
        found = []
        for step, (program, rounds) in programs.items():
            given = _placed(stage, step, setting.seed)
            (stream, experts), _ = program(params, *given)
            experts = np.unique(np.asarray(experts)[: step.tokens])
            finite = bool(jnp.all(jnp.isfinite(stream.x[: step.tokens].astype(jnp.float32))))
            facts: Facts = {
                "kind": kind_of(layer_spec(config, layer)),
                "layer": layer,
                "tensor": tensor,
                "step": step.name,
                "active_experts": len(experts),
                "ok": finite,
            }
            if setting.measures:
                seconds = median_seconds(lambda: program(params, *given)) / rounds  # noqa: B023
                facts |= speed(setting, seconds, *layer_work(config, stage, step, len(experts)))
            found.append(facts)
        return found

    return measure


def _placed(
    stage: Stage, step: Step, seed: int
) -> tuple[StageState, TokenBatch, Stream, SharedState]:
    """Arguments of a layer besides its parameters."""
    config, layer = stage.config, stage.layers[0]
    batch = random_batch(config, stage.layers, step, seed)
    spec = layer_spec(config, layer)
    sources = [spec.kv_source] if spec.kv_source not in (None, layer) else []
    read = StageState({}, {}, {}, {})
    for source in sources:
        of = range(source, source + 1)
        read = random_caches(config, of, step=step, seed=seed + 1, replicas=True)
    state = random_caches(config, stage.layers, step=step, seed=seed, replicas=False)
    stream = Stream(
        jax.random.normal(
            jax.random.key(seed), (step.rows, config.hc_mult, config.hidden_size), jnp.bfloat16
        ),
        jnp.full((step.rows, config.hc_mult), 1 / config.hc_mult, jnp.float32),
    )
    shared = published(config, layer, batch, read)
    return state, jax.tree.map(jnp.asarray, batch), stream, jax.tree.map(jnp.asarray, shared)


def _loop(stage: Stage, mesh: Mesh, rounds: int) -> Any:
    """A layer on the same input, over and over; each round waits for the one before."""
    layer = stage.layers[0]

    def once(params: Any, state: Any, batch: Any, stream: Any, shared: Any) -> Any:
        result = stage(params, state, batch, stream, shared)
        entries = result.shared.entries
        own = {kind: entries[kind][layer] for kind in ROW_KINDS if layer in entries.get(kind, {})}
        return (result.stream, result.traces[0].experts, own), result.state

    def program(params: Any, state: Any, batch: Any, stream: Any, shared: Any) -> Any:
        given = (params, batch, stream, shared)
        empty = jax.eval_shape(once, params, state, batch, stream, shared)[0]
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), empty)

        def one_round(_: jax.Array, carry: Any) -> Any:
            (params, batch, stream, shared), state, _ = carry
            found, state = once(params, state, batch, stream, shared)
            return jax.lax.optimization_barrier(((params, batch, stream, shared), state, found))

        _, state, found = jax.lax.fori_loop(0, rounds, one_round, (given, state, zeros))
        return found[:2], found[2]

    return on_mesh(program, mesh)


def on_mesh(program: Any, mesh: Mesh) -> Any:
    """A function of a device's shares, on the mesh of one device."""
    everywhere = PartitionSpec()
    return jax.shard_map(
        program, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )


def layer_work(
    config: ModelConfig, stage: Stage, step: Step, active: int | None
) -> tuple[float, float]:
    """Bytes that the layers of a stage move at least in a step, and their operations."""
    contents = StageContents(
        stage=0,
        layers=stage.layers,
        kv_sources=(),
        index_sources=(),
        candidate_source=None,
        open_groups=(),
        engram_layers=(),
        replicas=(),
        embedding=False,
        vision=False,
        head=False,
        draft=False,
        cost=0.0,
    )
    rows = roofline(
        config,
        contents,
        plan_tensor_parallel(config, stage.partition.tensor),
        tokens=step.tokens,
        requests=step.requests,
        context=step.context,
        active=active,
    )
    return sum(row.bytes for row in rows), sum(row.flops for row in rows)


def extrapolate(config: ModelConfig, facts: Sequence[Facts], stages: int) -> list[Facts]:
    """Times of whole steps from those of the kinds: layers alone, extrapolated.

    Args:
      config: the model.
      facts: what was measured of the kinds.
      stages: pipeline stages of equal numbers of layers.

    Returns:
      One for each step and tensor size of which every kind was measured: the seconds of each
      stage's layers, and of all.
    """
    layers, plan = config.num_hidden_layers, layer_plan(config)
    found: dict[tuple[str, int], dict[str, float]] = {}
    for fact in facts:
        if fact.get("seconds"):
            found.setdefault((fact["step"], fact["tensor"]), {})[fact["kind"]] = fact["seconds"]
    result = []
    for (step, tensor), seconds in found.items():
        if set(seconds) != set(kinds(config)):
            continue
        each = [seconds[kind_of(spec)] for spec in plan]
        size = -(-layers // stages)
        result.append(
            {
                "step": step,
                "tensor": tensor,
                "stage_seconds": [sum(each[i : i + size]) for i in range(0, layers, size)],
                "seconds": sum(each),
            }
        )
    return result

"""Full-size programs of every stage, compiled for devices that are not there.

The programs are those that a server compiles: the real modules, sharded over the stage's own
mesh, with abstract parameters, caches and batches in place of arrays.
"""

import dataclasses
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import tqdm
from jax.sharding import Mesh

from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_table import empty_rows
from dsv41_jax.host_batch import build_batch, round_rows
from dsv41_jax.layers.block import Stream
from dsv41_jax.sampling import NUM_ALTERNATIVES, LogitChanges, SamplingBatch, mask_words
from dsv41_jax.state import StageState, init_state
from pallas_kernels.dispatch import Implementation
from sharding.boundary import bundle_shardings
from sharding.cache_sizes import CacheSizes
from sharding.deviceless import compile_only_devices, target_of
from sharding.fit import Workload
from sharding.kernel_report import KernelReport, compile_with_report
from sharding.limits import EngineLimits, round_up
from sharding.memory import plan_stage_caches
from sharding.mesh import stage_meshes
from sharding.microbatch import microbatch_tokens
from sharding.pipeline import stage_steps
from sharding.relay import Bundle, add_replicas
from sharding.rules import abstract_parameters, parameter_specs, replicated
from sharding.stage_plan import Boundary
from sharding.stage_runner import Bucket, StageStep, stage_program

_BIASED = 1024  # tokens a request may bias besides those it has seen
SERVER_STEPS = "server"  # the name of `server_steps`
# Decode batches and prefills that bound what a server meets.
ALL_STEPS = (
    *("decode-1", "decode-4", "decode-16", "decode-64"),
    *("prefill-512", "prefill-2048", "prefill-8192"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepKind:
    """A step that a stage has a program for.

    Attributes:
      name: "decode-4" is a token of each of 4 requests, "prefill-512" 512 prompt tokens.
      rows: real rows.
      bucket: padded sizes.
    """

    name: str
    rows: int
    bucket: Bucket

    @property
    def decodes(self) -> bool:
        """Whether every row is a token of another request."""
        return self.name.startswith("decode")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageProgram:
    """A program of one stage, compiled.

    Attributes:
      stage: index in the pipeline.
      kind: the step.
      compiled: the program.
      kernels: its kernels, by name.
      seconds: tracing, lowering and compiling.
    """

    stage: int
    kind: StepKind
    compiled: jax.stages.Compiled
    kernels: tuple[KernelReport, ...]
    seconds: float


def server_steps(workload: Workload) -> list[StepKind]:
    """What a server on GPUs compiles: a step of decode rows alone, and the largest."""
    limits, parts = workload.limits(), workload.microbatches
    prompt = microbatch_tokens(workload.max_num_batched_tokens, parts)
    decode = microbatch_tokens(round_up(workload.max_num_seqs), parts)
    kinds = [
        StepKind(
            name=f"decode-{workload.max_num_seqs}",
            rows=min(workload.max_num_seqs, decode),
            bucket=_bucket(limits, decode),
        )
    ]
    if prompt > decode:
        kinds.append(
            StepKind(name=f"prefill-{prompt}", rows=prompt, bucket=_bucket(limits, prompt))
        )
    return kinds


def named_steps(workload: Workload, names: Sequence[str]) -> list[StepKind]:
    """Steps by name, whole rather than in microbatches.

    Raises:
      ValueError: a name that is none.
    """
    kinds = []
    for name in names:
        match = re.fullmatch(r"(decode|prefill)-([1-9]\d*)", name)
        if match is None:
            raise ValueError(
                f"{name!r} is no step: name steps such as decode-4 (requests) or prefill-512 "
                "(tokens), with commas between"
            )
        rows = int(match[2])
        requests = rows if match[1] == "decode" else workload.max_num_seqs
        limits = dataclasses.replace(
            workload.limits(),
            max_num_seqs=requests,
            max_num_batched_tokens=max(rows, requests),
        )
        kinds.append(StepKind(name=name, rows=rows, bucket=_bucket(limits, round_rows(rows))))
    return kinds


def _bucket(limits: EngineLimits, tokens: int) -> Bucket:
    return Bucket(
        tokens=tokens,
        requests=limits.max_num_seqs,
        columns=limits.columns,
        logit_rows=min(tokens, limits.logit_rows),
    )


def compile_programs(
    workload: Workload,
    kinds: Sequence[StepKind],
    *,
    device: str,
    implementation: Implementation,
    stages: Sequence[int] | None = None,
    progress: bool = False,
) -> Iterator[StageProgram]:
    """Compiles steps of stages, one after the other.

    Args:
      workload: the partition and the sizes of its caches.
      kinds: the steps.
      device: kind of device, one of `sharding.deviceless.CHIPS`.
      implementation: of the operations.
      stages: which ones; all if None.
      progress: whether to show a progress bar on stderr.

    Raises:
      NoCompilerError: the `cuda12` extra is not installed.
      ConfigError: the budget does not hold one request.
    """
    config, plan, tensor = workload.config, workload.plan, workload.tensor
    sizes = plan_stage_caches(config, plan, workload.limits(), workload.kv_cache_memory_bytes)
    devices = compile_only_devices(device, workload.devices)
    meshes = stage_meshes(len(plan.stages), tensor.devices, devices)
    steps = stage_steps(config, plan, tensor, implementation, workload.placement.embedding)
    chosen = range(len(steps)) if stages is None else stages
    with tqdm.tqdm(total=len(chosen) * len(kinds), disable=not progress, unit="program") as bar:
        for stage in chosen:
            step, mesh = steps[stage], meshes[stage]
            before = plan.boundaries[stage - 1] if stage else None
            with target_of(device):
                program = stage_program(step, mesh, parameter_specs(step.stage))
                params = abstract_parameters(step.stage, mesh)
            for kind in kinds:
                bar.set_postfix_str(f"stage {stage}, {kind.name}")
                began = time.monotonic()
                rest = abstract_arguments(
                    step,
                    mesh,
                    kind.bucket,
                    sizes=sizes,
                    before=before,
                    max_model_len=workload.max_model_len,
                )
                with target_of(device):
                    lowered = program.trace(params, *rest).lower()
                    compiled, kernels = compile_with_report(lowered)
                seconds = time.monotonic() - began
                bar.update()
                yield StageProgram(
                    stage=stage, kind=kind, compiled=compiled, kernels=kernels, seconds=seconds
                )


def abstract_arguments(
    step: StageStep,
    mesh: Mesh,
    bucket: Bucket,
    *,
    sizes: CacheSizes,
    before: Boundary | None,
    max_model_len: int,
) -> tuple[Any, ...]:
    """Caches, batch, bundle of the stage before and sampling of one step, without arrays.

    Args:
      step: the stage.
      mesh: its devices.
      bucket: padded sizes of the step.
      sizes: of the caches.
      before: what the stage before passes on; None on the first.
      max_model_len: most tokens of a request, which may all be penalized.
    """
    config, contents = step.stage.config, step.contents
    state = jax.eval_shape(lambda: _state(step, sizes))
    batch = build_batch(config, (), **dataclasses.asdict(bucket), engram=None)
    if contents.engram_layers:
        rows = empty_rows(config.engram, contents.engram_layers, bucket.tokens)
        batch = dataclasses.replace(batch, engram=rows)
    if step.stage.is_first and step.stage.embedding == "host":
        rows = jax.ShapeDtypeStruct((bucket.tokens, config.hidden_size), jnp.bfloat16)
        batch = dataclasses.replace(batch, embedding=rows)
    received = None
    if before is not None:
        received = _received(config, before, bucket.tokens, mesh.size)
        received = jax.tree.map(_sharded, received, _received_shardings(received, mesh))
    sampling = _sampling(config, bucket, max_model_len) if step.boundary is None else None
    whole = replicated(mesh)
    state, batch, sampling = jax.tree.map(lambda a: _sharded(a, whole), (state, batch, sampling))
    return state, batch, received, sampling


def _sharded(array: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def _state(step: StageStep, sizes: CacheSizes) -> StageState:
    config = step.stage.config
    own = init_state(config, step.stage.layers, **dataclasses.asdict(sizes))
    replicas = step.contents.replicas
    return add_replicas(config, own, replicas, global_pages=sizes.global_pages)


def _received(config: ModelConfig, boundary: Boundary, tokens: int, devices: int) -> Bundle:
    """Shapes of what crosses a boundary in a step of `tokens` rows."""
    rows = -(-tokens // devices) * devices
    copies = (rows, config.hc_mult)
    stream = Stream(
        jax.ShapeDtypeStruct((*copies, config.hidden_size), jnp.bfloat16),
        jax.ShapeDtypeStruct(copies, jnp.float32),
    )
    bundle = Bundle(stream, {}, {}, {}, {})
    widths = {"index": config.index_topk, "candidate": config.candidate_topk_blocks}
    for item in boundary.relay:
        carried, source = getattr(bundle, item.kind), item.source
        if item.kind in widths:
            carried[source] = jax.ShapeDtypeStruct((tokens, widths[item.kind]), jnp.int32)
            continue
        caches = jax.eval_shape(
            lambda source=source: init_state(
                config, range(source, source + 1), window_pages=0, global_pages=1, slots=0
            )
        )
        carried[source] = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((tokens, *a.shape[1:]), a.dtype),
            getattr(caches, item.kind)[source],
        )
    return bundle


def _received_shardings(bundle: Bundle, mesh: Mesh) -> Bundle:
    spread = bundle_shardings(mesh)
    whole = jax.tree.map(lambda _: replicated(mesh), bundle)
    return dataclasses.replace(whole, stream=spread.stream)


def _sampling(config: ModelConfig, bucket: Bucket, max_model_len: int) -> SamplingBatch:
    """Shapes of a step's sampling, with tables of changes for every request."""
    rows, vocabulary = bucket.logit_rows, config.vocab_size

    def column(dtype: Any, *width: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *width), dtype)

    changed = (bucket.requests, min(vocabulary, max_model_len + _BIASED))
    return SamplingBatch(
        temperature=column(jnp.float32),
        top_p=column(jnp.float32),
        top_k=column(jnp.int32),
        min_p=column(jnp.float32),
        seed=column(jnp.uint32),
        step=column(jnp.int32),
        target=column(jnp.int32),
        watched=column(jnp.int32, NUM_ALTERNATIVES),
        change_row=column(jnp.int32),
        changes=LogitChanges(
            ids=jax.ShapeDtypeStruct(changed, jnp.int32),
            divisor=jax.ShapeDtypeStruct(changed, jnp.float32),
            bias=jax.ShapeDtypeStruct(changed, jnp.float32),
            allowed=jax.ShapeDtypeStruct((bucket.requests, mask_words(vocabulary)), jnp.uint32),
        ),
    )

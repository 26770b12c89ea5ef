"""A model spread over pipeline stages: loaded from a checkpoint, then scored and continued."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

import jax
import numpy as np

from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_table import read_tokenizer
from dsv41_jax.hf_config import load_config
from dsv41_jax.host_batch import RequestRows, round_rows
from dsv41_jax.inference import (
    check_request,
    columns_for,
    decode_loop,
    prompt_chunks,
    replay_start,
    window_ring,
)
from dsv41_jax.model import EmbeddingPlacement, Stage
from dsv41_jax.sampling import Sampled, SamplingBatch
from dsv41_jax.state import StageState
from pallas_kernels.dispatch import Implementation, resolve
from sharding.hop import Hop
from sharding.hosts import on_one_process, own_devices
from sharding.memory import stage_offloads
from sharding.mesh import stage_meshes
from sharding.microbatch import cut_rows, microbatch_tokens, num_logits, sampling_rows
from sharding.placement import DEFAULT_PLACEMENT, TablePlacement
from sharding.rules import load_stage_params, parameter_specs, partition_of
from sharding.stage_plan import PartitionError, StagePlan, check_crossings, lay_out
from sharding.stage_runner import Bucket, StageRunner, StageStep
from sharding.tensor_plan import TensorPlan, plan_tensor_parallel

States = tuple[StageState, ...]


@dataclasses.dataclass(frozen=True)
class MicrobatchResult:
    """What the last stage computes of one microbatch; still on its way when it is returned.

    Attributes:
      value: tokens, or float32[L, V] logits; None where the last stage is on other processes.
      num_logits: real rows; they come first.
    """

    value: Sampled | jax.Array | None
    num_logits: int


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Stages on their meshes; see `build_pipeline`.

    Attributes:
      config: the model.
      plan: its stages.
      stages: loaded and placed, in order.
      microbatches: parts that a step is cut into.
    """

    config: ModelConfig
    plan: StagePlan
    stages: tuple[StageRunner, ...]
    microbatches: int

    def init_state(self, *, window_pages: int, global_pages: int, slots: int) -> States:
        """Zeroed caches, by stage."""
        return tuple(
            stage.init_state(window_pages=window_pages, global_pages=global_pages, slots=slots)
            for stage in self.stages
        )

    def step(
        self,
        states: States,
        rows: Sequence[RequestRows],
        bucket: Bucket,
        sampling: SamplingBatch | None,
    ) -> tuple[list[MicrobatchResult], States]:
        """Dispatches one step, microbatch after microbatch, without waiting for any.

        A stage works on one microbatch while the stage before works on the next: each mesh has
        its own queue, and nothing but the arrays themselves orders them.

        Args:
          states: caches by stage; donated.
          rows: the requests' shares of the step.
          bucket: sizes of a microbatch.
          sampling: of the step's logit rows, in order; None for logits.

        Returns:
          One result per microbatch, and the caches after the step.
        """
        results, done, current = [], 0, list(states)
        for part in cut_rows(rows, self.microbatches):
            chosen = None
            if sampling is not None:
                chosen = sampling_rows(sampling, done, bucket.logit_rows)
            carried = None
            for index, stage in enumerate(self.stages):
                last = index == len(self.stages) - 1
                if stage.hop is not None:
                    carried = stage.hop.carry(carried, bucket.tokens)
                if not stage.is_here:
                    carried = None
                    continue
                carried, current[index] = stage.dispatch(
                    current[index], part, bucket, carried, chosen if last else None
                )
            results.append(MicrobatchResult(carried, num_logits(part)))
            done += num_logits(part)
        return results, tuple(current)

    def score(self, token_ids: Sequence[int], chunk_size: int | None = None) -> np.ndarray:
        """Teacher-forced logits of every position; see `dsv41_jax.inference.score`."""
        chunk = check_request(self.config, token_ids, 0, chunk_size)
        states = self._request_state(len(token_ids), chunk)
        tokens = microbatch_tokens(chunk, self.microbatches)
        bucket = self._request_bucket(len(token_ids), tokens, tokens)
        logits = []
        for part in prompt_chunks(self.config, token_ids, chunk):
            part = dataclasses.replace(part, logits=len(part.token_ids))
            results, states = self.step(states, [part], bucket, None)
            logits += [np.asarray(result.value)[: result.num_logits] for result in results]
        return np.concatenate(logits)

    def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        decoder_replay: bool = False,
    ) -> list[int]:
        """Continues a prompt; see `dsv41_jax.inference.generate`."""
        chunk = check_request(self.config, token_ids, max_new_tokens, None)
        total = len(token_ids) + max_new_tokens
        states = self._request_state(total, chunk)
        tokens = microbatch_tokens(chunk, self.microbatches)
        bucket = self._request_bucket(total, tokens, round_rows(1))

        def step(part: RequestRows, sampling: SamplingBatch) -> Sampled:
            nonlocal states
            results, states = self.step(states, [part], bucket, sampling)
            return results[-1].value

        return decode_loop(
            self.config,
            token_ids,
            step,
            chunk=chunk,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            late_from=replay_start(self.config, len(token_ids)) if decoder_replay else 0,
        )

    def _request_state(self, tokens: int, chunk: int) -> States:
        return self.init_state(
            window_pages=window_ring(self.config, chunk),
            global_pages=columns_for(self.config, tokens),
            slots=1,
        )

    def _request_bucket(self, total: int, tokens: int, logit_rows: int) -> Bucket:
        columns = columns_for(self.config, total)
        return Bucket(tokens=tokens, requests=1, columns=columns, logit_rows=logit_rows)


def build_pipeline(
    path: str | os.PathLike,
    plan: StagePlan,
    tensor: TensorPlan | None = None,
    *,
    microbatches: int | None = None,
    devices: Sequence[jax.Device] | None = None,
    placement: TablePlacement = DEFAULT_PLACEMENT,
    implementation: Implementation | None = None,
    progress: bool = True,
) -> Pipeline:
    """Loads a checkpoint onto the stages of a plan.

    The plan is checked before any weight is read. Each stage reads and keeps the parameters,
    caches and Engram tables of its own layers only.

    Args:
      path: checkpoint directory in the released layout.
      plan: its stages, from `sharding.stage_plan.build_stage_plan`.
      tensor: how a stage divides over its devices; one device per stage if None.
      microbatches: parts that a step is cut into; as many as stages if None.
      devices: stage by stage, all of JAX's if None; stages may share devices. Where they are of
        several processes, each loads the stages that it has devices of.
      placement: where Engram tables, the embedding and routed experts are.
      implementation: of the operations; the default of the backend if None.
      progress: whether to show progress bars on stderr.

    Raises:
      ConfigError: config.json does not describe a model this project runs.
      PartitionError: the plan is of another model, is not legal, or needs more devices; or the
        placement offloads too little.
      CheckpointError: the shards are incomplete, damaged or of another model.
    """
    directory = pathlib.Path(path)
    config = load_config(directory)
    check_plan(config, plan)
    tensor = plan_tensor_parallel(config, 1) if tensor is None else tensor
    meshes = stage_meshes(len(plan.stages), tensor.devices, devices)
    tokenizer = read_tokenizer(directory) if config.engram is not None else None
    runners = []
    steps = stage_steps(
        config,
        plan,
        tensor,
        resolve(implementation),
        placement.embedding,
        [offload.layers for offload in stage_offloads(config, plan, tensor, placement)],
    )
    for index, (step, mesh) in enumerate(zip(steps, meshes, strict=True)):
        hop = None
        if index and not on_one_process((meshes[index - 1], mesh)):
            hop = Hop(config, meshes[index - 1], mesh)
        specs = parameter_specs(step.stage)
        if not own_devices(mesh.devices.flat):
            runners.append(StageRunner(step, mesh, {}, specs, None, hop=hop))
            continue
        engram = None
        if step.contents.engram_layers:
            layers = step.contents.engram_layers
            engram = placement.open_engram(
                directory, config, mesh, layers=layers, tokenizer=tokenizer, progress=progress
            )
        embedding = placement.open_embedding(directory, config) if step.stage.is_first else None
        params = load_stage_params(directory, step.stage, mesh, specs, progress=progress)
        runners.append(StageRunner(step, mesh, params, specs, engram, embedding, hop))
    return Pipeline(config, plan, tuple(runners), microbatches or len(plan.stages))


def stage_steps(
    config: ModelConfig,
    plan: StagePlan,
    tensor: TensorPlan,
    implementation: Implementation,
    embedding: EmbeddingPlacement = "device",
    offloaded: Sequence[tuple[int, ...]] | None = None,
) -> list[StageStep]:
    """The computation of every stage; the plan is taken as it is.

    Args:
      config, plan, tensor: the model and how it is spread.
      implementation: of the operations.
      embedding: where it is.
      offloaded: layers of each stage whose experts are in host memory; none if None.
    """
    partition = partition_of(tensor)
    boundaries = [*plan.boundaries, None]
    offloaded = [()] * len(plan.stages) if offloaded is None else offloaded
    return [
        StageStep(
            Stage(config, contents.layers, partition, implementation, embedding, layers),
            contents,
            boundary,
        )
        for contents, boundary, layers in zip(plan.stages, boundaries, offloaded, strict=True)
    ]


def check_plan(config: ModelConfig, plan: StagePlan) -> None:
    """Refuses a plan that was made for another model or that skipped the checks.

    Raises:
      PartitionError: says which.
    """
    if lay_out(config, plan.ranges, relay=plan.relay) != plan:
        raise PartitionError(
            f"the plan of stages {','.join(map(str, plan.counts))} was made for another "
            "configuration; make it from this checkpoint's config.json"
        )
    check_crossings(config, plan, relay_max_bytes=None)

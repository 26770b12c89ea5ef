"""One stage on its own mesh: parameters, Engram tables, and its compiled step."""

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from dsv41_jax.batch import TokenBatch
from dsv41_jax.embedding_table import EmbeddingTable
from dsv41_jax.engram_table import EngramRows
from dsv41_jax.forward import COMPILER_OPTIONS
from dsv41_jax.host_batch import RequestRows, build_batch
from dsv41_jax.layer_plan import SharingError
from dsv41_jax.model import Params, Stage
from dsv41_jax.sampling import Sampled, SamplingBatch, sample
from dsv41_jax.shared_state import SharedState
from dsv41_jax.state import StageState, init_state
from sharding.boundary import bundle_shardings, bundle_specs, gather_rows, shard_rows
from sharding.hop import Hop
from sharding.hosts import own_devices, place
from sharding.relay import Bundle, add_replicas, receive, send
from sharding.rules import parameter_shardings, replicated
from sharding.stage_plan import Boundary, StageContents

StageOutput = Bundle | jax.Array | Sampled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """Padded sizes of a microbatch: T, R, C and L of `TokenBatch`."""

    tokens: int
    requests: int
    columns: int
    logit_rows: int


@dataclasses.dataclass(frozen=True)
class StageStep:
    """What a stage computes for one microbatch, as a pure function of arrays.

    Attributes:
      stage: the layers.
      contents: what the plan says the stage owns.
      boundary: what it passes on; None for the last stage.
    """

    stage: Stage
    contents: StageContents
    boundary: Boundary | None

    def __call__(
        self,
        params: Params,
        state: StageState,
        batch: TokenBatch,
        received: Bundle | None,
        sampling: SamplingBatch | None,
    ) -> tuple[StageOutput, StageState]:
        """Runs the stage.

        Args:
          params: of the stage's layers.
          state: its caches, with its replicas.
          batch: the microbatch.
          received: from the stage before, this device's rows of the stream; None on the first.
          sampling: how the last stage chooses tokens; None for logits.

        Returns:
          A `Bundle` for the next stage, with this device's rows of the stream; on the last one
          the tokens or float32[L, V] logits. Then the caches after the microbatch.

        Raises:
          SharingError: a layer reads what was neither published here nor relayed.
        """
        config, stream, shared = self.stage.config, None, SharedState()
        devices = self.stage.partition.tensor
        if received is not None:
            stream = gather_rows(received.stream, batch.positions.shape[0], devices)
            replicas = self.contents.replicas
            state, shared = receive(config, replicas, received, batch, state)
        try:
            result = self.stage(params, state, batch, stream, shared)
        except SharingError as error:
            raise SharingError(f"pipeline stage {self.contents.stage}: {error}") from None
        if self.boundary is not None:
            bundle = send(self.stage, self.boundary.relay, result, received)
            own = shard_rows(bundle.stream, devices)
            return dataclasses.replace(bundle, stream=own), result.state
        logits = result.head.logits
        if sampling is None:
            return logits, result.state
        how = self.stage.implementation
        return sample(logits, sampling, batch.num_logits, implementation=how), result.state


class StageRunner:
    """A stage that is loaded and placed; caches are the caller's, and donated to each step.

    Attributes:
      step: the computation.
      mesh: the stage's devices.
      params: parameters of the stage's layers, sharded over the mesh.
      engram: where rows of the stage's Engram layers come from, or None where it has none.
      embedding: the embedding of a first stage that leaves it on the host.
      hop: from the stage before, where that is on other processes.
      is_here: whether this process has devices of the stage; without it holds no part of it.
      program: the jitted step; compiled once for each bucket.
    """

    def __init__(
        self,
        step: StageStep,
        mesh: Mesh,
        params: Params,
        specs: Params,
        engram: EngramRows | None,
        embedding: EmbeddingTable | None = None,
        hop: Hop | None = None,
    ) -> None:
        """
        Args:
          step: the computation.
          mesh: the stage's devices.
          params: see above.
          specs: how they are sharded.
          engram, embedding, hop: see above.
        """
        self.step = step
        self.mesh = mesh
        self.params = params
        self.engram = engram
        self.embedding = embedding
        self.hop = hop
        self.is_here = bool(own_devices(mesh.devices.flat))
        self.program = stage_program(step, mesh, specs)

    def with_engram(self, engram: EngramRows) -> "StageRunner":
        """The same stage with another source of its Engram rows."""
        other = copy.copy(self)
        other.engram = engram
        return other

    def make_state(self, *, window_pages: int, global_pages: int, slots: int) -> StageState:
        """Zeroed caches of the stage's layers and replicas, wherever JAX puts them."""
        stage = self.step.stage
        state = init_state(
            stage.config,
            stage.layers,
            window_pages=window_pages,
            global_pages=global_pages,
            slots=slots,
        )
        replicas = self.step.contents.replicas
        return add_replicas(stage.config, state, replicas, global_pages=global_pages)

    def init_state(self, **pools: int) -> StageState | None:
        """Zeroed caches on every device of the stage; see `make_state`. None if it is not here."""
        if not self.is_here:
            return None
        make = functools.partial(self.make_state, **pools)
        return jax.jit(make, out_shardings=replicated(self.mesh))()

    def batch(self, rows: Sequence[RequestRows], bucket: Bucket) -> TokenBatch:
        """A microbatch with the table rows that this stage's layers read."""
        return build_batch(
            self.step.stage.config,
            rows,
            **dataclasses.asdict(bucket),
            engram=self.engram,
            embedding=self.embedding,
        )

    def place(self, value: Any) -> Any:
        """Starts to copy a pytree to every device of the stage."""
        return place(value, self.mesh)

    def dispatch(
        self,
        state: StageState,
        rows: Sequence[RequestRows],
        bucket: Bucket,
        received: Bundle | None,
        sampling: SamplingBatch | None,
    ) -> tuple[StageOutput, StageState]:
        """Starts one microbatch and returns before it is done; see `StageStep`."""
        batch, sampling = self.place((self.batch(rows, bucket), sampling))
        if received is not None and self.hop is None:
            received = jax.device_put(received, bundle_shardings(self.mesh))
        return self.program(self.params, state, batch, received, sampling)


def stage_program(step: StageStep, mesh: Mesh, specs: Params) -> jax.stages.Wrapped:
    """The jitted step of a stage.

    Parameters are sharded, the stream at the boundaries is split by rows, and everything else
    is on every device.
    """
    everywhere, whole = PartitionSpec(), replicated(mesh)
    received, received_sharding = everywhere, whole
    if not step.stage.is_first:
        received, received_sharding = bundle_specs(), bundle_shardings(mesh)
    output, output_sharding = everywhere, whole
    if step.boundary is not None:
        output, output_sharding = bundle_specs(), bundle_shardings(mesh)
    sharded = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, everywhere, everywhere, received, everywhere),
        out_specs=(output, everywhere),
        check_vma=False,
    )
    params = parameter_shardings(step.stage, mesh, specs)
    return jax.jit(
        sharded,
        donate_argnums=1,
        in_shardings=(params, whole, whole, received_sharding, whole),
        out_shardings=(output_sharding, whole),
        compiler_options=COMPILER_OPTIONS,
    )

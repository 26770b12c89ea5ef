"""A stage of the model: a range of layers; the whole model is one stage with everything."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dsv41_jax.axes import WHOLE, Partition
from dsv41_jax.batch import TokenBatch
from dsv41_jax.config import ModelConfig
from dsv41_jax.expert_offload import fetch_experts
from dsv41_jax.layer_plan import SharingError, layer_spec
from dsv41_jax.layers.block import Block, LayerTrace, Stream
from dsv41_jax.layers.cached_block import read_block, write_block
from dsv41_jax.layers.embedding import Embedding, Head
from dsv41_jax.layers.linear import RMSNorm
from dsv41_jax.shared_state import SharedState
from dsv41_jax.state import StageState
from pallas_kernels import hyper_connections
from pallas_kernels.dispatch import Implementation
from pallas_kernels.rowwise import ROW_TILE, map_rows

Params = dict[str, Any]
EmbeddingPlacement = Literal["device", "host"]
NOTHING_SHARED = SharedState()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadResult:
    """What the last stage computes of the rows whose logits are wanted.

    Attributes:
      final_h: bf16[L, D], the copies folded by the last layer's pre.
      final_normed: bf16[L, D].
      logits: float32[L, V]; zeros in the tiles past `TokenBatch.num_logits`.
    """

    final_h: jax.Array
    final_normed: jax.Array
    logits: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StageResult:
    """Everything a stage computes in one step; what the caller drops is not computed.

    Attributes:
      stream: what the next stage reads.
      state: caches after the step.
      shared: publications of this stage's layers, and those handed in.
      head: logits, on the last stage only.
      main_hidden: bf16[T, D] per draft target layer of the stage: the mean over copies of
        the layer's input, its Engram included.
      traces: one per layer of the stage.
    """

    stream: Stream
    state: StageState
    shared: SharedState
    head: HeadResult | None
    main_hidden: tuple[jax.Array, ...]
    traces: tuple[LayerTrace, ...]


@dataclasses.dataclass(frozen=True)
class Stage:
    """Layers `layers` of the backbone, with the embedding first and the head last.

    Attributes:
      config: the model.
      layers: consecutive backbone layers.
      partition: devices that share the stage; parameters have per-device shapes.
      implementation: of the operations; see `pallas_kernels.dispatch`.
      embedding: whether the embedding is a parameter of the first stage, or the batch brings
        the rows of its tokens.
      offloaded: layers whose routed experts are arguments in host memory; see
        `dsv41_jax.expert_offload`.
    """

    config: ModelConfig
    layers: range
    partition: Partition = WHOLE
    implementation: Implementation = "xla"
    embedding: EmbeddingPlacement = "device"
    offloaded: tuple[int, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether the stage embeds tokens."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage computes logits."""
        return self.layers.stop == self.config.num_hidden_layers

    def block(self, layer: int) -> Block:
        """The module of one layer."""
        return Block(
            self.config, layer_spec(self.config, layer), self.partition, self.implementation
        )

    def __call__(
        self,
        params: Params,
        state: StageState,
        batch: TokenBatch,
        stream: Stream | None = None,
        shared: SharedState = NOTHING_SHARED,
    ) -> StageResult:
        """Runs the stage on one batch.

        The last KV source's layer, once its compressed rows are written, and all layers after
        it run on the batch's late rows alone. Those are all rows, unless the batch asks for
        bounded replay.

        Args:
          params: `layers_{i}`, and `embed` on a first stage that has it, `norm` and `head` on
            the last.
          state: caches of the stage's layers.
          batch: the step.
          stream: result of the stage before; None on the first.
          shared: publications relayed from stages before.

        Raises:
          SharingError: a layer reads something nobody published to this stage; names the
            source, the layer and the stage's range.
        """
        stream = self.embed(params, batch) if self.is_first else stream
        last_source = max(self.config.kv_source_layer_ids, default=self.layers.stop)
        if self.layers.start > last_source:
            batch = batch.late()
        main_hidden, traces = [], []
        following, stream = self._layer_params(params, self.layers.start, stream)
        for layer in self.layers:
            block, layer_params = self.block(layer), following
            if layer + 1 in self.layers:
                following, stream = self._layer_params(params, layer + 1, stream)
            with jax.named_scope(f"layer_{layer}"):
                written, state, shared, cached = write_block(
                    block, layer_params, stream, batch, state, shared
                )
                if block.spec.draft_target:
                    main_hidden.append(self._mean_copies(written.x, batch))
                if layer == last_source:
                    rows = jnp.maximum(batch.late_rows, 0)
                    written = jax.tree.map(lambda a, rows=rows: a[rows], written)
                    batch, shared = batch.late(), shared.take_rows(rows)
                stream, shared, trace = self._read_block(
                    block, layer_params, written, batch, state, shared
                )
            traces.append(dataclasses.replace(trace, **cached))
        head = self.head(params, stream, batch) if self.is_last else None
        return StageResult(stream, state, shared, head, tuple(main_hidden), tuple(traces))

    def _layer_params(self, params: Params, layer: int, stream: Stream) -> tuple[Any, Stream]:
        """Parameters of a layer, on the device or on their way there once the stream is."""
        layer_params = params[f"layers_{layer}"]
        if layer not in self.offloaded:
            return layer_params, stream
        return fetch_experts(layer_params, stream)

    def _read_block(self, block: Block, *arguments: Any) -> tuple[Stream, SharedState, LayerTrace]:
        try:
            return read_block(block, *arguments)
        except SharingError as error:
            first, last = self.layers[0], self.layers[-1]
            raise SharingError(f"stage of layers {first} to {last}: {error}") from None

    def embed(self, params: Params, batch: TokenBatch) -> Stream:
        """The stream of a batch's tokens: equal copies, collapsed by the first alone."""
        if self.embedding == "host":
            h = batch.embedding
        else:
            embedding = Embedding(self.config, self.partition)
            h = embedding.apply({"params": params["embed"]}, batch.token_ids)
        copies = self.config.hc_mult
        x = jnp.broadcast_to(h[:, None], (h.shape[0], copies, h.shape[1]))
        pre = jnp.zeros((h.shape[0], copies), jnp.float32).at[:, 0].set(1)
        return Stream(x, pre)

    def head(self, params: Params, stream: Stream, batch: TokenBatch) -> HeadResult:
        """Logits of the batch's logit rows."""
        config, how = self.config, self.implementation
        head = Head(config, self.partition, how)

        def project(rows: Stream) -> HeadResult:
            final_h, normed = hyper_connections.collapse_norm(
                rows.x,
                rows.pre,
                params["norm"]["weight"],
                eps=config.rms_norm_eps,
                implementation=how,
            )
            logits = head.apply({"params": params["head"]}, normed)
            return HeadResult(final_h, normed, logits)

        with jax.named_scope("head"):
            wanted = jnp.maximum(batch.logit_rows, 0)
            rows = jax.tree.map(lambda a: a[wanted], stream)
            return map_rows(project, rows, batch.num_logits, implementation=how)

    def init(self) -> Params:
        """Parameters of the right shapes, all zero; abstract them with `jax.eval_shape`."""
        config, key = self.config, jax.random.key(0)
        rows = ROW_TILE
        hidden = jnp.zeros((rows, config.hidden_size), jnp.bfloat16)
        params = {}
        if self.is_first and self.embedding == "device":
            embedding = Embedding(config, self.partition)
            params["embed"] = embedding.init(key, jnp.zeros((rows,), jnp.int32))["params"]
        for layer in self.layers:
            params[f"layers_{layer}"] = self.block(layer).init(key)["params"]
        if self.is_last:
            norm = RMSNorm(config.hidden_size, config.rms_norm_eps, self.implementation)
            head = Head(config, self.partition, self.implementation)
            params["norm"] = norm.init(key, hidden)["params"]
            params["head"] = head.init(key, hidden)["params"]
        return params

    def _mean_copies(self, x: jax.Array, batch: TokenBatch) -> jax.Array:
        def mean(rows: jax.Array) -> jax.Array:
            return jnp.mean(rows.astype(jnp.float32), axis=1).astype(jnp.bfloat16)

        return map_rows(mean, x, batch.num_tokens, implementation=self.implementation)

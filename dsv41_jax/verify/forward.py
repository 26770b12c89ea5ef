"""Runs one sequence through the model, with the recorded streams given or left to itself."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.batch import TokenBatch, page_size
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_table import EngramTables
from dsv41_jax.forward import COMPILER_OPTIONS
from dsv41_jax.host_batch import RequestRows, build_batch
from dsv41_jax.layers.block import LayerTrace, Stream
from dsv41_jax.model import HeadResult, Params, Stage, StageResult
from dsv41_jax.shared_state import SharedState
from dsv41_jax.state import StageState, init_state
from pallas_kernels.dispatch import Implementation
from pallas_kernels.packed_rows import PackedRows, unpack_index, unpack_kv, unpack_window

CHUNK = 64  # rows of the compiled program; longer prompts take several steps

Arrays = Mapping[str, np.ndarray]
Recorded = Callable[[str, int, str], np.ndarray | None]  # phase, layer, quantity


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Jitted with the roundings that the formulas show."""
    return jax.jit(fn, compiler_options=COMPILER_OPTIONS, **options)


@dataclasses.dataclass(frozen=True)
class Phase:
    """What a phase of a run computed, all rows of its steps together.

    Attributes:
      layers: by layer and quantity, [n, ...]; a layer lacks what it does not compute.
      head: final_h, final_normed and logits where the last layer ran, main_hidden where a
        draft target did.
    """

    layers: Mapping[int, Arrays]
    head: Arrays


@dataclasses.dataclass(frozen=True)
class Run:
    """One sequence: its prompt, its single steps, and the caches after each phase."""

    phases: Mapping[str, Phase]
    caches: Mapping[str, Mapping[int, Arrays]]


def _layer_arrays(trace: LayerTrace, stream: Stream) -> dict[str, jax.Array]:
    packed = {
        "window_kv": (trace.window, unpack_window),
        "compress_kv": (trace.kv, unpack_kv),
        "index_k": (trace.index_k, unpack_index),
    }
    found = {name: unpack(rows) for name, (rows, unpack) in packed.items() if rows is not None}
    plain = {
        "x_out": stream.x,
        "pre_out": stream.pre,
        "attn_in": trace.attn_in,
        "attn_out": trace.attn_out,
        "ffn_in": trace.ffn_in,
        "ffn_out": trace.ffn_out,
        "engram_out": trace.engram_out,
        "experts": trace.experts,
        "moe_weights": trace.expert_weights,
        "topk": trace.topk,
        "index_score": trace.index_score,
        "candidates": trace.candidates,
    }
    return found | {name: array for name, array in plain.items() if array is not None}


def _head_arrays(head: HeadResult | None, main_hidden: list[jax.Array]) -> dict[str, jax.Array]:
    arrays = {} if head is None else dict(vars(head))
    return arrays | ({"main_hidden": jnp.concatenate(main_hidden, -1)} if main_hidden else {})


def trace_layers(
    stage: Stage,
    params: Params,
    state: StageState,
    batch: TokenBatch,
    stream: Stream | None,
    shared: SharedState,
    recorded: tuple[Stream, ...],
    given: jax.Array,
) -> tuple[dict[int, dict[str, jax.Array]], dict[str, jax.Array], StageResult]:
    """Runs the layers of a stage one by one, each on the recorded stream where there is one.

    Args:
      stage: the layers.
      params, state, batch: as for `Stage`.
      stream: what enters the first layer if nothing is recorded; None if it is recorded.
      shared: publications of stages before.
      recorded: input of every layer.
      given: bool[layers], which of them count.

    Returns:
      What each layer computed, the head's arrays, and the result of the whole stage.
    """
    arrays, main_hidden, traces = {}, [], []
    result: StageResult | None = None
    for index, layer in enumerate(stage.layers):
        if stream is None:
            stream = recorded[index] if layer else None
        else:
            stream = jax.tree.map(
                lambda own, other, i=index: jnp.where(given[i], other, own),
                stream,
                recorded[index],
            )
        single = dataclasses.replace(stage, layers=range(layer, layer + 1))
        result = single(params, state, batch, stream, shared)
        stream, state, shared = result.stream, result.state, result.shared
        main_hidden += result.main_hidden
        traces += result.traces
        arrays[layer] = _layer_arrays(result.traces[0], stream)
    whole = dataclasses.replace(result, main_hidden=tuple(main_hidden), traces=tuple(traces))
    return arrays, _head_arrays(result.head, main_hidden), whole


class Forward:
    """Layers of a model, one stage each, as one program for all sequences and steps.

    A layer's input is the recorded stream where one is given, else the layer before it.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        engram: EngramTables | None,
        *,
        positions: int,
        implementation: Implementation,
        layers: range | None = None,
    ) -> None:
        """Prepares the program; it is compiled by the first step.

        Args:
          config: the model.
          params: its parameters.
          engram: host tables, or None if it has none.
          positions: longest sequence that will run.
          implementation: of the operations.
          layers: backbone layers to run, all if None; the streams that enter the first must
            be recorded unless it is layer 0, and the sources of all must be among them.
        """
        self.config = config
        self.layers = layers or range(config.num_hidden_layers)
        self._stage = Stage(config, self.layers, implementation=implementation)
        self._params = params
        self.engram = engram
        self._pages = -(-positions // page_size(config))
        self._step = compiled(self._trace_step, donate_argnums=1)

    def _trace_step(
        self,
        params: Params,
        state: StageState,
        batch: TokenBatch,
        recorded: tuple[Stream, ...],
        given: jax.Array,
    ) -> tuple[dict[int, dict[str, jax.Array]], dict[str, jax.Array], StageState]:
        layers, head, result = trace_layers(
            self._stage,
            params,
            state,
            batch,
            None,
            SharedState(),
            recorded,
            given,
        )
        return layers, head, result.state

    def _init_state(self) -> StageState:
        return init_state(
            self.config, self.layers, window_pages=self._pages, global_pages=self._pages, slots=1
        )

    def run(self, token_ids: np.ndarray, prefill_len: int, recorded: Recorded | None = None) -> Run:
        """Prefill of a prompt, then a step for each further token.

        Args:
          token_ids: int[n].
          prefill_len: how many of them are the prompt.
          recorded: looks up `x_out` and `pre_out` of a phase and layer, None where it was not
            recorded; without it the model runs freely.
        """
        state = self._init_state()
        steps = [
            ("prefill", first, min(first + CHUNK, prefill_len))
            for first in range(0, prefill_len, CHUNK)
        ]
        steps += [("decode", i, i + 1) for i in range(prefill_len, len(token_ids))]
        collected: dict[str, list[tuple]] = {"prefill": [], "decode": []}
        caches = {}
        for phase, first, last in steps:
            before = 0 if phase == "prefill" else prefill_len
            streams, given = self._given(recorded, phase, slice(first - before, last - before))
            batch = self._batch(token_ids, first, last)
            layers, head, state = self._step(self._params, state, batch, streams, given)
            rows = last - first
            collected[phase].append(
                jax.tree.map(lambda a, n=rows: np.asarray(a)[:n], (layers, head))
            )
            if recorded is not None and last in (prefill_len, len(token_ids)):
                caches["prefill" if last == prefill_len else "end"] = self._caches(state)
        if "prefill" in caches:
            caches.setdefault("end", caches["prefill"])
        phases = {}
        for phase, parts in collected.items():
            if parts:
                joined = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
                phases[phase] = Phase(*joined)
        return Run(phases, caches)

    def _batch(self, token_ids: np.ndarray, first: int, last: int) -> TokenBatch:
        look_back = self.config.engram.max_ngram_size - 1 if self.config.engram else 0
        history = np.full(look_back, -1, np.int64)
        known = token_ids[max(0, first - look_back) : first]
        history[look_back - len(known) :] = known
        rows = RequestRows(
            token_ids=token_ids[first:last],
            start=first,
            history=history,
            window_pages=range(self._pages),
            global_pages=range(self._pages),
            slot=0,
            logits=last - first,
        )
        return build_batch(
            self.config,
            [rows],
            tokens=CHUNK,
            requests=1,
            columns=self._pages,
            logit_rows=CHUNK,
            engram=self.engram,
        )

    def _given(
        self, recorded: Recorded | None, phase: str, rows: slice
    ) -> tuple[tuple[Stream, ...], np.ndarray]:
        """Inputs of the layers, zero where there is none, and which of them count."""
        config = self.config
        copies, hidden = config.hc_mult, config.hidden_size
        streams, given = [], np.zeros(len(self.layers), bool)
        for index, layer in enumerate(self.layers):
            x = np.zeros((CHUNK, copies, hidden), np.float32)
            pre = np.zeros((CHUNK, copies), np.float32)
            if recorded is not None and layer > 0:
                found = [recorded(phase, layer - 1, name) for name in ("x_out", "pre_out")]
                if all(array is not None for array in found):
                    given[index] = True
                    x[: rows.stop - rows.start], pre[: rows.stop - rows.start] = (
                        array[rows] for array in found
                    )
            streams.append(Stream(jnp.asarray(x).astype(jnp.bfloat16), jnp.asarray(pre)))
        return tuple(streams), given

    def _caches(self, state: StageState) -> dict[int, Arrays]:
        """Caches by layer, unpacked; row p of a cache is position (or compressed row) p."""

        def unpacked(rows: PackedRows, unpack: Callable[[PackedRows], jax.Array]) -> np.ndarray:
            return np.asarray(compiled(unpack)(rows))

        caches = {}
        for layer in self.layers:
            arrays = {"window_kv_cache": unpacked(state.window[layer], unpack_window)}
            if layer in state.kv:
                arrays["compress_kv_cache"] = unpacked(state.kv[layer], unpack_kv)
                arrays["k_cache"] = unpacked(state.index_k[layer], unpack_index)
            if layer in state.open_group:
                arrays["kv_state"] = np.asarray(state.open_group[layer].kv[0])
                arrays["score_state"] = np.asarray(state.open_group[layer].score[0])
            caches[layer] = arrays
        return caches

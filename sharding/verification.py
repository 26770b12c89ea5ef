"""The runs that the vectors are compared with, through the stages of a pipeline."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from dsv41_jax.batch import TokenBatch
from dsv41_jax.engram_table import EngramTables
from dsv41_jax.forward import COMPILER_OPTIONS
from dsv41_jax.inference import Model, columns_for, request_rows, score
from dsv41_jax.layers.block import Stream
from dsv41_jax.model import Params
from dsv41_jax.shared_state import SharedState
from dsv41_jax.state import StageState
from dsv41_jax.verify.forward import CHUNK, Arrays, Forward, Phase, Run, trace_layers
from dsv41_jax.verify.logits import RUN_CASES
from dsv41_jax.verify.measure import Measure, compare_logits, judge, keeps
from dsv41_jax.verify.tolerances import RUN, at_least, at_most
from sharding.microbatch import microbatch_tokens
from sharding.pipeline import Pipeline, States
from sharding.relay import Bundle, receive, send
from sharding.stage_runner import Bucket, StageRunner, StageStep

# Stages change no operation, so a pipeline differs from one program by the compiler's choices
# alone; partial sums over devices lose roundings, which the model amplifies.
_SAME_PROGRAM = (at_least("equal", 0.95), at_most("mean_rel", 1e-3))
_OTHER_SUMS = (at_most("median_rel", 0.15),)


class PipelineRun:
    """Whole runs through `Pipeline.step`, with its microbatches; logits only.

    Attributes:
      config: the model.
    """

    def __init__(self, pipeline: Pipeline, *, positions: int) -> None:
        """
        Args:
          pipeline: loaded stages.
          positions: longest sequence that will run.
        """
        self.config = pipeline.config
        self._pipeline = pipeline
        self._pages = columns_for(self.config, positions)
        tokens = microbatch_tokens(CHUNK, pipeline.microbatches)
        self._bucket = Bucket(tokens=tokens, requests=1, columns=self._pages, logit_rows=tokens)

    def run(self, token_ids: np.ndarray, prefill_len: int) -> Run:
        """Prefill of a prompt, then a step for each further token; see `Forward.run`."""
        states = self._pipeline.init_state(
            window_pages=self._pages, global_pages=self._pages, slots=1
        )
        bounds = [*range(0, prefill_len, CHUNK), *range(prefill_len, len(token_ids) + 1)]
        logits: dict[str, list[np.ndarray]] = {}
        for start, stop in zip(bounds, bounds[1:], strict=False):
            rows = request_rows(self.config, token_ids.tolist(), start, stop, CHUNK)
            pages = range(self._pages)
            rows = dataclasses.replace(
                rows, logits=stop - start, window_pages=pages, global_pages=pages
            )
            results, states = self._pipeline.step(states, [rows], self._bucket, None)
            logits.setdefault("prefill" if start < prefill_len else "decode", []).extend(
                np.asarray(result.value)[: result.num_logits] for result in results
            )
        phases = {
            phase: Phase({}, {"logits": np.concatenate(parts)}) for phase, parts in logits.items()
        }
        return Run(phases, {})


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A stage's step that also returns what every layer computed, on recorded streams."""

    step: StageStep

    def __call__(
        self,
        params: Params,
        state: StageState,
        batch: TokenBatch,
        received: Bundle | None,
        recorded: tuple[Stream, ...],
        given: jax.Array,
    ) -> tuple[dict[int, Arrays], Arrays, Bundle | None, StageState]:
        """Layers' and head's arrays, what goes to the next stage, and the caches."""
        step, stream, shared = self.step, None, SharedState()
        if received is not None:
            stream = received.stream
            replicas = step.contents.replicas
            state, shared = receive(step.stage.config, replicas, received, batch, state)
        layers, head, result = trace_layers(
            step.stage, params, state, batch, stream, shared, recorded, given
        )
        bundle = None
        if step.boundary is not None:
            bundle = send(step.stage, step.boundary.relay, result, received)
        return layers, head, bundle, result.state


class PipelineForward(Forward):
    """`Forward` over the stages of a pipeline: each stage a program on its own mesh."""

    def __init__(self, pipeline: Pipeline, engram: EngramTables | None, *, positions: int) -> None:
        """
        Args:
          pipeline: loaded stages.
          engram: host tables of all layers, or None if the model has none.
          positions: longest sequence that will run.
        """
        self.config = pipeline.config
        self.layers = range(self.config.num_hidden_layers)
        self.engram = engram
        self._params = None
        self._pages = columns_for(self.config, positions)
        self._pipeline = pipeline
        self._programs = [_traced_program(stage) for stage in pipeline.stages]

    def _init_state(self) -> States:
        return self._pipeline.init_state(
            window_pages=self._pages, global_pages=self._pages, slots=1
        )

    def _step(
        self,
        params: None,
        states: States,
        batch: TokenBatch,
        recorded: tuple[Stream, ...],
        given: np.ndarray,
    ) -> tuple[dict[int, Arrays], Arrays, States]:
        layers, heads, carried, current = {}, [], None, []
        for stage, program, state in zip(
            self._pipeline.stages, self._programs, states, strict=True
        ):
            own = stage.step.stage.layers
            engram = {k: v for k, v in batch.engram.items() if k in own}
            part = dataclasses.replace(batch, engram=engram)
            inputs = (part, carried, recorded[own.start : own.stop], given[own.start : own.stop])
            found, head, carried, state = program(stage.params, state, *stage.place(inputs))
            layers |= found
            heads.append(head)
            current.append(state)
        return layers, _merged(heads), tuple(current)

    def _caches(self, states: States) -> dict[int, Arrays]:
        merged: dict[str, dict[int, Any]] = {}
        for stage, state in zip(self._pipeline.stages, states, strict=True):
            for field, caches in vars(state).items():
                own = {k: v for k, v in caches.items() if k in stage.step.stage.layers}
                merged[field] = merged.get(field, {}) | own
        return super()._caches(StageState(**merged))


def _merged(heads: list[dict[str, jax.Array]]) -> Arrays:
    """The last stage's arrays; the draft's inputs come from every stage."""
    hidden = [np.asarray(head["main_hidden"]) for head in heads if "main_hidden" in head]
    return heads[-1] | ({"main_hidden": np.concatenate(hidden, -1)} if hidden else {})


def _traced_program(stage: StageRunner) -> jax.stages.Wrapped:
    everywhere = PartitionSpec()
    sharded = jax.shard_map(
        TracedStep(stage.step),
        mesh=stage.mesh,
        in_specs=(jax.tree.map(lambda a: a.sharding.spec, stage.params), *[everywhere] * 5),
        out_specs=everywhere,
        check_vma=False,
    )
    return jax.jit(sharded, donate_argnums=1, compiler_options=COMPILER_OPTIONS)


def check_against_one_device(
    pipeline: Pipeline, model: Model, token_ids: np.ndarray
) -> Iterator[Measure]:
    """Logits of a prompt by the pipeline and by one program on one device."""
    got = PipelineRun(pipeline, positions=len(token_ids)).run(token_ids, len(token_ids))
    want = score(model, token_ids.tolist(), CHUNK)
    rows = compare_logits("logits", got.phases["prefill"].head["logits"], want)
    alone = pipeline.stages[0].mesh.size == 1
    limits = _SAME_PROGRAM if alone else _OTHER_SUMS
    yield from judge("single", "prefill", "logits", {None: rows}, limits)


def without_exact_rows(measure: Measure) -> Measure:
    """What is judged of whole runs where channels are split over devices.

    Each partial sum loses a rounding, and the model amplifies it from the first token on: no row
    stays exact, and a near tie may fall the other way. So figures that count exact rows or equal
    arg max are shown and not judged; the median of long runs keeps its limit, and greedy judges
    the arg max where its margin is clear. The layer tier is what tells right from wrong.
    """
    if measure.quantity != "logits" or measure.case not in ("multi", *RUN_CASES):
        return measure
    limits = ()
    if measure.case != "multi":
        run = RUN["decode" if measure.phase != "prefill" else "prefill"]
        limits = tuple(limit for limit in run if limit[0] == "median_rel")
    ok = all(keeps(measure.figures, limit) for limit in limits)
    return dataclasses.replace(measure, limits=limits, ok=ok)

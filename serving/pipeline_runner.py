"""Steps of a model that is spread over pipeline stages."""

import concurrent.futures
import dataclasses
from collections.abc import Sequence

import jax

from dsv41_jax.engram_ahead import EngramAhead
from dsv41_jax.engram_table import EngramTables
from dsv41_jax.host_batch import RequestRows, lookup_of
from dsv41_jax.sampling import Sampled, SamplingBatch
from serving.batch_builder import empty_sampling
from serving.runner import LOOKUP_THREAD
from sharding.cache_sizes import CacheSizes
from sharding.limits import EngineLimits
from sharding.microbatch import cut_rows, join_sampled, microbatch_tokens
from sharding.pipeline import MicrobatchResult, Pipeline
from sharding.stage_runner import Bucket, StageRunner


@dataclasses.dataclass(frozen=True)
class PipelineStep:
    """A dispatched step; `parts` are its microbatches in order."""

    parts: tuple[MicrobatchResult, ...]
    logit_rows: int

    def result(self) -> Sampled:
        """Waits for the step; numpy arrays."""
        sampled = [jax.device_get(part.value) for part in self.parts]
        return join_sampled(sampled, [part.num_logits for part in self.parts], self.logit_rows)


class PipelineRunner:
    """Runs the stages of a pipeline; see `serving.engine.StepRunner` for the attributes.

    A step that fits a microbatch is one: stages overlap across the steps an engine has in
    flight, and a step's tokens do not wait for another step. A larger one is cut.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        limits: EngineLimits,
        cache_sizes: CacheSizes,
        token_buckets: tuple[int, ...],
    ) -> None:
        """
        Args:
          pipeline: loaded stages.
          limits: sizes of a step.
          cache_sizes: pages and slots to allocate, on every stage for its own layers.
          token_buckets: T of whole steps, ascending; the last holds max_num_batched_tokens.
        """
        config = pipeline.config
        self.limits = limits
        self.cache_sizes = cache_sizes
        self.vocab_size = config.vocab_size
        self.eos_token_id = config.eos_token_id
        self.look_back = config.engram.max_ngram_size - 1 if config.engram else 0
        self._pool = concurrent.futures.ThreadPoolExecutor(1, LOOKUP_THREAD)
        stages = [self._looking_ahead(stage) for stage in pipeline.stages]
        self._pipeline = dataclasses.replace(pipeline, stages=tuple(stages))
        self._ahead = [s.engram for s in stages if isinstance(s.engram, EngramAhead)]
        self.looks_ahead = bool(self._ahead)
        self._states = pipeline.init_state(**dataclasses.asdict(cache_sizes))
        tokens = {microbatch_tokens(tokens, pipeline.microbatches) for tokens in token_buckets}
        self._buckets = [
            Bucket(
                tokens=size,
                requests=limits.max_num_seqs,
                columns=limits.columns,
                logit_rows=min(size, limits.logit_rows),
            )
            for size in sorted(tokens)
        ]

    def compile_all(self) -> None:
        """Runs a step without tokens in every bucket; `submit` never compiles."""
        sampling = empty_sampling(self.limits, self.vocab_size)
        for bucket in self._buckets:
            results, self._states = self._pipeline.step(self._states, (), bucket, sampling)
            jax.block_until_ready(results[-1].value)

    def expect(self, rows: Sequence[RequestRows]) -> None:
        """Begins to look up what the next step will probably need; see `EngramAhead`."""
        if not self.looks_ahead:
            return
        steps = []
        if rows:
            bucket, parts = self._bucket(rows)
            steps = [lookup_of(part, bucket.tokens) for part in cut_rows(rows, parts)]
        for ahead in self._ahead:
            ahead.expect(steps)

    def close(self) -> None:
        """Ends the thread of the lookups; later steps wait for their own."""
        self.looks_ahead = False
        self._pool.shutdown(cancel_futures=True)

    def submit(self, rows: Sequence[RequestRows], sampling: SamplingBatch) -> PipelineStep:
        """Dispatches one step and starts to copy its small results to the host.

        Args:
          rows: the requests' shares; together they fit `limits`.
          sampling: of L logit rows, in the order of `rows`.

        Raises:
          ValueError: the rows do not fit the largest bucket.
        """
        bucket, parts = self._bucket(rows)
        pipeline = dataclasses.replace(self._pipeline, microbatches=parts)
        results, self._states = pipeline.step(self._states, rows, bucket, sampling)
        for leaf in jax.tree.leaves([part.value for part in results]):
            leaf.copy_to_host_async()
        return PipelineStep(tuple(results), self.limits.logit_rows)

    def _bucket(self, rows: Sequence[RequestRows]) -> tuple[Bucket, int]:
        """Sizes of a microbatch, and how many the step is cut into."""
        total = sum(len(row.token_ids) for row in rows)
        bucket = next((b for b in self._buckets if total <= b.tokens), self._buckets[-1])
        return bucket, max(1, -(-total // bucket.tokens))

    def _looking_ahead(self, stage: StageRunner) -> StageRunner:
        if not isinstance(stage.engram, EngramTables):
            return stage
        return stage.with_engram(EngramAhead(stage.engram, self._pool))

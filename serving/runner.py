"""One device's steps: parameters, caches, and one compiled program per bucket."""

import concurrent.futures
import dataclasses
from collections.abc import Sequence

import jax

from dsv41_jax.batch import TokenBatch
from dsv41_jax.config import ModelConfig
from dsv41_jax.embedding_table import EmbeddingTable
from dsv41_jax.engram_ahead import EngramAhead
from dsv41_jax.engram_table import EngramRows, EngramTables
from dsv41_jax.forward import forward_and_sample
from dsv41_jax.host_batch import RequestRows, build_batch, lookup_of
from dsv41_jax.model import Params, Stage
from dsv41_jax.sampling import Sampled, SamplingBatch
from dsv41_jax.state import init_state
from pallas_kernels.dispatch import resolve
from serving.batch_builder import empty_sampling
from sharding.cache_sizes import CacheSizes
from sharding.limits import EngineLimits, round_up

LOOKUP_THREAD = "engram lookup"  # name of the thread


def token_buckets(limits: EngineLimits, platform: str) -> tuple[int, ...]:
    """T of the programs to compile for a platform, as JAX names it.

    On CPU the time of a step follows its real rows, so one program serves all steps; elsewhere
    it follows T, and steps of decode rows alone get a program of their own.
    """
    largest = round_up(limits.max_num_batched_tokens)
    if platform == "cpu":
        return (largest,)
    return tuple(sorted({round_up(limits.max_num_seqs), largest}))


@dataclasses.dataclass(frozen=True)
class DeviceStep:
    """A dispatched step; `sampled` is still being computed."""

    sampled: Sampled

    def result(self) -> Sampled:
        """Waits for the step; numpy arrays."""
        return jax.device_get(self.sampled)


class Runner:
    """Runs the whole model on one device.

    The step and the choice of its tokens are one program; the state is donated to it, so steps
    run in the order they are submitted and the caches exist once.

    Attributes:
      limits: what the compiled shapes hold.
      cache_sizes: pages and slots of the state.
      vocab_size, eos_token_id, look_back, looks_ahead: see `serving.engine.StepRunner`.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        engram: EngramRows | None,
        *,
        embedding: EmbeddingTable | None = None,
        limits: EngineLimits,
        cache_sizes: CacheSizes,
        token_buckets: tuple[int, ...],
    ) -> None:
        """
        Args:
          config: the model.
          params: its parameters, on the device.
          engram: its Engram tables, or None where it has none.
          embedding: its embedding, where that is on the host.
          limits: sizes of a step.
          cache_sizes: pages and slots to allocate.
          token_buckets: T of each program, ascending; the last holds max_num_batched_tokens.
        """
        self.limits = limits
        self.cache_sizes = cache_sizes
        self.vocab_size = config.vocab_size
        self.eos_token_id = config.eos_token_id
        self.look_back = config.engram.max_ngram_size - 1 if config.engram else 0
        self._token_buckets = token_buckets
        self._config = config
        self._params = params
        self._pool = concurrent.futures.ThreadPoolExecutor(1, LOOKUP_THREAD)
        self._engram, self._embedding = engram, embedding
        self._ahead: EngramAhead | None = None
        if isinstance(engram, EngramTables):
            self._engram = self._ahead = EngramAhead(engram, self._pool)
        self.looks_ahead = self._ahead is not None
        layers = range(config.num_hidden_layers)
        self._state = init_state(
            config,
            layers,
            window_pages=cache_sizes.window_pages,
            global_pages=cache_sizes.global_pages,
            slots=cache_sizes.slots,
        )
        self._stage = Stage(
            config,
            layers,
            implementation=resolve(None),
            embedding="device" if embedding is None else "host",
        )
        self._programs: dict[int, jax.stages.Compiled] = {}

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far."""
        return len(self._programs)

    def compile_all(self) -> None:
        """Compiles every bucket; `submit` never compiles."""
        sampling = empty_sampling(self.limits, self.vocab_size)
        for tokens in self._token_buckets:
            batch = self._batch((), tokens)
            lowered = forward_and_sample.lower(
                self._stage, self._params, self._state, batch, sampling
            )
            self._programs[tokens] = lowered.compile()

    def expect(self, rows: Sequence[RequestRows]) -> None:
        """Begins to look up what the next step will probably need; see `EngramAhead`."""
        if self.looks_ahead:
            self._ahead.expect([lookup_of(rows, self._bucket(rows))] if rows else [])

    def close(self) -> None:
        """Ends the thread of the lookups; later steps wait for their own."""
        self.looks_ahead = False
        self._pool.shutdown(cancel_futures=True)

    def submit(self, rows: Sequence[RequestRows], sampling: SamplingBatch) -> DeviceStep:
        """Dispatches one step and starts to copy its small results to the host.

        Args:
          rows: the requests' shares; together they fit `limits`.
          sampling: of L logit rows, in the order of `rows`.

        Raises:
          ValueError: the rows do not fit the largest bucket.
        """
        tokens = self._bucket(rows)
        batch = self._batch(rows, tokens)
        sampled, self._state = self._programs[tokens](self._params, self._state, batch, sampling)
        for leaf in jax.tree.leaves(sampled):
            leaf.copy_to_host_async()
        return DeviceStep(sampled)

    def _bucket(self, rows: Sequence[RequestRows]) -> int:
        total = sum(len(row.token_ids) for row in rows)
        buckets = self._token_buckets
        return next((bucket for bucket in buckets if total <= bucket), buckets[-1])

    def _batch(self, rows: Sequence[RequestRows], tokens: int) -> TokenBatch:
        return build_batch(
            self._config,
            rows,
            tokens=tokens,
            requests=self.limits.max_num_seqs,
            columns=self.limits.columns,
            logit_rows=self.limits.logit_rows,
            engram=self._engram,
            embedding=self._embedding,
        )

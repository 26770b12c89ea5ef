"""The engine: requests in, outputs out, one step at a time; host logic around a runner."""

import dataclasses
import os
from collections import Counter, deque
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from types import MappingProxyType
from typing import Protocol

import jax

from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_table import EngramRows
from dsv41_jax.host_batch import RequestRows
from dsv41_jax.model import Params
from dsv41_jax.sampling import Sampled, SamplingBatch
from serving.batch_builder import request_rows, sampling_batch, upcoming_rows
from serving.cache_groups import CacheGroups
from serving.detokenizer import TextStream, Vocabulary
from serving.grammar import GrammarCompiler
from serving.logit_rules import LogitRules, empty_changes
from serving.request import FinishReason, Request, RequestError, RequestOutput, TokenLogprob
from serving.runner import Runner, token_buckets
from serving.scheduler import Scheduler, StepPlan
from serving.sequence import Finish, Sequence
from sharding.cache_sizes import CacheSizes, cache_bytes, plan_cache
from sharding.limits import EngineLimits, engine_limits

_MAX_IN_FLIGHT = 2  # steps: one runs, one waits for it


class StepHandle(Protocol):
    """A step that was dispatched."""

    def result(self) -> Sampled:
        """Waits for the step; numpy arrays, logit rows in the order they were asked for."""
        ...


class StepRunner(Protocol):
    """Computes steps in the order they are submitted.

    Attributes:
      limits: what its compiled shapes hold.
      cache_sizes: the pages and slots it allocated.
      vocab_size: token ids are below it.
      eos_token_id: ends a request.
      look_back: ids before a request's first row that it needs.
      looks_ahead: whether `expect` begins anything.
    """

    limits: EngineLimits
    cache_sizes: CacheSizes
    vocab_size: int
    eos_token_id: int
    look_back: int
    looks_ahead: bool

    def expect(self, rows: Rows[RequestRows]) -> None:
        """Says what the next step will probably hold, to be looked up meanwhile.

        Token ids may be `UNKNOWN`, pages, slots and logits may be missing, and the step may turn
        out otherwise.
        """
        ...

    def close(self) -> None:
        """Ends what runs beside the steps."""
        ...

    def submit(self, rows: Rows[RequestRows], sampling: SamplingBatch) -> StepHandle:
        """Dispatches one step without waiting for it."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Counts for /metrics.

    Attributes:
      num_running, num_waiting: requests now.
      kv_cache_usage: share of the scarcer page group in use, in [0, 1].
      num_prompt_tokens, num_generation_tokens: since the start.
      num_preemptions, num_steps: since the start.
      prefix_cache_queries: prompt tokens looked for in the prefix cache since the start.
      prefix_cache_hits: those found.
      num_finished: requests since the start, by finish reason.
      step_tokens: steps since the start, by the number of tokens they computed.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_prompt_tokens: int
    num_generation_tokens: int
    num_preemptions: int
    num_steps: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_finished: Mapping[FinishReason, int]
    step_tokens: Mapping[int, int]


@dataclasses.dataclass(frozen=True)
class _NewToken:
    """What a finished step says about one sequence; `token` is None with max_tokens 0."""

    sequence: Sequence
    token: int | None
    logprob: TokenLogprob | None


class Engine:
    """Serves requests over one runner; not thread-safe.

    A step's tokens are known before the next step is scheduled, and their text is made while
    the next step runs. Behind a step that samples nothing, as inside a long prompt, the next is
    prepared and dispatched at once. Over a pipeline the running requests take turns: those of
    one step wait for its tokens alone, while others' steps are on other stages.
    """

    def __init__(
        self,
        runner: StepRunner,
        vocabulary: Vocabulary,
        *,
        prefix_cache: bool = True,
        prefix_replay: bool = False,
        decoder_replay: bool = False,
        microbatches: int = 1,
    ) -> None:
        """
        Args:
          runner: computes the steps.
          vocabulary: the tokenizer's bytes.
          prefix_cache: whether requests reuse the cache pages of equal beginnings; results are
            the same bit for bit.
          prefix_replay: whether they are reused even where the window is gone, an
            approximation (see `serving.cache_groups`).
          decoder_replay: whether layers from the last KV source on compute a prompt's last
            window alone: faster, and an approximation (see `dsv41_jax.inference`). Requests
            that want log-probabilities of their prompt are exact.
          microbatches: steps in flight that the running requests are spread over.
        """
        self.limits = runner.limits
        self._runner = runner
        self._vocabulary = vocabulary
        self._cache = CacheGroups(runner.limits, runner.cache_sizes, prefix_replay=prefix_replay)
        self._grammars = GrammarCompiler(
            vocabulary, vocab_size=runner.vocab_size, eos_token_id=runner.eos_token_id
        )
        # On the device: most steps change nothing, and then nothing is sent.
        self._no_changes = jax.device_put(empty_changes(runner.limits, runner.vocab_size))
        self._scheduler = Scheduler(
            runner.limits,
            self._cache,
            look_back=runner.look_back,
            reuses_pages=prefix_cache,
            decoder_replay=decoder_replay,
            microbatches=microbatches,
        )
        self._microbatches = microbatches
        self._in_flight: deque[tuple[StepPlan, StepHandle]] = deque()
        self._sequences: dict[str, Sequence] = {}
        self._texts: dict[int, TextStream] = {}
        self._prompt_tokens = self._generation_tokens = self._preemptions = self._steps = 0
        self._finished: Counter[FinishReason] = Counter()
        self._step_tokens: Counter[int] = Counter()

    @property
    def has_work(self) -> bool:
        """Whether another step is needed."""
        return bool(self._in_flight) or self._scheduler.has_unfinished

    def check(self, request: Request) -> None:
        """Checks that the request can be served at all; needs no lock.

        Raises:
          RequestError: it never can; the message says why.
        """
        prompt, limit = request.prompt_token_ids, self.limits.max_model_len
        vocab_size = self._runner.vocab_size
        if not prompt:
            raise RequestError(
                "the prompt is empty; it must have at least one token", param="prompt"
            )
        if len(prompt) + 1 > limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. However, the prompt has "
                f"{len(prompt)} tokens and at least one more is generated; shorten the prompt",
                param="prompt",
            )
        for name, ids in (("prompt", prompt), *request.sampling.token_lists()):
            for token in (min(ids, default=0), max(ids, default=0)):
                if not 0 <= token < vocab_size:
                    raise RequestError(
                        f"{name} has token id {token}; ids of this model are 0 to {vocab_size - 1}",
                        param=name,
                    )
        if request.sampling.grammar is not None:
            self._grammars.compile(request.sampling.grammar)

    def add_request(self, request: Request) -> None:
        """Queues a request.

        Raises:
          RequestError: it can never be served, or its id is in use.
        """
        self.check(request)
        if request.request_id in self._sequences:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        sampling = request.sampling
        seed = int.from_bytes(os.urandom(4)) if sampling.seed is None else sampling.seed % 2**32
        sequence = self._scheduler.add(request, seed, self._rules(request))
        self._sequences[request.request_id] = sequence
        self._texts[sequence.number] = TextStream(
            self._vocabulary,
            skip_special_tokens=sampling.skip_special_tokens,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )

    def _rules(self, request: Request) -> LogitRules | None:
        sampling = request.sampling
        if not sampling.changes_logits:
            return None
        grammar = sampling.grammar
        return LogitRules(
            sampling,
            request.prompt_token_ids,
            vocab_size=self._runner.vocab_size,
            eos_token_id=self._runner.eos_token_id,
            grammar=None if grammar is None else self._grammars.compile(grammar),
        )

    def abort(self, request_id: str) -> None:
        """Drops a request and frees what it holds; an unknown or finished one is ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._scheduler.finish(sequence, Finish("abort"))
            self._forget(sequence)

    def close(self) -> None:
        """Ends the threads of the runner; the engine is not needed any more."""
        self._runner.close()

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes; running requests keep their pages and are not disturbed."""
        self._cache.forget_all()

    def step(self) -> list[RequestOutput]:
        """Collects what the next step needs, dispatches it, and returns the collected tokens."""
        tokens = []
        for _ in range(self._num_to_collect()):
            tokens += self._collect(*self._in_flight.popleft())
        plan = self._scheduler.schedule()
        self._preemptions += len(plan.preempted)
        if plan.rows:
            self._steps += 1
            self._step_tokens[sum(len(rows.token_ids) for rows in plan.rows)] += 1
            self._in_flight.append((plan, self._submit(plan)))
            self._expect_next()
        elif self._in_flight:
            tokens += self._collect(*self._in_flight.popleft())
        return [self._output(new) for new in tokens]

    def _num_to_collect(self) -> int:
        """Steps in flight that come before the next: there are enough, or it needs their tokens."""
        count = len(self._in_flight)
        if self._microbatches == 1:
            sampling = [any(rows.samples for rows in plan.rows) for plan, _ in self._in_flight]
            if any(sampling):
                return count - sampling[::-1].index(True)
        return max(0, count + 1 - max(_MAX_IN_FLIGHT, self._microbatches))

    def _expect_next(self) -> None:
        """Tells the runner what the next step will probably hold, before any step is waited for."""
        if not self._runner.looks_ahead:
            return
        arriving = set()
        for plan, _ in list(self._in_flight)[: self._num_to_collect()]:
            arriving.update(rows.number for rows in plan.rows if rows.samples)
        self._runner.expect(upcoming_rows(self._scheduler.upcoming(arriving)))

    def stats(self) -> EngineStats:
        """A snapshot; safe to take from another thread."""
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            kv_cache_usage=self._cache.usage,
            num_prompt_tokens=self._prompt_tokens,
            num_generation_tokens=self._generation_tokens,
            num_preemptions=self._preemptions,
            num_steps=self._steps,
            prefix_cache_queries=self._scheduler.num_queried_tokens,
            prefix_cache_hits=self._scheduler.num_hit_tokens,
            num_finished=MappingProxyType(dict(self._finished)),
            step_tokens=MappingProxyType(dict(self._step_tokens)),
        )

    def _submit(self, plan: StepPlan) -> StepHandle:
        rows = request_rows(plan)
        self._runner.expect(rows)
        sampling = sampling_batch(
            plan,
            self._scheduler.find,
            limits=self.limits,
            vocab_size=self._runner.vocab_size,
            no_changes=self._no_changes,
        )
        return self._runner.submit(rows, sampling)

    def _collect(self, plan: StepPlan, handle: StepHandle) -> list[_NewToken]:
        """Hands a step's tokens to their sequences; rows of ended requests are dropped."""
        sampled = _Table(handle.result())
        tokens = []
        end = 0
        for rows in plan.rows:
            first, end = end, end + rows.logits
            sequence = self._scheduler.find(rows.number)
            if sequence is None:
                continue
            sampling = sequence.request.sampling
            for row in range(first, end - rows.samples):
                sequence.prompt_logprobs.append(sampled.logprob(row, sampling.prompt_logprobs))
            if rows.samples:
                tokens.append(self._append(sequence, sampled, end - 1))
        return tokens

    def _append(self, sequence: Sequence, sampled: "_Table", row: int) -> _NewToken:
        sampling = sequence.request.sampling
        if not sequence.num_generated:
            self._prompt_tokens += sequence.num_prompt
        sequence.append(sampled.tokens[row], self._runner.eos_token_id)
        if sequence.finish is not None:
            self._scheduler.finish(sequence, sequence.finish)
        if not sampling.max_tokens:
            return _NewToken(sequence, None, None)
        self._generation_tokens += 1
        logprob, watched = None, sampling.logprob_token_ids
        if sampling.logprobs is not None or watched:
            logprob = sampled.logprob(row, sampling.logprobs or 0, watched)
        return _NewToken(sequence, sampled.tokens[row], logprob)

    def _output(self, new: _NewToken) -> RequestOutput:
        """Text and end of one sequence's new token."""
        sequence = new.sequence
        text = "" if new.token is None else self._text(sequence, new.token)
        finish = sequence.finish
        if finish is not None:
            self._forget(sequence)
        first = sequence.num_generated <= 1
        asked = sequence.request.sampling.prompt_logprobs is not None
        return RequestOutput(
            request_id=sequence.request.request_id,
            token_ids=() if new.token is None else (new.token,),
            text=text,
            logprobs=None if new.logprob is None else (new.logprob,),
            prompt_logprobs=tuple(sequence.prompt_logprobs) if first and asked else None,
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop_reason if finish else None,
            num_cached_tokens=sequence.num_cached,
            begin_time=sequence.begin_time,
        )

    def _text(self, sequence: Sequence, token: int) -> str:
        """The text a token decides; a stop string in it ends the sequence."""
        stream = self._texts[sequence.number]
        ended_by_token = sequence.finish is not None and sequence.finish.reason == "stop"
        text, stop = "", None
        if not ended_by_token or sequence.request.sampling.include_stop_str_in_output:
            text, stop = stream.push(token)
        if stop is None and sequence.finish is not None:
            rest, stop = stream.finish()
            text += rest
        if stop is not None and not ended_by_token:
            if sequence.finish is None:
                self._scheduler.finish(sequence, Finish("stop", stop))
            sequence.finish = Finish("stop", stop)
        return text

    def _forget(self, sequence: Sequence) -> None:
        """Drops what the engine keeps of an ended sequence."""
        self._finished[sequence.finish.reason] += 1
        del self._texts[sequence.number]
        del self._sequences[sequence.request.request_id]


class _Table:
    """The sampler's rows as Python numbers."""

    def __init__(self, sampled: Sampled) -> None:
        self.tokens: list[int] = sampled.tokens.tolist()
        self._sampled = sampled

    def logprob(self, row: int, alternatives: int, watched: tuple[int, ...] = ()) -> TokenLogprob:
        sampled = self._sampled
        ids = sampled.top_ids[row, :alternatives].tolist()
        logprobs = sampled.top_logprobs[row, :alternatives].tolist()
        return TokenLogprob(
            token_id=self.tokens[row],
            logprob=float(sampled.logprobs[row]),
            rank=int(sampled.ranks[row]),
            top=tuple(zip(ids, logprobs, strict=True)),
            watched=tuple(
                zip(watched, sampled.watched_logprobs[row, : len(watched)].tolist(), strict=True)
            ),
        )


def build_engine(
    config: ModelConfig,
    params: Params,
    engram: EngramRows | None,
    vocabulary: Vocabulary,
    *,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    kv_cache_memory_bytes: int | None = None,
    prefix_cache: bool = True,
) -> Engine:
    """An engine over the whole model on one device, with every step shape compiled.

    Args:
      config: the model.
      params: its parameters, on the device.
      engram: its Engram tables, or None where it has none.
      vocabulary: the tokenizer's bytes (`serving.detokenizer.vocabulary`).
      max_model_len: most tokens of one request.
      max_num_seqs: most requests that run at once.
      max_num_batched_tokens: most tokens of one step.
      kv_cache_memory_bytes: for all caches; None lets every running request reach
        max_model_len.
      prefix_cache: see `Engine`.

    Raises:
      ConfigError: a size is out of range, or the memory does not hold one request.
    """
    limits = engine_limits(
        config,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    unit = cache_bytes(config, range(config.num_hidden_layers), limits.page_size)
    sizes = plan_cache(limits, unit, kv_cache_memory_bytes)
    runner = Runner(
        config,
        params,
        engram,
        limits=limits,
        cache_sizes=sizes,
        token_buckets=token_buckets(limits, jax.default_backend()),
    )
    runner.compile_all()
    return Engine(runner, vocabulary, prefix_cache=prefix_cache)

"""Prefill steps whose Engram rows are looked up ahead, against steps that look up their own."""

import contextlib
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from dsv41_jax.checkpoint import load_params
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_table import EngramTables
from dsv41_jax.host_batch import RequestRows
from dsv41_jax.inference import prompt_chunks
from serving.batch_builder import empty_sampling
from serving.runner import Runner
from sharding.cache_sizes import cache_bytes, plan_cache
from sharding.limits import engine_limits, round_up

CHUNKS = 6  # of a prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTiming:
    """Medians over all steps but a prompt's first, in milliseconds, and their ratios.

    Attributes:
      tokens: of a step.
      dispatch_waiting, dispatch_ahead: the host's time until a step is dispatched, where it looks
        up its own rows and where they were looked up ahead.
      step_waiting, step_ahead: the whole step, likewise.
    """

    tokens: int
    dispatch_waiting: float
    dispatch_ahead: float
    step_waiting: float
    step_ahead: float

    @property
    def dispatch_ratio(self) -> float:
        """Ahead over waiting."""
        return self.dispatch_ahead / self.dispatch_waiting

    @property
    def step_ratio(self) -> float:
        """Ahead over waiting."""
        return self.step_ahead / self.step_waiting


def build_runner(
    directory: pathlib.Path, config: ModelConfig, tables: EngramTables, tokens: int
) -> Runner:
    """A compiled runner for one request whose prompt comes in chunks of `tokens`."""
    limits = engine_limits(
        config,
        max_model_len=tokens * CHUNKS + 1,
        max_num_seqs=1,
        max_num_batched_tokens=tokens,
    )
    unit = cache_bytes(config, range(config.num_hidden_layers), limits.page_size)
    runner = Runner(
        config,
        load_params(directory, config, progress=False),
        tables,
        limits=limits,
        cache_sizes=plan_cache(limits, unit, None),
        token_buckets=(round_up(tokens),),
    )
    runner.compile_all()
    return runner


def measure_steps(
    runner: Runner, config: ModelConfig, *, tokens: int, pairs: int, seed: int
) -> StepTiming:
    """Runs prompts in turn without and with lookup ahead; the first pair warms up.

    Both of a pair have the same token ids, and a result is waited for before the next step.
    """
    rng = np.random.default_rng(seed)
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for pair in range(pairs + 1):
        ids = rng.integers(0, config.vocab_size, tokens * CHUNKS).tolist()
        chunks = prompt_chunks(config, ids, tokens)
        for ahead in (False, True) if pair % 2 else (True, False):
            found = _prompt(runner, chunks, ahead=ahead)
            if pair:
                times[ahead] += found
    (dispatch, step), (dispatch_ahead, step_ahead) = (
        (statistics.median(values) for values in zip(*times[ahead], strict=True))
        for ahead in (False, True)
    )
    return StepTiming(
        tokens=tokens,
        dispatch_waiting=dispatch * 1e3,
        dispatch_ahead=dispatch_ahead * 1e3,
        step_waiting=step * 1e3,
        step_ahead=step_ahead * 1e3,
    )


def _prompt(
    runner: Runner, chunks: Sequence[RequestRows], *, ahead: bool
) -> list[tuple[float, float]]:
    """Seconds until dispatch and until the result, of each chunk but the first."""
    sampling = empty_sampling(runner.limits, runner.vocab_size)
    times = []
    for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
        began = time.perf_counter()
        with jax.profiler.TraceAnnotation("step"):
            step = runner.submit([chunk], sampling)
            dispatched = time.perf_counter()
            if ahead and following is not None:
                runner.expect([following])
            step.result()
        times.append((dispatched - began, time.perf_counter() - began))
    return times[1:]


@contextlib.contextmanager
def profiled(directory: pathlib.Path | None) -> Iterator[None]:
    """Saves a profile of what runs inside, if there is a directory for it."""
    if directory is None:
        yield
        return
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(directory), profiler_options=options):
        yield

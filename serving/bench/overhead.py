"""What the host spends on a step when the model costs nothing: prints milliseconds.

Usage: python -m serving.bench.overhead [DIR]

Decodes 4 and 64 requests through the engine over a runner that answers at once. A step is
everything the engine's thread does: scheduling, cache pages, sampling options, the token batch
with its Engram rows, and the new tokens' text; the thread's processor time counts. Without a
directory it takes the configuration, tokenizer and tables of the default random model. Exits 1
if a step takes longer than it may.
"""

import argparse
import concurrent.futures
import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows

import numpy as np

from dsv41_jax.engram_ahead import EngramAhead
from dsv41_jax.engram_table import EngramTables
from dsv41_jax.hf_config import load_config
from dsv41_jax.host_batch import RequestRows, build_batch, lookup_of
from dsv41_jax.sampling import NUM_ALTERNATIVES, Sampled, SamplingBatch
from serving.default_model import default_model
from serving.engine import Engine
from serving.request import Grammar, Request, SamplingParams
from serving.tokenizer import Tokenizer
from sharding.cache_sizes import cache_bytes, plan_cache
from sharding.limits import EngineLimits, engine_limits, round_up

PROMPT = 300  # tokens
STEPS = 200  # measured
MAX_MODEL_LEN = 4096
ALLOWED = {4: 1.0, 64: 5.0}  # milliseconds per step, by requests
SEED = 42

PLAIN = SamplingParams(max_tokens=2 * STEPS, ignore_eos=True, seed=1)
KINDS: dict[str, SamplingParams] = {
    "plain": PLAIN,
    "log-probabilities": dataclasses.replace(PLAIN, logprobs=5),
    "penalties": dataclasses.replace(PLAIN, frequency_penalty=0.5, repetition_penalty=1.1),
    "stop strings": dataclasses.replace(PLAIN, stop=("\x00never", "\x01nor this")),
    "grammar": dataclasses.replace(PLAIN, grammar=Grammar(kind="regex", text="[^\x00]*")),
}


@dataclasses.dataclass(frozen=True)
class _Answer:
    """A step that is done."""

    sampled: Sampled

    def result(self) -> Sampled:
        return self.sampled


class TrivialRunner:
    """Builds every batch as the real one does, and answers with tokens drawn beforehand."""

    def __init__(self, directory: pathlib.Path, requests: int) -> None:
        """
        Args:
          directory: configuration, tokenizer and Engram tables.
          requests: how many run at once.
        """
        self._config = load_config(directory)
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._ahead: EngramAhead | None = None
        if self._config.engram is not None:
            self._ahead = EngramAhead(EngramTables.open(directory, self._config), self._pool)
        self.looks_ahead = self._ahead is not None
        self.limits: EngineLimits = engine_limits(
            self._config,
            max_model_len=min(MAX_MODEL_LEN, self._config.max_position_embeddings),
            max_num_seqs=requests,
            max_num_batched_tokens=max(256, requests),
        )
        layers = range(self._config.num_hidden_layers)
        unit = cache_bytes(self._config, layers, self.limits.page_size)
        self.cache_sizes = plan_cache(self.limits, unit, None)
        self.vocab_size = self._config.vocab_size
        self.eos_token_id = self._config.eos_token_id
        self.look_back = self._config.engram.max_ngram_size - 1 if self._config.engram else 0
        rows, generator = self.limits.logit_rows, np.random.default_rng(SEED)
        likeliest = np.tile(np.arange(NUM_ALTERNATIVES, dtype=np.int32), (rows, 1))
        zeros = np.zeros((rows, NUM_ALTERNATIVES), np.float32)
        tokens = generator.integers(3, min(250, self.vocab_size), (64, rows), np.int32)
        self._answers = [
            _Answer(Sampled(t, zeros[:, 0], np.ones(rows, np.int32), likeliest, zeros, zeros))
            for t in tokens
        ]
        self._next = 0

    def expect(self, rows: Rows[RequestRows]) -> None:
        """Begins the lookups of the next step."""
        if self._ahead is not None:
            self._ahead.expect([lookup_of(rows, self._bucket(rows))] if rows else [])

    def close(self) -> None:
        """Ends the thread of the lookups."""
        self._pool.shutdown()

    def submit(self, rows: Rows[RequestRows], sampling: SamplingBatch) -> _Answer:
        """Builds the batch and answers at once."""
        build_batch(
            self._config,
            rows,
            tokens=self._bucket(rows),
            requests=self.limits.max_num_seqs,
            columns=self.limits.columns,
            logit_rows=self.limits.logit_rows,
            engram=self._ahead,
        )
        self._next = (self._next + 1) % len(self._answers)
        return self._answers[self._next]

    def _bucket(self, rows: Rows[RequestRows]) -> int:
        total, decode = sum(len(row.token_ids) for row in rows), round_up(self.limits.max_num_seqs)
        return decode if total <= decode else round_up(self.limits.max_num_batched_tokens)


def measure(directory: pathlib.Path, requests: int, sampling: SamplingParams) -> float:
    """Median milliseconds of a step that decodes `requests` requests."""
    runner = TrivialRunner(directory, requests)
    engine = Engine(runner, Tokenizer.open(directory).vocabulary)
    generator = np.random.default_rng(SEED)
    for index in range(requests):
        prompt = generator.integers(3, min(250, runner.vocab_size), PROMPT).tolist()
        engine.add_request(
            Request(request_id=str(index), prompt_token_ids=tuple(prompt), sampling=sampling)
        )
    while len(engine.step()) < requests:
        pass
    return statistics.median(_milliseconds(engine.step) for _ in range(STEPS))


def _milliseconds(run: Callable[[], object]) -> float:
    start = time.thread_time()
    run()
    return 1e3 * (time.thread_time() - start)


def main() -> int:
    """Prints a line per kind of request; returns 1 if plain ones take too long."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", type=pathlib.Path, help="checkpoint directory")
    directory = parser.parse_args().directory or default_model()
    print(f"host milliseconds per step (medians of {STEPS})")
    print(f"{'requests':20}" + "".join(f"{count:>10}" for count in ALLOWED))
    slow = False
    for name, sampling in KINDS.items():
        times = {count: measure(directory, count, sampling) for count in ALLOWED}
        print(f"{name:20}" + "".join(f"{times[count]:10.2f}" for count in ALLOWED), flush=True)
        if sampling is PLAIN:
            slow = any(times[count] > most for count, most in ALLOWED.items())
    print(f"{'at most, plain':20}" + "".join(f"{most:10.2f}" for most in ALLOWED.values()))
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())

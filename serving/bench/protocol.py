"""The published protocol: random prompts, a fixed number at a time, warmed up, then timed."""

import concurrent.futures
import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from serving.bench.client import BenchError, Server, Timing

FIRST_ID = 3  # below are BOS, EOS and padding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """What is sent.

    Attributes:
      input_tokens, output_tokens: of every request.
      concurrency: requests under way at any time.
      warmups: requests before the timed ones.
      requests: timed requests.
      seed: of the random prompts.
    """

    input_tokens: int
    output_tokens: int = 128
    concurrency: int = 4
    warmups: int = 4
    requests: int = 16
    seed: int = 42

    def prompts(self, vocab_size: int, *, round_number: int = 0) -> list[list[int]]:
        """Random prompts of warm-ups and timed requests; other ones in every round."""
        rng = np.random.default_rng((self.seed, self.input_tokens, round_number))
        shape = (self.warmups + self.requests, self.input_tokens)
        return rng.integers(FIRST_ID, vocab_size, shape).tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One protocol, run once.

    Attributes:
      protocol: what was sent.
      seconds: from the first timed request's start to the last one's end.
      timings: one per timed request.
      cache_reset: whether the server dropped its prefix cache before the timed requests.
    """

    protocol: Protocol
    seconds: float
    timings: tuple[Timing, ...]
    cache_reset: bool

    @property
    def done(self) -> tuple[Timing, ...]:
        """The requests that were answered."""
        return tuple(timing for timing in self.timings if timing.error is None)


def _send(
    server: Server, model: str, prompts: Sequence[Sequence[int]], protocol: Protocol
) -> list[Timing]:
    def one(prompt: Sequence[int]) -> Timing:
        return server.complete(model, prompt, max_tokens=protocol.output_tokens)

    with concurrent.futures.ThreadPoolExecutor(protocol.concurrency) as pool:
        return list(pool.map(one, prompts))


def run_protocol(
    server: Server, model: str, protocol: Protocol, *, vocab_size: int, round_number: int = 0
) -> Run:
    """Warm up, reset the prefix cache, and time.

    Raises:
      BenchError: every warm-up failed.
    """
    prompts = protocol.prompts(vocab_size, round_number=round_number)
    warm = _send(server, model, prompts[: protocol.warmups], protocol)
    if warm and all(timing.error is not None for timing in warm):
        raise BenchError(f"{server.url} fails the warm-up requests: {warm[0].error}")
    status, body = server.ask("POST", "/reset_prefix_cache")
    reset = status == 200 and (not isinstance(body, dict) or body.get("success") is not False)
    start = time.perf_counter()
    timings = _send(server, model, prompts[protocol.warmups :], protocol)
    seconds = time.perf_counter() - start
    return Run(protocol=protocol, seconds=seconds, timings=tuple(timings), cache_reset=reset)

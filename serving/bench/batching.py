"""What batching saves on one device: prints two ratios.

Usage: python -m serving.bench.batching [DIR]

Scores a prompt whole and one token at a time, and decodes requests together and in turn,
through the same programs. Without a directory it takes the default random model. Times are of
the machine at hand; only the ratios mean anything on a CPU.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

import dsv41_jax
from dsv41_jax.batch import TokenBatch
from dsv41_jax.forward import forward
from dsv41_jax.host_batch import build_batch, round_rows
from dsv41_jax.inference import Model, columns_for, request_rows
from dsv41_jax.state import StageState, init_state
from serving.default_model import default_model

PROMPT = 101  # tokens scored
REQUESTS = 8  # requests decoded together
STEPS = 16  # tokens decoded per request
REPEATS = 5
SEED = 42


def median_seconds(run: Callable[[], object]) -> float:
    """Median wall time of some runs, after one that compiles."""
    run()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class Decoder:
    """Requests that stand at the end of equal prompts, ready to decode."""

    def __init__(self, model: Model, prompts: Sequence[Sequence[int]]) -> None:
        """Prefills every prompt in pages of its own."""
        self.model, self.prompts = model, prompts
        self.columns = columns_for(model.config, len(prompts[0]) + STEPS)
        pages = len(prompts) * self.columns
        self.state: StageState = init_state(
            model.config,
            model.stage.layers,
            window_pages=pages,
            global_pages=pages,
            slots=len(prompts),
        )
        for request in range(len(prompts)):
            self.step([request], 0, len(prompts[0]))

    def step(self, requests: Sequence[int], start: int, stop: int) -> None:
        """Processes tokens start..stop-1 of some requests in one step."""
        batch = self._batch(requests, start, stop)
        logits, self.state = forward(self.model.stage, self.model.params, self.state, batch)
        jax.block_until_ready(logits)

    def decode(self, groups: Sequence[Sequence[int]]) -> None:
        """Decodes STEPS tokens of every group, one group after another."""
        first = len(self.prompts[0])
        for group in groups:
            for position in range(first, first + STEPS):
                self.step(group, position, position + 1)

    def _batch(self, requests: Sequence[int], start: int, stop: int) -> TokenBatch:
        rows = []
        for request in requests:
            ids = [*self.prompts[request], *self.prompts[request][:STEPS]]
            row = request_rows(self.model.config, ids, start, stop, stop - start)
            pages = [request * self.columns + column for column in row.global_pages]
            fields = {"window_pages": pages, "global_pages": pages, "slot": request}
            rows.append(dataclasses.replace(row, **fields))
        return build_batch(
            self.model.config,
            rows,
            tokens=round_rows(len(self.prompts[0])),
            requests=len(self.prompts),
            columns=self.columns,
            logit_rows=round_rows(len(self.prompts)),
            engram=self.model.engram,
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs both comparisons and prints them."""
    parser = argparse.ArgumentParser(prog="python -m serving.bench.batching")
    parser.add_argument("directory", nargs="?", help="checkpoint; default: the random model")
    options = parser.parse_args(argv)
    path = options.directory or default_model()
    model = dsv41_jax.load(path)
    device = jax.devices()[0]
    print(f"{path}: {device.platform} {device.device_kind}, jax {jax.__version__}, seed {SEED}")
    print(f"{PROMPT} prompt tokens, {REQUESTS} requests, {STEPS} steps, median of {REPEATS}")

    rng = np.random.default_rng(SEED)
    ids = rng.integers(3, model.config.vocab_size, (REQUESTS, PROMPT)).tolist()
    whole = median_seconds(lambda: dsv41_jax.score(model, ids[0]))
    single = median_seconds(lambda: dsv41_jax.score(model, ids[0], chunk_size=1))
    print(f"score, whole against token by token: {single / whole:.1f}x faster")

    decoder = Decoder(model, ids)
    everyone = list(range(REQUESTS))
    together = median_seconds(lambda: decoder.decode([everyone]))
    in_turn = median_seconds(lambda: decoder.decode([[request] for request in everyone]))
    print(f"decode, together against in turn: {in_turn / together:.1f}x the throughput")


if __name__ == "__main__":
    main()

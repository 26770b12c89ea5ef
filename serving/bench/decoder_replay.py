"""What bounded replay does to logits: how far they move, and how much is saved.

Usage: python -m serving.bench.decoder_replay [DIR]

Runs prompts exactly and with late layers on the last window alone, and compares the logits of
the token after the prompt. Without a directory it takes the default random model, whose layers
amplify every difference; a trained model moves less.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import jax
import numpy as np

import dsv41_jax
from dsv41_jax.forward import forward
from dsv41_jax.host_batch import build_batch, round_rows
from dsv41_jax.inference import Model, columns_for, replay_start, request_rows, window_ring
from dsv41_jax.state import init_state
from serving.default_model import default_model

LENGTHS = (1, 2, 4, 8)  # prompt lengths, in windows
PROMPTS = 8  # of each length
SEED = 42


class LastRow:
    """Logits of a prompt's last row, from one program for all lengths."""

    def __init__(self, model: Model, longest: int) -> None:
        """Sizes the caches and the step for `longest` tokens."""
        self.model, self.longest = model, longest
        self.columns = columns_for(model.config, longest)

    def __call__(self, ids: Sequence[int], late_from: int) -> tuple[np.ndarray, float]:
        """float32[V], and the seconds of the step."""
        config = self.model.config
        state = init_state(
            config,
            self.model.stage.layers,
            window_pages=window_ring(config, self.longest),
            global_pages=self.columns,
            slots=1,
        )
        batch = build_batch(
            config,
            [request_rows(config, ids, 0, len(ids), self.longest, late_from)],
            tokens=round_rows(self.longest),
            requests=1,
            columns=self.columns,
            logit_rows=round_rows(1),
            engram=self.model.engram,
        )
        jax.block_until_ready(state)
        start = time.perf_counter()
        logits, _ = forward(self.model.stage, self.model.params, state, batch)
        logits = np.asarray(logits[0])
        return logits, time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    """Prints one line a length."""
    parser = argparse.ArgumentParser(prog="python -m serving.bench.decoder_replay")
    parser.add_argument("directory", nargs="?", help="checkpoint; default: the random model")
    options = parser.parse_args(argv)
    path = options.directory or default_model()
    model = dsv41_jax.load(path)
    config, device = model.config, jax.devices()[0]
    window = config.sliding_window
    print(f"{path}: {device.platform} {device.device_kind}, jax {jax.__version__}, seed {SEED}")
    print(f"window {window}, {PROMPTS} random prompts of each length; the logits after the prompt")
    rng = np.random.default_rng(SEED)
    lengths = [n * window for n in LENGTHS if n * window < config.max_position_embeddings]
    last_row = LastRow(model, max(lengths))
    last_row(rng.integers(3, config.vocab_size, window).tolist(), 0)  # compiles
    print("  tokens   median relative error   same likeliest token   time of exact / replayed")
    for length in lengths:
        errors, same, ratios = [], 0, []
        for _ in range(PROMPTS):
            ids = rng.integers(3, config.vocab_size, length).tolist()
            exact, exact_seconds = last_row(ids, 0)
            replayed, seconds = last_row(ids, replay_start(config, length))
            errors.append(np.linalg.norm(replayed - exact) / np.linalg.norm(exact))
            same += int(exact.argmax() == replayed.argmax())
            ratios.append(exact_seconds / seconds)
        print(
            f"  {length:6}   {statistics.median(errors):21.3f}   {same:10} of {PROMPTS:<8}"
            f"   {statistics.median(ratios):.2f}"
        )


if __name__ == "__main__":
    main()

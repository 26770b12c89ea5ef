"""`python -m serving.bench.engram`: what an Engram lookup costs the host, and a step.

Prints microseconds of the lookups alone, then prefill steps of a small model over the same tables,
in turn with their rows looked up ahead and with lookups of their own: milliseconds and the ratio.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np

from dsv41_jax.checkpoint import CheckpointError
from dsv41_jax.checkpoint.reduced import keep_layers, with_sizes
from dsv41_jax.checkpoint.synthetic import make_checkpoint
from dsv41_jax.checkpoint.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer, write_tiny_tokenizer
from dsv41_jax.config import ConfigError, ModelConfig
from dsv41_jax.engram_hash import token_map_from_tokenizer
from dsv41_jax.engram_table import EngramTables, empty_rows
from dsv41_jax.hf_config import RELEASED, load_config
from serving.bench.lookup_ahead import build_runner, measure_steps, profiled

# requests and tokens of each in one step
STEPS = {
    "decode 1 x 1": (1, 1),
    "4 tokens, 1 request": (1, 4),
    "decode 4 x 1": (4, 1),
    "decode 64 x 1": (64, 1),
    "prefill 1 x 512": (1, 512),
}
_SAMPLES = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Microseconds of one step's lookup: the median of the samples, and the fastest."""

    step: str
    median: float
    fastest: float


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0, or 3 where there is no checkpoint to look things up in."""
    args = _parser().parse_args(argv)
    try:
        if args.directory is not None:
            report = _report(args.directory, args)
        else:
            with tempfile.TemporaryDirectory() as made:
                directory = pathlib.Path(made) / "model"
                _make(directory, args.rows)
                report = _report(directory, args) | _steps(directory, args)
    except (CheckpointError, ConfigError, OSError) as error:
        print(f"serving.bench.engram: {error}", file=sys.stderr)
        return 3
    print(json.dumps(report, indent=1) if args.json else _text(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m serving.bench.engram", allow_abbrev=False)
    parser.add_argument(
        "directory",
        nargs="?",
        type=pathlib.Path,
        metavar="DIR",
        help="checkpoint directory; tables of the released row size are made if left out",
    )
    parser.add_argument(
        "--rows", type=int, default=2_000_000, help="of the tables that are made; %(default)s"
    )
    parser.add_argument("--engram-placement", choices=("mmap", "ram"), default="mmap")
    parser.add_argument(
        "--pairs",
        type=_count,
        default=5,
        help="prompts with and without lookup ahead, over tables that are made; %(default)s",
    )
    parser.add_argument(
        "--step-tokens", type=_count, default=128, help="of a prefill step; %(default)s"
    )
    parser.add_argument(
        "--profile", type=pathlib.Path, metavar="DIR", help="save a profile of the steps"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the token ids; %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _make(directory: pathlib.Path, rows: int) -> None:
    """A window layer and two layers with tables, everything else as small as it gets."""
    released = load_config(RELEASED)
    released = dataclasses.replace(
        released, draft=None, vision=None, compress_ratios=released.compress_ratios[:40]
    )
    small = dataclasses.replace(
        keep_layers(released, (1, 14)),
        **{"vocab_size": VOCAB_SIZE, "hidden_size": 64, "q_lora_rank": 32, "o_groups": 1},
        **{"num_attention_heads": 1, "head_dim": 64, "o_lora_rank": 32},
        **{"moe_intermediate_size": 32, "image_token_id": None},
    )
    tokenizer = tiny_tokenizer()
    compressed = int(token_map_from_tokenizer(tokenizer, VOCAB_SIZE).max()) + 1
    config = with_sizes(small, experts=1, engram_rows=rows, compressed_vocab_size=compressed)
    make_checkpoint(directory, config, shards=1)
    write_tiny_tokenizer(directory, config.max_position_embeddings)


def measure(tables: EngramTables, config: ModelConfig, step: str, seed: int) -> Timing:
    """Times the lookup of one step with fresh random tokens in every repetition."""
    requests, tokens = STEPS[step]
    rng = np.random.default_rng(seed)
    repeats = max(20, 2000 // (requests * tokens))
    out = empty_rows(config.engram, tables.layer_ids, requests * tokens)
    look_back = config.engram.max_ngram_size - 1
    samples = []
    for sample in range(_SAMPLES + 1):
        ids = rng.integers(0, config.vocab_size, (repeats, requests, tokens))
        histories = rng.integers(0, config.vocab_size, (repeats, requests, look_back))
        batches = [(list(a), list(b)) for a, b in zip(ids, histories, strict=True)]
        began = time.perf_counter()
        for batch, before in batches:
            tables.lookup_many(batch, before, out)
        if sample:  # the first one warms up
            samples.append((time.perf_counter() - began) / repeats * 1e6)
    return Timing(step=step, median=statistics.median(samples), fastest=min(samples))


def _report(directory: pathlib.Path, args: argparse.Namespace) -> dict[str, object]:
    config = load_config(directory)
    tables = EngramTables.open(
        directory, config, placement=args.engram_placement, prefault=True, progress=False
    )
    engram = config.engram
    return {
        "setup": {
            "tables": len(tables.layer_ids),
            "rows": list(engram.num_embeddings),
            "row_bytes": engram.head_dim + engram.head_dim // 32,
            "rows_per_token": engram.num_columns,
            "placement": args.engram_placement,
            "seed": args.seed,
            "cpu": platform.processor() or platform.machine(),
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "microseconds": [
            dataclasses.asdict(measure(tables, config, step, args.seed)) for step in STEPS
        ],
    }


def _steps(directory: pathlib.Path, args: argparse.Namespace) -> dict[str, object]:
    config, tokens = load_config(directory), args.step_tokens
    tables = EngramTables.open(
        directory, config, placement=args.engram_placement, prefault=True, progress=False
    )
    runner = build_runner(directory, config, tables, tokens)
    with profiled(args.profile):
        timing = measure_steps(runner, config, tokens=tokens, pairs=args.pairs, seed=args.seed)
    runner.close()
    ratios = {"dispatch_ratio": timing.dispatch_ratio, "step_ratio": timing.step_ratio}
    return {"milliseconds": dataclasses.asdict(timing) | ratios}


def _count(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _text(report: dict) -> str:
    setup = ", ".join(f"{name} {value}" for name, value in report["setup"].items())
    lines = [setup, f"{'step':<22}{'median us':>12}{'fastest us':>12}"]
    lines += [
        f"{row['step']:<22}{row['median']:>12.1f}{row['fastest']:>12.1f}"
        for row in report["microseconds"]
    ]
    if "milliseconds" in report:
        found = report["milliseconds"]
        header = f"{found['tokens']}-token prefill step"
        lines.append(f"{header:<22}{'waiting ms':>12}{'ahead ms':>12}{'ratio':>12}")
        lines += [
            f"{label:<22}{found[f'{name}_waiting']:>12.2f}{found[f'{name}_ahead']:>12.2f}"
            f"{found[f'{name}_ratio']:>12.3f}"
            for label, name in (("until it is dispatched", "dispatch"), ("whole", "step"))
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

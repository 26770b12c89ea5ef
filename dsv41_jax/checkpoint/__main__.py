"""`python -m dsv41_jax.checkpoint inspect|make-synthetic`: check a directory, or make one.

Exit status 0 when all is well, 1 when `inspect` finds a fault, 2 for wrong usage, 3 when there is
no checkpoint directory or its configuration is refused.
"""

import argparse
import dataclasses
import json
import pathlib
import signal
import sys
from collections.abc import Sequence

from dsv41_jax.checkpoint.errors import CheckpointError
from dsv41_jax.checkpoint.inspect import inspect_directory, inspection_facts, inspection_text
from dsv41_jax.checkpoint.key_map import COMPONENTS
from dsv41_jax.checkpoint.reduced import keep_layers, pick_layers, with_sizes
from dsv41_jax.checkpoint.synthetic import make_checkpoint
from dsv41_jax.checkpoint.tiny_tokenizer import (
    IMAGE,
    VOCAB_SIZE,
    tiny_tokenizer,
    write_tiny_tokenizer,
)
from dsv41_jax.config import ConfigError, ModelConfig
from dsv41_jax.engram_hash import token_map_from_tokenizer
from dsv41_jax.hf_config import RELEASED, load_config

FINE, FAULTY, REFUSED = 0, 1, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status.

    Raises:
      SystemExit: with status 2 for wrong usage.
    """
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ConfigError, CheckpointError, OSError) as error:
        if getattr(args, "json", False):
            print(json.dumps({"complete": False, "error": str(error)}, indent=1))
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dsv41_jax.checkpoint", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="inspect|make-synthetic")
    inspect = commands.add_parser(
        "inspect",
        help="check a directory's headers against its config.json; reads no data",
        allow_abbrev=False,
    )
    inspect.add_argument("directory", type=pathlib.Path, metavar="DIR")
    inspect.add_argument(
        "--config",
        metavar=f"DIR|{RELEASED}",
        help="configuration to check against; the directory's own if left out",
    )
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.set_defaults(run=_inspect)
    make = commands.add_parser(
        "make-synthetic",
        help="write a consistent checkpoint with random values",
        allow_abbrev=False,
    )
    make.add_argument("directory", type=pathlib.Path, metavar="DIR")
    make.add_argument(
        "--like",
        default=RELEASED,
        metavar=f"DIR|{RELEASED}",
        help="configuration whose shapes a layer has; %(default)s",
    )
    make.add_argument(
        "--layers",
        type=_layers,
        metavar="N|1,2,20",
        help="how many layers, all kinds among them, or which ones; all if left out",
    )
    make.add_argument("--experts", type=_positive, metavar="N", help="routed experts of a layer")
    make.add_argument(
        "--engram-rows", type=_positive, metavar="N", help="about how many rows a table has"
    )
    make.add_argument("--vocab-size", type=_positive, metavar="N", help="token ids")
    make.add_argument("--no-draft", action="store_true", help="leave the draft out")
    make.add_argument("--no-vision", action="store_true", help="leave the vision part out")
    make.add_argument("--seed", type=int, default=0, help="of all values; %(default)s")
    make.add_argument(
        "--shards", type=_positive, default=3, metavar="N", help="about how many files; %(default)s"
    )
    make.add_argument(
        "--sparse-engram", action="store_true", help="tables of zeros that take no room on disk"
    )
    make.add_argument(
        "--headers-only",
        action="store_true",
        help="true headers without data or tokenizer: sparse files of the full size",
    )
    make.set_defaults(run=_make)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text)


def _layers(text: str) -> int | tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a number of layers, or layers with commas between, such as 1,2,20"
        )
    return tuple(map(int, parts)) if len(parts) > 1 else int(text)


def _inspect(args: argparse.Namespace) -> int:
    inspection = inspect_directory(args.directory, load_config(args.config or args.directory))
    if args.json:
        print(json.dumps(inspection_facts(inspection), indent=1))
    else:
        print(inspection_text(inspection))
    return FINE if inspection.complete else FAULTY


def _make(args: argparse.Namespace) -> int:
    config = _without_parts(load_config(args.like), draft=args.no_draft, vision=args.no_vision)
    if args.layers is not None:
        layers = args.layers
        if isinstance(layers, int):
            layers = pick_layers(config, layers)
        config = keep_layers(config, layers)
    if args.vocab_size is not None:
        config = _with_vocabulary(config, args.vocab_size)
    compressed = None
    if not args.headers_only:
        config, compressed = _for_tiny_tokenizer(config)
    config = with_sizes(
        config,
        experts=args.experts,
        engram_rows=args.engram_rows,
        compressed_vocab_size=compressed,
    )
    sparse = COMPONENTS if args.headers_only else ("engram",) if args.sparse_engram else ()
    make_checkpoint(args.directory, config, args.seed, shards=args.shards, sparse=sparse)
    if not args.headers_only:
        write_tiny_tokenizer(args.directory, config.max_position_embeddings)
    print(inspection_text(inspect_directory(args.directory, config)))
    return FINE


def _without_parts(config: ModelConfig, *, draft: bool, vision: bool) -> ModelConfig:
    if draft:
        ratios = config.compress_ratios[: config.num_hidden_layers]
        config = dataclasses.replace(config, draft=None, compress_ratios=ratios)
    return dataclasses.replace(config, vision=None) if vision else config


def _with_vocabulary(config: ModelConfig, size: int) -> ModelConfig:
    """Special tokens past the end of the vocabulary move to its end."""
    last = size - 1
    image, draft, engram = config.image_token_id, config.draft, config.engram
    if engram is not None:
        compressed = min(engram.compressed_vocab_size, size)
        engram = dataclasses.replace(engram, compressed_vocab_size=compressed)
    return dataclasses.replace(
        config,
        vocab_size=size,
        image_token_id=None if image is None else min(image, last),
        engram=engram,
        draft=draft and dataclasses.replace(draft, noise_token_id=min(draft.noise_token_id, last)),
    )


def _for_tiny_tokenizer(config: ModelConfig) -> tuple[ModelConfig, int]:
    """The configuration with the tiny tokenizer's ids, and its compressed vocabulary's size."""
    if config.vocab_size < VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size is {config.vocab_size}: the tokenizer that is written has {VOCAB_SIZE} "
            "tokens; raise --vocab-size"
        )
    tokenizer = tiny_tokenizer()
    compressed = int(token_map_from_tokenizer(tokenizer, config.vocab_size).max()) + 1
    image = None if config.image_token_id is None else tokenizer.token_to_id(IMAGE)
    return dataclasses.replace(config, image_token_id=image), compressed


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the command quietly
    sys.exit(main())

"""`python -m dsv41_jax.verify DIR`: a checkpoint directory against the vectors it carries."""

import argparse
import pathlib
import signal
import sys
from collections.abc import Sequence

import jax

from dsv41_jax.checkpoint import CheckpointError
from dsv41_jax.config import ConfigError
from dsv41_jax.verify.cases import CASES, IN_DIRECTORY, recorded_cases, run_cases
from dsv41_jax.verify.report import show
from dsv41_jax.verify.vectors import Directory, VectorError
from pallas_kernels.dispatch import IMPLEMENTATIONS

FINE, FELL_SHORT, REFUSED = 0, 1, 3


def _cases(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in CASES]
    if unknown or not names:
        wrong = f"no such case: {', '.join(unknown)}" if unknown else "no case named"
        raise argparse.ArgumentTypeError(f"{wrong}; cases are {', '.join(CASES)}")
    return list(dict.fromkeys(names))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dsv41_jax.verify", description=__doc__)
    parser.add_argument(
        "directory", type=pathlib.Path, metavar="DIR", help="checkpoint with golden_*.npz files"
    )
    parser.add_argument(
        "--only",
        type=_cases,
        metavar="CASE,...",
        help=f"out of {', '.join(IN_DIRECTORY)}; real_engram takes the directory that holds "
        "real_engram.npz (default: every case whose file is there)",
    )
    parser.add_argument("--tier", choices=("strict", "loose"), default="strict")
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, default="xla")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return parser


def _say(text: str) -> None:
    print(f"verify: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0 if all is within tolerance, 1 if not, 3 if it cannot run."""
    options = _parser().parse_args(arguments)
    if options.implementation == "pallas" and jax.default_backend() != "gpu":
        _say(
            f"--implementation pallas needs a GPU, and JAX runs on {jax.default_backend()}; use "
            "pallas_interpret to run the kernels here"
        )
        return REFUSED
    directory = Directory(options.directory, progress=not options.json)
    try:
        if not options.directory.is_dir():
            raise VectorError(f"{options.directory} is not a directory")
        cases = options.only or recorded_cases(directory)
        ok = show(
            run_cases(directory, cases, options.tier, options.implementation, _say),
            as_json=options.json,
        )
    except (VectorError, ConfigError, CheckpointError) as error:
        _say(str(error))
        return REFUSED
    return FINE if ok else FELL_SHORT


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the command quietly
    sys.exit(main())

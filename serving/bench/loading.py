"""`python -m serving.bench.loading DIR`: speed and peak memory of loading, beside a plain copy.

Both run in fresh processes, in turn, on the same files; the copy reads every shard once into fresh
memory. Memory is RssAnon: pages of the files themselves do not count.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

_EVERY = 0.002  # seconds between two looks at the memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One process: bytes read, seconds, and RssAnon at its peak and at the end."""

    nbytes: int
    seconds: float
    peak: int
    resident: int

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m serving.bench.loading", allow_abbrev=False)
    parser.add_argument("directory", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--rounds", type=int, default=3, help="of both, in turn; %(default)s")
    parser.add_argument("--worker", choices=("copy", "load"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        print(json.dumps(dataclasses.asdict(_measure(args.directory, args.worker))))
        return 0
    runs: dict[str, list[Run]] = {"copy": [], "load": []}
    for _ in range(args.rounds + 1):  # the first round fills the page cache
        for worker, found in runs.items():
            found.append(_run(args.directory, worker))
    copies, loads = runs["copy"][1:], runs["load"][1:]
    ratio = statistics.median(b.rate / a.rate for a, b in zip(copies, loads, strict=True))
    load = max(loads, key=lambda run: run.peak / run.resident)
    print(
        f"{args.directory}, {args.rounds} rounds, {os.cpu_count()} CPUs, load {os.getloadavg()[0]}"
    )
    for name, found in (("plain copy", copies), ("load_params", loads)):
        rates = ", ".join(f"{run.rate / 1e9:.2f}" for run in found)
        print(f"{name:<12} {found[0].nbytes / 1e9:.2f} GB at {rates} GB/s")
    print(f"speed: {ratio:.0%} of the plain copy's (median of the rounds)")
    print(
        f"memory: peak {load.peak / 1e9:.2f} GB, resident {load.resident / 1e9:.2f} GB: "
        f"{load.peak / load.resident:.3f}x"
    )
    return 0


def _run(directory: pathlib.Path, worker: str) -> Run:
    command = [sys.executable, "-m", "serving.bench.loading", str(directory), "--worker", worker]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return Run(**json.loads(result.stdout.splitlines()[-1]))


def _anonymous() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def _measure(directory: pathlib.Path, worker: str) -> Run:
    import jax
    import numpy as np

    from dsv41_jax.checkpoint import abstract_params, load_params
    from dsv41_jax.hf_config import load_config

    config = load_config(directory)
    shapes = abstract_params(config)
    jax.numpy.zeros(8).block_until_ready()
    before = _anonymous()
    peak = before
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, _anonymous())
            time.sleep(_EVERY)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    if worker == "load":
        held = load_params(directory, config, progress=False)
        nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    else:
        held = []
        for path in sorted(directory.glob("*.safetensors")):
            held.append(np.empty(path.stat().st_size, np.uint8))
            with path.open("rb", buffering=0) as file:
                left = memoryview(held[-1])
                while count := file.readinto(left):
                    left = left[count:]
        nbytes = sum(array.size for array in held)
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    resident = _anonymous() - before
    del held
    return Run(nbytes=nbytes, seconds=seconds, peak=peak - before, resident=resident)


if __name__ == "__main__":
    sys.exit(main())

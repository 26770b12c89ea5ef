"""Two servers in turn (A B A B), or two saved runs: ratios with confidence intervals."""

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serving.bench.client import BenchError
from serving.bench.protocol import Run
from serving.bench.report import TIMES, figures

# Student's t at 97.5 %, by degrees of freedom from 1; beyond the last the normal's value is near.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL = 1.96
_RESAMPLES = 2000
COMPARED = ("output_throughput", *(f"{name}_p50" for name in TIMES))


@dataclasses.dataclass(frozen=True)
class Ratio:
    """B over A, with its 95 % interval; the interval is None for a single pair."""

    name: str
    value: float
    interval: tuple[float, float] | None

    def line(self) -> list[str]:
        """A row of the table."""
        if self.interval is None:
            return [self.name, f"{self.value:.3f}", "-", "one pair says nothing"]
        low, high = self.interval
        verdict = "differs" if low > 1 or high < 1 else "no difference shown"
        return [self.name, f"{self.value:.3f}", f"{low:.3f} .. {high:.3f}", verdict]


def interleaved(
    run_a: Callable[[int], Run], run_b: Callable[[int], Run], *, repeats: int
) -> list[tuple[Run, Run]]:
    """Runs A and B in turn; a pair has the same prompts, and the next pair other ones."""
    return [(run_a(number), run_b(number)) for number in range(repeats)]


def paired_ratio(name: str, a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Geometric mean of B over A in pairs, and its interval by Student's t on the logarithms."""
    logs = [math.log(y / x) for x, y in zip(a, b, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Ratio(name, math.exp(mean), None)
    t = _T[len(logs) - 2] if len(logs) - 2 < len(_T) else _NORMAL
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(name, math.exp(mean), (math.exp(mean - half), math.exp(mean + half)))


def compare_pairs(pairs: Sequence[tuple[Run, Run]]) -> list[Ratio]:
    """Ratios of the figures that every run has."""
    tables = [(figures(a), figures(b)) for a, b in pairs]
    ratios = []
    for name in COMPARED:
        values = [(a[name], b[name]) for a, b in tables if a[name] and b[name]]
        if len(values) == len(tables):
            ratios.append(paired_ratio(name, *zip(*values, strict=True)))
    return ratios


def bootstrap_ratio(name: str, a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Ratio of medians, and its interval by resampling the requests of both runs."""
    rng = np.random.default_rng(0)
    first, second = np.asarray(a), np.asarray(b)
    tops = np.median(rng.choice(second, (_RESAMPLES, len(second))), axis=1)
    bottoms = np.median(rng.choice(first, (_RESAMPLES, len(first))), axis=1)
    low, high = np.percentile(tops / bottoms, (2.5, 97.5))
    value = float(np.median(second) / np.median(first))
    return Ratio(name, value, (float(low), float(high)))


def read_runs(path: Path) -> dict[int, Mapping[str, Any]]:
    """Saved runs by their input length.

    Raises:
      BenchError: the file is missing or holds none.
    """
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return {run["protocol"]["input_tokens"]: run for run in saved["runs"]}
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path} holds no saved runs; give a .json file of --save") from error


def compare_saved(a: Path, b: Path) -> dict[int, list[Ratio]]:
    """Ratios of two saved files, per input length that both have.

    Raises:
      BenchError: a file cannot be read, or they have no input length in common.
    """
    first, second = read_runs(a), read_runs(b)
    common = sorted(first.keys() & second.keys())
    if not common:
        raise BenchError(f"{a} and {b} have no input length in common")
    return {
        length: [
            bootstrap_ratio(name, one, other)
            for name in TIMES
            if (one := first[length]["samples_ms"][name])
            and (other := second[length]["samples_ms"][name])
        ]
        for length in common
    }

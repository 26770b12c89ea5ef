"""Figures of a run, as a table, as JSON and as Markdown."""

import dataclasses
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from serving.bench.client import BenchError
from serving.bench.protocol import Run

QUANTILES = (10, 50, 90)
TIMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Where figures come from.

    Attributes:
      url, model: the server.
      server: what it says about itself: versions and device.
      client: the machine that asked.
      date: when, ISO 8601.
    """

    url: str
    model: str
    server: Mapping[str, Any]
    client: str
    date: str


def client_machine() -> str:
    """This machine in a few words."""
    return f"{platform.machine()} {platform.system()}, Python {platform.python_version()}"


def samples(run: Run) -> dict[str, list[float]]:
    """Every measured time of a run in milliseconds, by name."""
    done = run.done
    per_token = [timing.per_token for timing in done]
    seconds = {
        "ttft": [timing.first for timing in done],
        "tpot": [value for value in per_token if value is not None],
        "itl": [gap for timing in done for gap in timing.gaps],
        "e2e": [timing.end_to_end for timing in done],
    }
    return {name: [1e3 * value for value in values] for name, values in seconds.items()}


def figures(run: Run) -> dict[str, float | None]:
    """Throughputs in tokens per second, failures, and quantiles of the times in milliseconds."""
    output = sum(timing.completion_tokens for timing in run.done)
    total = output + sum(timing.prompt_tokens for timing in run.done)
    table: dict[str, float | None] = {
        "output_throughput": output / run.seconds,
        "total_throughput": total / run.seconds,
        "failures": len(run.timings) - len(run.done),
    }
    for name, values in samples(run).items():
        for quantile in QUANTILES:
            value = float(np.percentile(values, quantile)) if values else None
            table[f"{name}_p{quantile}"] = value
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """A header and one line per run."""
    header = ["input", "output tok/s", "total tok/s"]
    header += [f"{title} p10/p50/p90 ms" for title in TIMES.values()]
    lines = [[*header, "failures"]]
    for run in runs:
        table = figures(run)
        line = [str(run.protocol.input_tokens)]
        line += [_number(table["output_throughput"]), _number(table["total_throughput"])]
        for name in TIMES:
            line.append(" / ".join(_number(table[f"{name}_p{q}"]) for q in QUANTILES))
        lines.append([*line, f"{table['failures']} of {len(run.timings)}"])
    return lines


def as_text(lines: Sequence[Sequence[str]]) -> str:
    """A table in columns of equal width."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def as_markdown(setting: Setting, runs: Sequence[Run]) -> str:
    """A section of RESULTS.md."""
    lines = rows(runs)
    protocol = runs[0].protocol
    about = ", ".join(f"{name} {value}" for name, value in setting.server.items())
    table = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    body = "\n".join("| " + " | ".join(line) + " |" for line in table)
    reset = "reset" if all(run.cache_reset for run in runs) else "not reset"
    return (
        f"## {setting.model}, {setting.date}\n\n"
        f"Server: {about or 'unknown'}. Client: {setting.client}. {protocol.output_tokens} output "
        f"tokens, concurrency {protocol.concurrency}, {protocol.warmups} warm-ups, "
        f"{protocol.requests} requests, seed {protocol.seed}, EOS ignored, prefix cache {reset}."
        f"\n\n{body}\n"
    )


def as_json(setting: Setting, runs: Sequence[Run]) -> dict[str, Any]:
    """Everything measured, to compare with later."""
    return {
        "setting": dataclasses.asdict(setting),
        "runs": [
            {
                "protocol": dataclasses.asdict(run.protocol),
                "seconds": run.seconds,
                "cache_reset": run.cache_reset,
                "figures": figures(run),
                "samples_ms": samples(run),
                "errors": [timing.error for timing in run.timings if timing.error is not None],
            }
            for run in runs
        ],
    }


def save(path: Path, setting: Setting, runs: Sequence[Run]) -> list[Path]:
    """Write `path` with the endings .json and .md; returns both.

    Raises:
      BenchError: a file cannot be written.
    """
    texts = {
        ".json": json.dumps(as_json(setting, runs), indent=1),
        ".md": as_markdown(setting, runs),
    }
    written = []
    for ending, text in texts.items():
        target = path.with_name(path.name + ending)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise BenchError(f"{target} cannot be written: {error.strerror}") from error
        written.append(target)
    return written

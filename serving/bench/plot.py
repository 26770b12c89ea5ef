"""A picture of runs: throughput, and the spread of each time."""

from collections.abc import Sequence
from pathlib import Path

from serving.bench.client import BenchError
from serving.bench.protocol import Run
from serving.bench.report import TIMES, figures, samples


def plot(path: Path, runs: Sequence[Run], *, title: str) -> None:
    """Write the picture; the ending of `path` chooses its format.

    Raises:
      BenchError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchError(
            "--plot needs matplotlib; install it with pip install dsv41-jax[plot]"
        ) from error
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = figure.subplots(1, 1 + len(TIMES))
    lengths = [str(run.protocol.input_tokens) for run in runs]
    panels[0].bar(lengths, [figures(run)["output_throughput"] for run in runs], color="0.6")
    panels[0].set_title("output tokens per second")
    measured = [samples(run) for run in runs]
    for panel, (name, label) in zip(panels[1:], TIMES.items(), strict=True):
        panel.boxplot(
            [values[name] for values in measured],
            tick_labels=lengths,
            whis=(10, 90),
            showfliers=False,
            medianprops={"color": "black"},
        )
        panel.set_title(f"{label}, ms")
        panel.set_ylim(bottom=0)
    for panel in panels:
        panel.set_xlabel("input tokens")
    figure.suptitle(title)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise BenchError(f"{path} cannot be written: {error}") from error

"""The report of a device check, as Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Facts = Mapping[str, Any]

NO_MEASUREMENT = (
    "**Not a measurement**: the kernels ran interpreted, at tiny sizes, on a device without "
    "Triton. Parity alone is shown, and no times. Layers run as {layers}."
)


def as_markdown(report: Facts) -> str:
    """A section of RESULTS.md: the device, parity and times by part, and what is missing."""
    device = report["device"]
    lines = [f"## Device check: {device['kind']}, {device['date'][:10]}", "", _about(report)]
    if not report["measurement"]:
        lines += ["", NO_MEASUREMENT.format(layers=device["layer_implementation"])]
    elif device["limits_of"] is None:
        lines += ["", f"What {device['kind']} can do at most is not known here: times alone."]
    lines += ["", "### Operations", "", *_operations(report)]
    lines += ["", "### Layers", "", *_layers(report)]
    if report["measurement"]:
        lines += ["", "### Whole steps, extrapolated", "", *_extrapolated(report)]
    lines += ["", "### Stage", "", *_stage(report)]
    lines += ["", "### Missing", "", *_missing(report)]
    return "\n".join(lines) + "\n"


def _about(report: Facts) -> str:
    device = report["device"]
    parts = [f"jax {device['jax']}, jaxlib {device['jaxlib']}, Python {device['python']}"]
    parts.append(f"runtime {device['runtime']}")
    if device["driver"]:
        parts.append(f"driver {device['driver']}")
    if device["memory_bytes"]:
        parts.append(f"{device['memory_bytes'] / 2**30:.1f} GiB for arrays")
    if device["bandwidth"]:
        parts.append(
            f"taken as {device['limits_of']}: {device['bandwidth'] / 1e12:.2f} TB/s, "
            f"{device['bf16_flops'] / 1e12:.0f} bf16 TFLOP/s"
        )
    parts.append(
        f"{device['implementation']}, seed {device['seed']}, decode after {report['context']} "
        f"tokens each, {report['seconds']:.0f} of {report['budget']:.0f} seconds"
    )
    return "; ".join(parts) + "."


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines] if len(lines) > 2 else ["None."]


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e6 * seconds:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _speed(facts: Facts) -> list[str]:
    return [
        _us(facts["seconds"]),
        f"{facts['bytes_per_second'] / 1e9:.0f}",
        _percent(facts["bandwidth_share"]),
        _percent(facts["bound_share"]),
    ]


_SPEED = ("us", "GB/s", "of bandwidth", "bound over time")


def _operations(report: Facts) -> list[str]:
    timed = report["measurement"]
    header = ["operation", "shape", "parity", "error", "at most"]
    header += [*_SPEED, "reference over kernel"] if timed else []
    rows = []
    for facts in report["operations"]:
        row = [facts["operation"], facts["shape"]]
        if facts["parity"]:
            worst = max(facts["parity"], key=_badness)
            row += ["ok" if facts["ok"] else "**FAILED**"]
            row += [f"{worst['figure']} {show(worst['value'])}", f"{worst['limit']:.2g}"]
        else:
            row += ["**NOT CHECKED**", "the reference fails", "-"]
        if timed:
            speed = _speed(facts)
            if facts["cached"]:
                speed[2] += " *"
            slow = facts.get("reference_seconds")
            row += [*speed, f"{slow / facts['seconds']:.1f}x" if slow else "-"]
        rows.append(row)
    lines = _table(header, rows)
    if timed:
        lines += ["", "\\* few enough bytes to stay in the device's cache between launches."]
    return lines


def _badness(parity: Facts) -> float:
    value, limit = parity["value"], parity["limit"]
    if value is None:
        return float("inf")
    return value / limit if limit else value


def show(value: float | None) -> str:
    """A figure of a comparison; null is what no number is."""
    return "not a number" if value is None else f"{value:.2g}"


def _layers(report: Facts) -> list[str]:
    timed = report["measurement"]
    header = ["kind", "layer", "step", "TP", "finite", "experts", *(_SPEED if timed else ())]
    rows = []
    for facts in report["layers"]:
        row = [facts["kind"], str(facts["layer"]), facts["step"], str(facts["tensor"])]
        row += ["yes" if facts["ok"] else "**NO**", str(facts["active_experts"])]
        rows.append([*row, *(_speed(facts) if timed else ())])
    return [
        "The real layers with random weights at the shapes of one device of TP; sums over "
        "devices are left out.",
        "",
        *_table(header, rows),
    ]


def _extrapolated(report: Facts) -> list[str]:
    rows = [
        [
            facts["step"],
            str(facts["tensor"]),
            " + ".join(f"{1e3 * seconds:.2f}" for seconds in facts["stage_seconds"]),
            f"{1e3 * facts['seconds']:.2f}",
        ]
        for facts in report["extrapolated"]
    ]
    return [
        "Sums of the kinds' times over all layers: not measured, and without head, sampling "
        "and links.",
        "",
        *_table(["step", "TP", "ms by stage of two", "ms"], rows),
    ]


def _stage(report: Facts) -> list[str]:
    lines: list[str] = []
    for facts in report["stage"]:
        lines.append(
            f"{facts['layers']} layers from the first on, TP{facts['tensor']} shapes, "
            f"{facts['step']}, {facts['parameter_bytes'] / 2**30:.1f} GiB of parameters, results "
            f"{'finite' if facts['ok'] else '**NOT finite**'}; profile in `{facts['trace']}`."
        )
        if not report["measurement"]:
            continue
        lines += ["", *_table(_SPEED, [_speed(facts)]), ""]
        times = {
            layer["kind"]: layer["seconds"]
            for layer in report["layers"]
            if (layer["step"], layer["tensor"]) == (facts["step"], facts["tensor"])
        }
        if times.keys() >= set(facts["kinds"]):
            added = sum(times[kind] for kind in facts["kinds"])
            lines.append(f"Alone its layers take {1e3 * added:.3f} ms together.")
        lines.append(
            f"In the profiled step the device was busy {1e3 * facts['busy_seconds']:.3f} ms in "
            f"{facts['launches']} launches, {_percent(facts['kernel_share'])} of it in the "
            "handwritten kernels. The largest:"
        )
        rows = [
            [
                f"`{kernel['name'][:60]}`",
                "yes" if kernel["pallas"] else "no",
                str(kernel["launches"]),
                _us(kernel["seconds"]),
            ]
            for kernel in facts["largest"]
        ]
        lines += ["", *_table(["kernel", "handwritten", "launches", "us"], rows)]
    return lines or ["None."]


def _missing(report: Facts) -> list[str]:
    lines = [f"- {one['name']}: failed, {one['error']}" for one in report["failed"]]
    lines += [
        f"- {facts['operation']} {facts['shape']}: the reference fails, {facts['reference_error']}"
        for facts in report["operations"]
        if "reference_error" in facts
    ]
    lines += [f"- {name}: dropped, the time was up" for name in report["dropped"]]
    return lines or ["Nothing."]

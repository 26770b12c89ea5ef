"""What the compiled programs of a plan need, as plain facts and as text."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels.dispatch import Implementation
from pallas_kernels.rowwise import ROW_TILE
from sharding.compiled import StageProgram, StepKind, compile_programs
from sharding.deviceless import CHIPS
from sharding.fit import GIB, DeviceKind, Workload, component_bytes, gib, last_good
from sharding.hlo_text import parse
from sharding.kernel_report import KernelReport
from sharding.program_facts import Sizes, collectives, memory_use, moved_bytes
from sharding.roofline import active_experts, roofline
from sharding.temporaries import step_temporaries

Facts = dict[str, Any]
_NAMED = 5  # operations and consumers that are spelled out


def compile_facts(
    workload: Workload,
    kinds: Sequence[StepKind],
    *,
    device: str,
    implementation: Implementation,
    progress: bool = False,
) -> Facts:
    """Compiles the steps on every stage; what the programs hold, send and move, as JSON values.

    Args:
      workload: the partition and its sizes.
      kinds: the steps.
      device: kind of device to compile for.
      implementation: of the operations.
      progress: whether to show a progress bar on stderr.

    Raises:
      NoCompilerError: the `cuda12` extra is not installed.
    """
    programs = compile_programs(
        workload, kinds, device=device, implementation=implementation, progress=progress
    )
    return {
        "device": CHIPS[device].name,
        "implementation": implementation,
        "jax": jax.__version__,
        "programs": [program_facts(workload, program) for program in programs],
    }


def program_facts(workload: Workload, program: StageProgram) -> Facts:
    """One program, as JSON values."""
    kind, memory = program.kind, memory_use(program.compiled)
    tables = workload.stages()[program.stage].engram  # on the devices, but no argument of a step
    contents = workload.plan.stages[program.stage]
    boundary = next((b for b in workload.plan.boundaries if b.stage == program.stage), None)
    requests = min(kind.rows, kind.bucket.requests)
    tokens = kind.rows // requests * requests
    active = active_experts(workload.config, kind.rows)
    here = active * min(1.0, workload.tensor.experts / workload.config.n_routed_experts)
    text = parse(program.compiled.as_text())
    sizes = Sizes(experts=workload.tensor.experts, active=here, requests=requests)
    moved = moved_bytes(text, sizes)
    least = roofline(
        workload.config,
        contents,
        workload.tensor,
        tokens=tokens,
        requests=requests,
        context=max(0, workload.max_model_len - tokens // requests),
        active=active,
        boundary=boundary,
    )
    return {
        "stage": program.stage,
        "step": kind.name,
        "rows": kind.rows,
        "bucket": dataclasses.asdict(kind.bucket),
        "compile_seconds": round(program.seconds, 1),
        "memory": dataclasses.asdict(memory) | {"tables": tables, "total": memory.total + tables},
        "collectives": [dataclasses.asdict(found) for found in collectives(text)],
        "kernels": [dataclasses.asdict(kernel) for kernel in program.kernels],
        "faults": [fault for kernel in program.kernels for fault in _faults(kernel)],
        "moved": {
            "active_experts": round(here, 2),
            "bytes": sum(part.bytes for part in moved),
            "least": round(sum(row.bytes for row in least)),
            "operations": [dataclasses.asdict(part) for part in moved],
        },
    }


def _faults(kernel: KernelReport) -> tuple[str, ...]:
    return kernel.faults if kernel.pallas else ()


def compile_fit(workload: Workload, facts: Facts, kind: DeviceKind) -> str | None:
    """Why a compiled program does not fit a device, or None.

    The sentence names the program, what takes most of the device, and the longest prefill that
    does fit: of those compiled, and by the plan's estimate.
    """
    programs = facts["programs"]
    large = [p for p in programs if p["memory"]["total"] > kind.usable]
    if not large:
        return None
    worst = max(large, key=lambda p: p["memory"]["total"])
    held = dataclasses.replace(
        workload.stages()[worst["stage"]], temporaries=worst["memory"]["temporaries"]
    )
    parts = component_bytes(held)
    parts = {label.removesuffix(" (estimate)"): size for label, size in parts.items()}
    named = sorted(parts.items(), key=lambda item: -item[1])[:_NAMED]
    total = worst["memory"]["total"]
    return (
        f"{worst['step']} on stage {worst['stage']} needs {gib(total)} on each device, but a "
        f"{kind.name} has {gib(kind.usable)} for arrays: {gib(total - kind.usable)} short. The "
        f"largest: {', '.join(f'{name} {gib(size)}' for name, size in named)}. "
        f"{_largest_prefill(workload, facts, kind)}"
    )


def _largest_prefill(workload: Workload, facts: Facts, kind: DeviceKind) -> str:
    sizes = sorted({p["rows"] for p in facts["programs"] if p["step"].startswith("prefill")})
    fitting = [
        rows
        for rows in sizes
        if all(
            p["memory"]["total"] <= kind.usable
            for p in facts["programs"]
            if p["step"] == f"prefill-{rows}"
        )
    ]
    estimated = estimated_prefill(workload, facts, kind)
    if not estimated:
        return "No prefill fits"
    compiled = f"; prefill-{fitting[-1]} is compiled and fits" if fitting else ""
    return f"The largest prefill that fits is about {estimated} tokens in a microbatch{compiled}"


def estimated_prefill(workload: Workload, facts: Facts, kind: DeviceKind) -> int:
    """Tokens of the longest prefill that fits every stage, a multiple of 16; 0 if none does.

    The plan's estimate of a stage's temporaries is scaled to the largest program compiled for it.
    """
    most = workload.config.max_position_embeddings
    for stage in sorted({p["stage"] for p in facts["programs"]}):
        programs = [p for p in facts["programs"] if p["stage"] == stage]
        program = max(programs, key=lambda p: p["bucket"]["tokens"])
        memory, tokens = program["memory"], program["bucket"]["tokens"]
        room = kind.usable - (memory["total"] - memory["temporaries"])
        scale = memory["temporaries"] / _estimate(workload, stage, tokens)

        def fits(tiles: int, stage: int = stage, room: int = room, scale: float = scale) -> bool:
            return scale * _estimate(workload, stage, tiles * ROW_TILE) <= room

        most = min(most, ROW_TILE * last_good(fits, most // ROW_TILE))
    return most


def _estimate(workload: Workload, stage: int, tokens: int) -> int:
    limits = workload.limits()
    return step_temporaries(
        workload.config,
        workload.plan.stages[stage],
        workload.tensor,
        tokens=tokens,
        positions=limits.columns * limits.page_size,
        logit_rows=min(tokens, limits.logit_rows),
    )


def compile_text(facts: Facts, usable: int | None) -> list[str]:
    """Lines for a reader.

    Args:
      facts: see `compile_facts`.
      usable: bytes of a device for arrays, or None where no device was named.
    """
    lines = [
        f"Compiled for {facts['device']} that is not there (JAX {facts['jax']}, implementation "
        f"{facts['implementation']}); GiB of each device",
        "  stage  step            arguments   aliased  temporaries      peak     total  seconds",
    ]
    for program in facts["programs"]:
        memory = program["memory"]
        cells = [memory[n] for n in ("arguments", "aliased", "temporaries", "peak", "total")]
        line = f"  {program['stage']:<6} {program['step']:<14}" + "".join(
            f"{size / GIB:>{width}.3f}"
            for size, width in zip(cells, (11, 10, 13, 10, 10), strict=True)
        )
        line += f"{program['compile_seconds']:>9.1f}"
        if usable is not None:
            line += "  fits" if memory["total"] <= usable else "  DOES NOT FIT"
        lines.append(line)
    lines.append("Exchanged in a step, on each device")
    for program in facts["programs"]:
        found = ", ".join(
            f"{c['count']} {c['kind']} of {c['bytes'] / 1e6:.2f} MB together"
            for c in program["collectives"]
        )
        lines.append(f"  {_place(program)}: {found or 'nothing'}")
    lines.append("Moved in a step: operands and results of what runs by itself")
    for program in facts["programs"]:
        lines += _moved_text(program)
    return lines + _kernel_text(facts["programs"])


def _place(program: Facts) -> str:
    return f"stage {program['stage']}, {program['step']}"


def _moved_text(program: Facts) -> list[str]:
    moved = program["moved"]
    share = moved["bytes"] / moved["least"]
    operations = ", ".join(
        f"{part['name']} {part['bytes'] / 1e6:.1f}" for part in moved["operations"][:_NAMED]
    )
    return [
        f"  {_place(program)}: {moved['bytes'] / 1e6:.1f} MB with {moved['active_experts']:g} "
        f"active experts a layer, {share:.2f} times the least of {moved['least'] / 1e6:.1f} MB",
        f"    most by {operations} MB",
    ]


def _kernel_text(programs: Sequence[Facts]) -> list[str]:
    """One line per handwritten kernel, at its worst over all programs."""
    kernels: dict[str, list[Facts]] = {}
    others: list[Facts] = []
    for program in programs:
        for kernel in program["kernels"]:
            name = kernel["name"].split("__")[0]
            if kernel["pallas"]:
                kernels.setdefault(name, []).append(kernel)
            else:
                others.append(kernel)
    lines = ["Kernels                       launches  registers  spilled bytes  shared bytes"]
    rows = [*sorted(kernels.items()), ("the compiler's own", others)]
    for name, found in rows:
        if found:
            worst = [
                max(kernel[key] for kernel in found)
                for key in ("registers", "spill_bytes", "shared_bytes")
            ]
            launches = sum(kernel["launches"] for kernel in found)
            lines.append(f"  {name:<26}{launches:>10}{worst[0]:>11}{worst[1]:>15}{worst[2]:>14}")
    faults = sorted({fault for program in programs for fault in program["faults"]})
    return lines + [f"  FAULT: {fault}" for fault in faults]

"""What the headers of a checkpoint directory hold, and whether that is what its config says."""

import dataclasses
import pathlib
from typing import Any

from dsv41_jax.checkpoint.key_map import Component, expected_tensors, layout_faults
from dsv41_jax.checkpoint.manifest import Manifest
from dsv41_jax.checkpoint.reader import NOTHING, scan
from dsv41_jax.config import ModelConfig

_SHOWN = 40  # faults that the text spells out


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComponentTotal:
    """Tensors and bytes of one component: found, and described by the configuration."""

    tensors: int
    nbytes: int
    expected_tensors: int
    expected_nbytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """A checkpoint directory, by its headers alone.

    Attributes:
      directory: where it lies.
      shards: files that hold tensors.
      components: totals by component, largest first.
      faults: one sentence for each difference to the configuration; none if it is complete.
    """

    directory: str
    shards: int
    components: dict[Component, ComponentTotal]
    faults: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether everything is there, and nothing else."""
        return not self.faults


def inspect_directory(directory: str | pathlib.Path, config: ModelConfig) -> Inspection:
    """Compares the headers of a checkpoint directory with the configuration's layout.

    Tensors of a shard that cannot be read are not reported again one by one. Of a converted
    directory the shards hold what is not among the parameters; its parts are checked by their
    sizes.

    Raises:
      NoCheckpointError: the path is no checkpoint directory.
    """
    expected = expected_tensors(config)
    manifest = Manifest.read(directory)
    converted: tuple[str, ...] = ()
    if manifest is not None:
        expected = {name: spec for name, spec in expected.items() if not spec.in_params}
        converted = manifest.faults(directory)
    found = scan(directory) if expected else NOTHING
    wanted = {name: spec for name, spec in expected.items() if name not in found.unread}
    faults = [*converted, *found.faults, *layout_faults(wanted, found.tensors)]
    totals: dict[Component, list[int]] = {}
    for name, spec in expected.items():
        total = totals.setdefault(spec.component, [0, 0, 0, 0])
        tensor = found.tensors.get(name)
        if tensor is not None:
            total[0] += 1
            total[1] += tensor.nbytes
        total[2] += 1
        total[3] += spec.nbytes
    ordered = sorted(totals.items(), key=lambda item: -item[1][3])
    return Inspection(
        directory=str(directory),
        shards=found.shards,
        components={
            component: ComponentTotal(
                tensors=total[0],
                nbytes=total[1],
                expected_tensors=total[2],
                expected_nbytes=total[3],
            )
            for component, total in ordered
        },
        faults=tuple(faults),
    )


def inspection_facts(inspection: Inspection) -> dict[str, Any]:
    """The inspection as JSON values."""
    parts = inspection.components.values()
    return {
        "directory": inspection.directory,
        "complete": inspection.complete,
        "shards": inspection.shards,
        "tensors": sum(part.tensors for part in parts),
        "bytes": sum(part.nbytes for part in parts),
        "components": {
            name: dataclasses.asdict(part) for name, part in inspection.components.items()
        },
        "faults": list(inspection.faults),
    }


def inspection_text(inspection: Inspection) -> str:
    """The inspection for a reader."""
    parts = inspection.components
    lines = [
        f"{inspection.directory}: {inspection.shards} shards",
        f"  {'component':<10} {'tensors':>8} {'of':>8} {'GiB':>10} {'of':>10}",
    ]
    lines += [_row(name, part) for name, part in parts.items()]
    total = [sum(column) for column in zip(*map(dataclasses.astuple, parts.values()), strict=True)]
    names = [field.name for field in dataclasses.fields(ComponentTotal)]
    lines.append(_row("total", ComponentTotal(**dict(zip(names, total, strict=True)))))
    if inspection.complete:
        return "\n".join([*lines, "complete: every tensor that config.json describes, no other"])
    lines.append(f"{len(inspection.faults)} faults:")
    lines += [f"  {fault}" for fault in inspection.faults[:_SHOWN]]
    if len(inspection.faults) > _SHOWN:
        lines.append(f"  and {len(inspection.faults) - _SHOWN} more; --json lists them all")
    return "\n".join(lines)


def _row(name: str, part: ComponentTotal) -> str:
    return (
        f"  {name:<10} {part.tensors:>8} {part.expected_tensors:>8} "
        f"{part.nbytes / 2**30:>10.3f} {part.expected_nbytes / 2**30:>10.3f}"
    )

"""What says that a directory is a converted checkpoint, and whether it is a whole one.

A directory `stage_{i}/{unit}` holds one top-level entry of the parameter tree. Orbax gives it its
name only when it is whole, and the manifest says that the conversion is complete only when all
are there, so that an interrupted conversion is neither mistaken for a whole one nor lost.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Self

from dsv41_jax.checkpoint.errors import CheckpointError
from dsv41_jax.checkpoint.reader import scan

MANIFEST_NAME = "conversion.json"
_FORMAT = 1
_SAMPLE = 4096  # bytes of a shard's data that its fingerprint covers, at three places


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a converted directory was made from, and whether it is whole.

    Attributes:
      source: fingerprint of the directory that was converted.
      stages: layers of each stage.
      tensor_parallel_size: shards of each split parameter.
      expert_parallel: whether routed experts are split by expert.
      units: stage of each top-level entry of the parameter tree.
      sizes: files and bytes of each entry; empty until the conversion is complete.
    """

    source: str
    stages: tuple[int, ...]
    tensor_parallel_size: int
    expert_parallel: bool
    units: dict[str, int]
    sizes: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every entry was written."""
        return self.sizes.keys() == self.units.keys()

    @classmethod
    def read(cls, directory: str | pathlib.Path) -> Self | None:
        """The manifest of a directory; None where it is not a converted one.

        Raises:
          CheckpointError: there is one, but it cannot be understood.
        """
        path = pathlib.Path(directory) / MANIFEST_NAME
        if not path.is_file():
            return None
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if raw.pop("format") != _FORMAT:
                raise ValueError("it has another format")
            raw["stages"] = tuple(raw["stages"])
            raw["sizes"] = {unit: tuple(size) for unit, size in raw["sizes"].items()}
            return cls(**raw)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                str(directory), [f"{MANIFEST_NAME} cannot be understood: {error}"]
            ) from None

    def write(self, directory: pathlib.Path) -> None:
        """Writes the manifest so that it is there as a whole or not at all."""
        content = json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1)
        made = directory / f"{MANIFEST_NAME}.tmp"
        made.write_text(content, encoding="utf-8")
        made.rename(directory / MANIFEST_NAME)

    def unit_directory(self, directory: str | pathlib.Path, unit: str) -> pathlib.Path:
        """Where one top-level entry lies."""
        return pathlib.Path(directory).resolve() / f"stage_{self.units[unit]}" / unit

    def faults(self, directory: str | pathlib.Path) -> tuple[str, ...]:
        """One sentence for each sign that the conversion was interrupted or lost files."""
        if not self.complete:
            done = sum(self.unit_directory(directory, unit).is_dir() for unit in self.units)
            return (
                f"its conversion was interrupted: {done} of {len(self.units)} parts are there; "
                "run sharding.convert again with the same arguments to continue it",
            )
        faults = []
        for unit, size in self.sizes.items():
            path = self.unit_directory(directory, unit)
            found = directory_size(path)
            if found != size:
                faults.append(
                    f"{path.parent.name}/{unit} has {found[0]} files of {found[1]} bytes; "
                    f"{size[0]} files of {size[1]} bytes were written"
                )
        return tuple(faults)

    def check(self, directory: str | pathlib.Path) -> None:
        """Refuses a conversion that was interrupted or that lost files.

        Raises:
          CheckpointError: names what is missing.
        """
        faults = self.faults(directory)
        if faults:
            raise CheckpointError(str(directory), faults)


def directory_size(path: pathlib.Path) -> tuple[int, int]:
    """Files below a directory, and their bytes."""
    sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
    return len(sizes), sum(sizes)


def fingerprint(directory: str | pathlib.Path) -> str:
    """Names a checkpoint by its configuration, its headers and samples of its data.

    Raises:
      CheckpointError: the directory is no checkpoint.
    """
    directory = pathlib.Path(directory)
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    tensors = scan(directory).tensors
    for name in sorted({tensor.shard for tensor in tensors.values()}):
        with (directory / name).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            digest.update(name.encode() + file.read(length))
            size = file.seek(0, os.SEEK_END)
            digest.update(str(size).encode())
            for place in (8 + length, (8 + length + size) // 2, max(0, size - _SAMPLE)):
                file.seek(place)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()

"""Recorded arrays of a directory, and the model that stands beside them."""

import dataclasses
import functools
import json
import pathlib
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dsv41_jax.checkpoint import load_params
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_table import EngramTables
from dsv41_jax.hf_config import load_config


class VectorError(ValueError):
    """A directory or a file that holds no vectors of the kind asked for."""


class Vectors(Mapping[str, np.ndarray]):
    """Arrays of one npz file; one that is missing is named with its file."""

    def __init__(self, path: pathlib.Path) -> None:
        """Opens a file.

        Raises:
          VectorError: it is missing or no npz file.
        """
        self._path = path
        try:
            self._arrays = dict(np.load(path, allow_pickle=False))
        except FileNotFoundError:
            raise VectorError(f"{path.parent} has no {path.name}") from None
        except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise VectorError(f"{path} cannot be read as npz: {error}") from None

    def __getitem__(self, name: str) -> np.ndarray:
        try:
            return self._arrays[name]
        except KeyError:
            raise VectorError(f"{self._path} has no array {name}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def token_ids(self, name: str, vocab_size: int) -> np.ndarray:
        """int64[...] ids of a non-empty array.

        Raises:
          VectorError: there is none, or an id is outside the vocabulary.
        """
        ids = self[name].astype(np.int64)
        if not ids.size:
            raise VectorError(f"{self._path}: {name} is empty; it needs at least one token id")
        wrong = ids[(ids < 0) | (ids >= vocab_size)]
        if wrong.size:
            raise VectorError(
                f"{self._path}: {name} holds id {wrong[0]}; the vocabulary is 0..{vocab_size - 1}"
            )
        return ids

    def prefill_len(self, total: int) -> int:
        """How many ids are the prompt.

        Raises:
          VectorError: no prompt, or one longer than the ids.
        """
        length = int(self["prefill_len"])
        if not 0 < length <= total:
            raise VectorError(f"{self._path}: prefill_len is {length}; there are {total} input_ids")
        return length


@dataclasses.dataclass(frozen=True)
class Directory:
    """A checkpoint directory with vectors; every part is read when it is first needed.

    Attributes:
      path: the directory.
      progress: whether to show a progress bar while parameters are loaded.
    """

    path: pathlib.Path
    progress: bool = True

    def has(self, case: str) -> bool:
        """Whether the vectors of a case are here."""
        return (self.path / f"golden_{case}.npz").is_file()

    def vectors(self, case: str) -> Vectors:
        """Arrays of `golden_{case}.npz`."""
        return Vectors(self.path / f"golden_{case}.npz")

    @functools.cached_property
    def config(self) -> ModelConfig:
        """The configuration of the directory's checkpoint."""
        return load_config(self.path)

    @functools.cached_property
    def params(self) -> dict[str, Any]:
        """The text model's parameters."""
        return load_params(self.path, self.config, progress=self.progress)

    @functools.cached_property
    def engram(self) -> EngramTables | None:
        """The host's tables; None where the model has no Engram."""
        return EngramTables.open(self.path, self.config) if self.config.engram else None

    def json(self, name: str) -> Any:
        """A JSON file of the directory.

        Raises:
          VectorError: it is missing or no JSON.
        """
        file = self.path / name
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise VectorError(f"{self.path} has no {name}") from None
        except (OSError, ValueError) as error:
            raise VectorError(f"{file} cannot be read as JSON: {error}") from None

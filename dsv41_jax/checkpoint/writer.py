"""Safetensors shards and their index, written."""

import json
import os
import pathlib
from collections.abc import Iterable

import numpy as np

from dsv41_jax.checkpoint.key_map import TensorSpec
from dsv41_jax.checkpoint.reader import INDEX_NAME


def write_shard(
    path: pathlib.Path, specs: dict[str, TensorSpec], arrays: Iterable[np.ndarray | None]
) -> None:
    """Writes one safetensors file.

    Args:
      path: the file.
      specs: the tensors, in the order of their data.
      arrays: their values in the same order, each written before the next is asked for; None
        leaves a hole that reads as zeros and takes no room on the disk.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in specs.items():
        begin, end = end, end + spec.nbytes
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for spec, array in zip(specs.values(), arrays, strict=True):
            if array is None:
                file.seek(spec.nbytes, os.SEEK_CUR)
            else:
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        file.truncate(8 + len(raw) + end)


def write_index(directory: pathlib.Path, weight_map: dict[str, str], nbytes: int) -> None:
    """Writes the index: which shard holds each tensor, and their bytes together."""
    index = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=1), encoding="utf-8")

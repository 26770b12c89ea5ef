"""Safetensors shards by memory map: headers parsed and checked, tensors read in place.

File format: 8 bytes little-endian header length, a JSON header (name -> dtype, shape and the
byte range within the data), then the data without gaps.
"""

import collections
import dataclasses
import json
import math
import mmap
import pathlib
import re
import struct
from collections.abc import Callable
from typing import Any, Self

import ml_dtypes
import numpy as np

from dsv41_jax.checkpoint.errors import CheckpointError, NoCheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "BF16": ml_dtypes.bfloat16,
        "F16": np.float16,
        "F32": np.float32,
        "F64": np.float64,
        "I8": np.int8,
        "U8": np.uint8,
        "BOOL": np.bool_,
        "I16": np.int16,
        "U16": np.uint16,
        "I32": np.int32,
        "U32": np.uint32,
        "I64": np.int64,
        "U64": np.uint64,
    }.items()
}

_MADV_POPULATE_READ = 22  # Linux; Python 3.11 has no name for it
_POPULATE_BYTES = 256 << 20
_MAX_HEADER = 100_000_000  # the format's own limit
_SHARD_NAME = re.compile(r"model-\d+-of-(\d+)\.safetensors")


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies.

    Attributes:
      dtype: name of the dtype as the file spells it, a key of `DTYPES`.
      shape: as stored.
      shard: file name within the directory.
      begin, end: byte range within that file.
    """

    dtype: str
    shape: tuple[int, ...]
    shard: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size of its data."""
        return self.end - self.begin


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        [(name, _)] = collections.Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it names {name} twice")
    return result


def _read_json_header(path: pathlib.Path, size: int) -> tuple[dict[str, Any], int]:
    """Header object and the offset of the data; ValueError with the rest of a sentence."""
    if size < 8:
        raise ValueError(f"is truncated: {size} bytes are too few for a safetensors file")
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > size - 8:
            raise ValueError(
                f"gives a header length of {length} bytes but has only {size - 8} after it; "
                "it is truncated or no safetensors file"
            )
        if length > _MAX_HEADER:
            raise ValueError(f"gives a header length of {length} bytes, above {_MAX_HEADER}")
        raw = file.read(length)
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"has a bad header: {error}") from None
    if not isinstance(header, dict):
        raise ValueError("has a bad header: it is not a JSON object")
    return header, 8 + length


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _parse_entry(shard: str, data: int, entry: Any) -> StoredTensor:
    """One header entry; ValueError with the rest of a sentence about the tensor."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError("has a header entry without dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"has the unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise ValueError(f"has the shape {shape!r}, which is no list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise ValueError(f"has data_offsets {offsets!r}, which is no pair of byte offsets")
    begin, end = offsets
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != needed:
        raise ValueError(f"spans bytes {begin} to {end}, but {dtype} {shape} takes {needed} bytes")
    return StoredTensor(dtype, tuple(shape), shard, data + begin, data + end)


def _layout_faults(tensors: dict[str, StoredTensor], shard: str, data: int, size: int) -> list[str]:
    """Faults of the byte ranges of one shard taken together."""
    faults = []
    reached, before = data, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin < reached:
            faults.append(f"{shard}: the bytes of {name} overlap those of {before}")
        elif tensor.begin > reached:
            faults.append(
                f"{shard}: {tensor.begin - reached} bytes between {before} and {name} "
                "belong to no tensor"
            )
        if tensor.end >= reached:
            reached, before = tensor.end, name
    if reached > size:
        faults.append(
            f"{shard} is truncated: its header describes {reached} bytes (up to {before}), "
            f"the file has {size}"
        )
    elif reached < size:
        faults.append(f"{shard} has {size - reached} bytes after its last tensor, {before}")
    return faults


def read_header(path: pathlib.Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """Reads one shard's header.

    Returns:
      The tensors by name, and one sentence for each fault found.
    """
    shard = path.name
    try:
        size = path.stat().st_size
        header, data = _read_json_header(path, size)
    except OSError as error:
        return {}, [f"{shard} cannot be read: {error.strerror}"]
    except ValueError as error:
        return {}, [f"{shard} {error}"]
    header.pop("__metadata__", None)
    tensors, faults = {}, []
    for name, entry in header.items():
        try:
            tensors[name] = _parse_entry(shard, data, entry)
        except ValueError as error:
            faults.append(f"{shard}: {name} {error}")
    if not faults:
        faults = _layout_faults(tensors, shard, data, size)
    return tensors, faults


def _read_index(directory: pathlib.Path) -> dict[str, str]:
    """Tensor name to shard; ValueError with the whole sentence."""
    path = directory / INDEX_NAME
    try:
        index = json.loads(path.read_bytes().decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{INDEX_NAME} is no valid JSON: {error}") from None
    except OSError as error:
        raise ValueError(f"{INDEX_NAME} cannot be read: {error.strerror}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f'{INDEX_NAME} has no "weight_map" of tensor names to shard files')
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or pathlib.PurePath(shard).name != shard:
            raise ValueError(
                f"{INDEX_NAME} places {name} in {shard!r}; expected a file name in the directory"
            )
    return weight_map


def _index_faults(
    weight_map: dict[str, str], shards: dict[str, dict[str, StoredTensor]]
) -> list[str]:
    """Faults between the index and the shards that could be read."""
    faults = [
        f"{INDEX_NAME} places {name} in {shard}, which does not hold it"
        for name, shard in weight_map.items()
        if shard in shards and name not in shards[shard]
    ]
    for shard, tensors in shards.items():
        for name in tensors:
            indexed = weight_map.get(name)
            if indexed is None:
                faults.append(f"{shard} holds {name}, which {INDEX_NAME} does not name")
            elif indexed != shard and name in shards.get(indexed, ()):
                faults.append(f"{name} is in two shards, {indexed} and {shard}")
    return faults


def _shard_names(directory: pathlib.Path) -> tuple[dict[str, str] | None, list[str]]:
    """The index, if there is one, and the shards to read; ValueError with the whole sentence."""
    if not directory.is_dir():
        state = "is no directory" if directory.exists() else "does not exist"
        raise ValueError(f"it {state}; expected a checkpoint directory")
    if (directory / INDEX_NAME).exists():
        weight_map = _read_index(directory)
        return weight_map, sorted(set(weight_map.values()))
    if (directory / SINGLE_NAME).exists():
        return None, [SINGLE_NAME]
    loose = sum(bool(_SHARD_NAME.fullmatch(path.name)) for path in directory.iterdir())
    if loose:
        raise ValueError(f"it has {loose} shards but no {INDEX_NAME} that says what is in them")
    raise ValueError(
        f"it is no checkpoint directory: it has neither {INDEX_NAME} nor {SINGLE_NAME}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scan:
    """What the headers of a checkpoint directory say.

    Attributes:
      tensors: of all shards that are without a fault, by name.
      shards: how many shards there should be.
      faults: one sentence each.
      unread: tensors that the index places in shards with a fault.
    """

    tensors: dict[str, StoredTensor]
    shards: int
    faults: tuple[str, ...]
    unread: frozenset[str]


NOTHING = Scan(tensors={}, shards=0, faults=(), unread=frozenset())


def scan(path: str | pathlib.Path) -> Scan:
    """Reads the index and the headers of a checkpoint directory, without the data.

    Raises:
      NoCheckpointError: the path is no checkpoint directory, or its index cannot be read.
    """
    directory = pathlib.Path(path)
    try:
        weight_map, names = _shard_names(directory)
    except ValueError as error:
        raise NoCheckpointError(str(directory), [str(error)]) from None
    shards: dict[str, dict[str, StoredTensor]] = {}
    faults = []
    for shard in names:
        if not (directory / shard).is_file():
            faults.append(f"{INDEX_NAME} names {shard}, which is missing")
            continue
        tensors, found = read_header(directory / shard)
        faults += found
        if not found:
            shards[shard] = tensors
    unread: frozenset[str] = frozenset()
    if weight_map is not None:
        faults += _index_faults(weight_map, shards) + _revision_faults(directory, names)
        unread = frozenset(name for name, shard in weight_map.items() if shard not in shards)
    merged = {name: t for tensors in shards.values() for name, t in tensors.items()}
    return Scan(tensors=merged, shards=len(names), faults=tuple(faults), unread=unread)


def _revision_faults(directory: pathlib.Path, names: list[str]) -> list[str]:
    """Signs that files of two revisions lie in one directory."""
    known = set(names)
    faults = [
        f"{file.name} is not named by {INDEX_NAME}; it belongs to another revision"
        for file in sorted(directory.iterdir())
        if _SHARD_NAME.fullmatch(file.name) and file.name not in known
    ]
    totals = {match[1]: name for name in names if (match := _SHARD_NAME.fullmatch(name))}
    if len(totals) > 1:
        first, second, *_ = totals.values()
        faults.append(f"{INDEX_NAME} names {first} and {second}: shards of two revisions are mixed")
    return faults


class Checkpoint:
    """The tensors of a checkpoint directory, memory-mapped on first use.

    Attributes:
      directory: where it lies.
      tensors: all tensors by name.
    """

    def __init__(self, directory: pathlib.Path, tensors: dict[str, StoredTensor]) -> None:
        self.directory = directory
        self.tensors = tensors
        self._maps: dict[str, mmap.mmap] = {}

    @classmethod
    def open(cls, path: str | pathlib.Path) -> Self:
        """Reads the index and all headers, without the data.

        Raises:
          NoCheckpointError: the path is no checkpoint directory.
          CheckpointError: lists every fault of the index, the headers and the byte ranges.
        """
        found = scan(path)
        if found.faults:
            raise CheckpointError(str(path), found.faults)
        return cls(pathlib.Path(path), found.tensors)

    def _map(self, shard: str) -> mmap.mmap:
        if shard not in self._maps:
            with (self.directory / shard).open("rb") as file:
                self._maps[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[shard]

    def read(self, name: str) -> np.ndarray:
        """A read-only view of one tensor's bytes in the file, with its dtype and shape."""
        tensor = self.tensors[name]
        dtype = DTYPES[tensor.dtype]
        count = tensor.nbytes // dtype.itemsize
        view = np.frombuffer(self._map(tensor.shard), dtype, count, tensor.begin)
        return view.reshape(tensor.shape)

    def read_bytes(self, name: str) -> np.ndarray:
        """Like `read`, as uint8; the last axis counts bytes."""
        return self.read(name).view(np.uint8)

    def advise(self, name: str, advice: int) -> None:
        """Passes a `mmap.MADV_*` hint for the pages of one tensor to the system."""
        tensor = self.tensors[name]
        start = tensor.begin // mmap.PAGESIZE * mmap.PAGESIZE
        self._map(tensor.shard).madvise(advice, start, tensor.end - start)

    def populate(self, name: str, progress: Callable[[int], object]) -> None:
        """Reads one tensor into the page cache and maps its pages, some at a time.

        Args:
          name: the tensor.
          progress: told how many bytes came in since the last call.
        """
        tensor, held = self.tensors[name], self._map(self.tensors[name].shard)
        for begin in range(tensor.begin, tensor.end, _POPULATE_BYTES):
            start = begin // mmap.PAGESIZE * mmap.PAGESIZE
            end = min(begin + _POPULATE_BYTES, tensor.end)
            try:
                held.madvise(_MADV_POPULATE_READ, start, end - start)
            except OSError:  # a kernel before 5.14: read one byte of every page
                bytes(held[start : end : mmap.PAGESIZE])
            progress(end - begin)

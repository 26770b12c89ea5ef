"""A step as plain bytes: what process 0 sends to the others, and nothing that could run there.

A message is the length of its header (4 bytes, big-endian), the header in JSON (the kind, and name,
dtype and shape of every array), then the arrays' bytes in that order.
"""

import dataclasses
import math
import struct
from collections.abc import Mapping, Sequence

import numpy as np
import orjson

from dsv41_jax.host_batch import RequestRows
from dsv41_jax.sampling import LogitChanges, SamplingBatch

_LENGTH = struct.Struct(">I")
_DTYPES = {str(np.dtype(name)) for name in ("int32", "int64", "uint32", "float32")}
_LISTS = ("token_ids", "history", "window_pages", "global_pages")
_NUMBERS = ("start", "slot", "logits", "late_from")
_COLUMNS = tuple(f.name for f in dataclasses.fields(SamplingBatch) if f.name != "changes")
_TABLES = tuple(f.name for f in dataclasses.fields(LogitChanges))

Arrays = Mapping[str, np.ndarray]


class MessageError(ValueError):
    """Bytes that are no message of this version."""


def encode(arrays: Arrays) -> bytes:
    """Arrays as bytes; their dtypes are those of steps."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    header = orjson.dumps(
        [[name, str(array.dtype), list(array.shape)] for name, array in contiguous.items()]
    )
    header += b" " * (-(_LENGTH.size + len(header)) % 8)  # what follows is aligned
    parts = [_LENGTH.pack(len(header)), header, *(a.tobytes() for a in contiguous.values())]
    return b"".join(parts)


def decode(message: bytes) -> dict[str, np.ndarray]:
    """The arrays of `encode`, read-only.

    Raises:
      MessageError: the bytes say something else.
    """
    arrays, first = {}, _LENGTH.size
    try:
        (length,) = _LENGTH.unpack_from(message)
        described = orjson.loads(message[first : first + length])
        first += length
        for name, dtype, shape in described:
            if dtype not in _DTYPES or any(type(n) is not int or n < 0 for n in shape):
                raise MessageError(f"{name!r} of a step has dtype {dtype!r} and shape {shape!r}")
            count = math.prod(shape)
            array = np.frombuffer(message, dtype, count, first)
            arrays[name] = array.reshape(shape)
            first += array.nbytes
    except MessageError:
        raise
    except (struct.error, ValueError, TypeError) as error:
        raise MessageError(f"a message of {len(message)} bytes is no step: {error}") from error
    if first != len(message):
        raise MessageError(f"a message has {len(message) - first} bytes more than its arrays")
    return arrays


def encode_step(rows: Sequence[RequestRows], sampling: SamplingBatch) -> bytes:
    """A step: its requests' rows and how their tokens are chosen.

    The tables of changes are left out where no row has any.
    """
    lists = [np.asarray(getattr(row, name), np.int32) for row in rows for name in _LISTS]
    arrays = {
        "numbers": np.array(
            [[getattr(row, name) for name in _NUMBERS] for row in rows], np.int64
        ).reshape(len(rows), len(_NUMBERS)),
        "lengths": np.array([len(values) for values in lists], np.int64),
        "values": np.concatenate([np.zeros(0, np.int32), *lists]),
    }
    arrays |= {name: np.asarray(getattr(sampling, name)) for name in _COLUMNS}
    if (arrays["change_row"] >= 0).any():
        arrays |= {name: np.asarray(getattr(sampling.changes, name)) for name in _TABLES}
    return encode(arrays)


def decode_step(
    message: bytes, no_changes: LogitChanges
) -> tuple[list[RequestRows], SamplingBatch]:
    """The step that `encode_step` was given.

    Args:
      message: its bytes.
      no_changes: tables for a step in which no row has any.

    Raises:
      MessageError: the bytes say something else.
    """
    arrays = decode(message)
    missing = {"numbers", "lengths", "values", *_COLUMNS} - arrays.keys()
    if missing:
        raise MessageError(f"a step has no {', '.join(sorted(missing))}")
    numbers, lengths = arrays["numbers"], arrays["lengths"]
    if numbers.shape[1:] != (len(_NUMBERS),) or len(lengths) != len(numbers) * len(_LISTS):
        raise MessageError(f"a step has {len(lengths)} lists for {len(numbers)} requests")
    if lengths.sum() != len(arrays["values"]) or (lengths < 0).any():
        raise MessageError(f"the lists of a step do not have {len(arrays['values'])} values")
    lists = np.split(arrays["values"], np.cumsum(lengths)[:-1]) if len(lengths) else []
    rows = []
    for index, row in enumerate(numbers.tolist()):
        own = lists[index * len(_LISTS) : (index + 1) * len(_LISTS)]
        rows.append(
            RequestRows(
                **dict(zip(_LISTS, own, strict=True)), **dict(zip(_NUMBERS, row, strict=True))
            )
        )
    changes = no_changes
    if _TABLES[0] in arrays:
        if set(_TABLES) - arrays.keys():
            raise MessageError("a step has some tables of changes but not all")
        changes = LogitChanges(**{name: arrays[name] for name in _TABLES})
    columns = {name: arrays[name] for name in _COLUMNS}
    return rows, SamplingBatch(**columns, changes=changes)

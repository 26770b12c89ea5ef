"""How far a kernel's results are from its reference's, and how far they may be."""

import dataclasses
import math
from typing import Any

import numpy as np

from pallas_kernels.packed_rows import PackedRows

_ULP = 2.0**-7  # of a bf16 value, relative, at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deviation:
    """One figure of a comparison.

    Attributes:
      figure: what it is.
      value: what was found; NaN where the results are.
      limit: most that may be found.
    """

    figure: str
    value: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether the limit is kept; by NaN it is not."""
        return self.value <= self.limit

    def json(self) -> dict[str, str | float | bool | None]:
        """As JSON values; what is not finite is null."""
        value = self.value if math.isfinite(self.value) else None
        return {"figure": self.figure, "value": value, "limit": self.limit, "ok": self.ok}


def compare(operation: str, found: Any, wanted: Any, arguments: Any) -> list[Deviation]:
    """Compares results of an operation.

    Products of equal bf16 values differ by the order of float32 sums, and by what tensor cores
    cut off. A bf16 result may then fall to the other side, and so may an FP8 code inside the
    experts. Attention rounds its probabilities against other maxima. What is chosen is exact.

    Args:
      operation: name of its module, with a dot and which one where it has several.
      found, wanted: results of the kernel and of the reference.
      arguments: of both; written rows are told from others by the slots.

    Raises:
      ValueError: an operation without limits.
    """
    if operation == "kv_write":
        return _written_rows(found, wanted, np.asarray(arguments[1]))
    if operation == "hyper_connections.mixes":
        worst = max(
            float(np.max(np.abs(a - b)))
            for a, b in zip(map(_float, found), map(_float, wanted), strict=True)
        )
        return [Deviation(figure="largest difference", value=worst, limit=1e-5)]
    if operation == "hyper_connections.collapse_norm":
        found, wanted = (np.stack([_float(a) for a in pair]) for pair in (found, wanted))
        return _rounded(found, wanted)
    found, wanted = _float(found), _float(wanted)
    match operation:
        case "scaled_matmul" | "dense_matmul" | "index_topk.scores":
            return [_of_largest(found, wanted, 1e-5)]
        case "rms_norm" | "hyper_connections.expand":
            return _rounded(found, wanted)
        case "grouped_matmul":
            scale, error = float(np.sqrt(np.mean(np.square(wanted)))), np.abs(found - wanted)
            mean, worst = float(np.mean(error)) / scale, float(np.max(error)) / scale
            return [
                Deviation(figure="mean difference over RMS", value=mean, limit=2**-10),
                Deviation(figure="largest difference over RMS", value=worst, limit=2**-4),
            ]
        case "sparse_attention":
            allowed = 2**-8 + 2**-6 * np.abs(wanted)
            worst = float(np.max(np.abs(found - wanted) / allowed))
            return [Deviation(figure="difference over 2^-8 + 2^-6 of it", value=worst, limit=1)]
        case "index_topk.topk" | "index_topk.candidates":
            return [_unequal("unequal choices", found, wanted, 0)]
        case _:
            raise ValueError(f"{operation} has no limits to compare by")


def _float(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float32)


def _of_largest(found: np.ndarray, wanted: np.ndarray, limit: float) -> Deviation:
    finite = np.isfinite(wanted)
    same = np.array_equal(finite, np.isfinite(found))
    found, wanted = found[finite], wanted[finite]
    worst = np.max(np.abs(found - wanted), initial=0) / np.max(np.abs(wanted), initial=1e-30)
    return Deviation(
        figure="difference over largest", value=float(worst) if same else np.nan, limit=limit
    )


def _rounded(found: np.ndarray, wanted: np.ndarray) -> list[Deviation]:
    """bf16 results of float32 sums in another order."""
    allowed = _ULP * (np.abs(wanted) + np.sqrt(np.mean(np.square(wanted))) / 8)
    worst = float(np.max(np.abs(found - wanted) / allowed))
    return [
        Deviation(figure="difference over a rounding", value=worst, limit=1),
        _unequal("unequal values", found, wanted, 0.01),
    ]


def _unequal(figure: str, found: np.ndarray, wanted: np.ndarray, limit: float) -> Deviation:
    share = float(np.mean(found != wanted))
    return Deviation(figure=figure, value=share, limit=limit)


def _written_rows(found: PackedRows, wanted: PackedRows, slots: np.ndarray) -> list[Deviation]:
    def split(rows: PackedRows) -> tuple[np.ndarray, np.ndarray]:
        together = np.concatenate([np.asarray(rows.codes), np.asarray(rows.scales)], axis=1)
        return together[slots], np.delete(together, slots, axis=0)

    (got, got_others), (want, want_others) = split(found), split(wanted)
    return [
        _unequal("unequal bytes of written rows", got, want, 0.01),
        _unequal("unequal bytes of other rows", got_others, want_others, 0),
    ]

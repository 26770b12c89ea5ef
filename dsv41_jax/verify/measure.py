"""Comparisons of computed rows with recorded ones, and their figures."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from dsv41_jax.verify.vectors import VectorError

CLOSE = 1e-3  # relative error below which a row counts as the same computation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """What a comparison found, row by row; rows of several layers may be pooled.

    Attributes:
      equal: bool[n], whether a row is bit-equal.
      rel: float64[n], L2 norm of the difference over the recorded row's norm, or None.
      overlap: float64[n], agreement of sets (or of the arg max), or None.
      distance: float64[n], absolute difference or distance in ulps, or None.
    """

    equal: np.ndarray
    rel: np.ndarray | None = None
    overlap: np.ndarray | None = None
    distance: np.ndarray | None = None


def pool(parts: Iterable[Rows]) -> Rows:
    """All rows of some comparisons of the same kind."""
    parts = list(parts)

    def joined(name: str) -> np.ndarray | None:
        arrays = [getattr(part, name) for part in parts]
        return None if arrays[0] is None else np.concatenate(arrays)

    fields = (field.name for field in dataclasses.fields(Rows))
    return Rows(**{name: joined(name) for name in fields})


def _checked(name: str, got: Any, want: Any) -> tuple[np.ndarray, np.ndarray]:
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        raise VectorError(
            f"{name} is recorded with shape {want.shape}, but the configuration gives {got.shape}"
        )
    return got, want


def compare_rows(name: str, got: Any, want: Any) -> Rows:
    """Rows along the first axis of two float arrays."""
    got, want = _checked(name, got, want)
    got, want = (_flat(a.astype(np.float32)) for a in (got, want))
    return Rows(equal=np.all(got == want, axis=1), rel=_relative(got, want))


def _flat(x: np.ndarray) -> np.ndarray:
    """One line per row of the first axis; a scalar is one row."""
    x = np.atleast_1d(x)
    return x.reshape(len(x), math.prod(x.shape[1:]))


def _relative(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    got, want = got.astype(np.float64), want.astype(np.float64)
    error, norm = np.linalg.norm(got - want, axis=1), np.linalg.norm(want, axis=1)
    undefined = np.where(error == 0, 0.0, np.inf)
    return np.where(norm > 0, error / np.where(norm > 0, norm, 1), undefined)


def compare_exact(name: str, got: Any, want: Any) -> Rows:
    """Rows along the first axis of two arrays of bytes, ids or exact values."""
    got, want = _checked(name, got, want)
    return Rows(equal=np.all(_flat(got == want), axis=1))


def compare_absolute(name: str, got: Any, want: Any) -> Rows:
    """Single elements, with their absolute difference."""
    got, want = (a.ravel() for a in _checked(name, got, want))
    error = np.abs(got.astype(np.float64) - want.astype(np.float64))
    return Rows(equal=got == want, rel=_relative(got[:, None], want[:, None]), distance=error)


def compare_bf16(name: str, got: Any, want: Any) -> Rows:
    """Single bf16 values, with their distance in units in the last place."""
    got, want = (a.astype(np.float32).ravel() for a in _checked(name, got, want))
    ulps = np.abs(_bf16_order(got) - _bf16_order(want)).astype(np.float64)
    ulps = np.where(np.isfinite(got), ulps, np.inf)
    return Rows(equal=got == want, rel=_relative(got[:, None], want[:, None]), distance=ulps)


def _bf16_order(x: np.ndarray) -> np.ndarray:
    """int64 numbers of bf16 values in ascending order, +0 and -0 both 0."""
    bits = x.view(np.int32).astype(np.int64) >> 16
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


def compare_sets(name: str, got: Any, want: Any) -> Rows:
    """Sets of int[n, k] ids of any order; negative ids are unused slots.

    The overlap of a row is the share of the larger set that both have; two empty sets agree.
    """
    got, want = np.asarray(got), np.asarray(want)
    if len(got) != len(want):
        raise VectorError(f"{name} is recorded for {len(want)} rows, but {len(got)} were computed")
    pairs = [(set(a[a >= 0]), set(b[b >= 0])) for a, b in zip(got, want, strict=True)]
    overlap = [len(a & b) / max(len(a), len(b)) if a or b else 1.0 for a, b in pairs]
    return Rows(equal=np.array([a == b for a, b in pairs]), overlap=np.array(overlap))


def compare_masks(name: str, got: Any, want: Any) -> Rows:
    """Masks bool[n, J] as sets of their true positions."""
    got, want = _checked(name, got, want)
    both, larger = (got & want).sum(1), np.maximum(got.sum(1), want.sum(1))
    overlap = np.where(larger > 0, both / np.maximum(larger, 1), 1.0)
    return Rows(equal=np.all(got == want, axis=1), overlap=overlap)


def compare_logits(name: str, got: Any, want: Any) -> Rows:
    """Rows of logits float32[n, V]; the overlap says whether the arg max is the same."""
    rows = compare_rows(name, got, want)
    same = np.argmax(got, axis=1) == np.argmax(want, axis=1)
    return dataclasses.replace(rows, overlap=same.astype(np.float64))


Figure = Literal["equal", "mean_rel", "p99_rel", "max_rel", "median_rel", "close", "overlap", "far"]
Limit = tuple[Figure, Literal["<=", ">="], float]


def figures(rows: Rows) -> dict[Figure, float]:
    """The figures that apply.

    `equal` is the share of bit-equal rows, `close` that of rows within `CLOSE`, `far` the
    largest distance; the rest is named by what it is.
    """
    found: dict[Figure, float] = {"equal": float(np.mean(rows.equal))}
    if rows.rel is not None:
        found |= {
            "mean_rel": float(np.mean(rows.rel)),
            "p99_rel": float(np.quantile(rows.rel, 0.99, method="higher")),
            "max_rel": float(np.max(rows.rel)),
            "median_rel": float(np.median(rows.rel)),
            "close": float(np.mean(rows.rel <= CLOSE)),
        }
    if rows.overlap is not None:
        found["overlap"] = float(np.mean(rows.overlap))
    if rows.distance is not None:
        found["far"] = float(np.max(rows.distance))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measure:
    """One compared quantity.

    Attributes:
      case: which vectors.
      phase: prefill, decode, end, ... or None.
      quantity: named as the recorded array is.
      layer: None where layers are pooled or there is none.
      rows: how many rows were compared.
      figures: what was found.
      limits: what the tier asks for; a layer's own line carries its pool's.
      ok: whether every limit of the pool is kept.
      note: why nothing was compared, or None.
    """

    case: str
    phase: str | None
    quantity: str
    layer: int | None
    rows: int
    figures: Mapping[Figure, float]
    limits: tuple[Limit, ...]
    ok: bool
    note: str | None = None

    def json(self) -> dict[str, Any]:
        """The line of `--json`; a figure that does not apply or is not finite is null."""
        names: tuple[Figure, ...] = ("equal", "mean_rel", "p99_rel", "max_rel", "overlap")
        values = {name: self.figures.get(name) for name in names}
        finite = {k: v if v is not None and math.isfinite(v) else None for k, v in values.items()}
        return {
            "case": self.case,
            "phase": self.phase,
            "quantity": self.quantity,
            "layer": self.layer,
            "rows": self.rows,
            **finite,
            "ok": self.ok,
        }


def keeps(found: Mapping[Figure, float], limit: Limit) -> bool:
    """Whether a figure keeps a limit; what is not a number does not."""
    name, sign, bound = limit
    return found[name] <= bound if sign == "<=" else found[name] >= bound


def judge(
    case: str,
    phase: str | None,
    quantity: str,
    by_layer: Mapping[int | None, Rows],
    limits: tuple[Limit, ...],
) -> list[Measure]:
    """The pooled measure of a quantity, then one per layer where it has layers.

    There is none where nothing was recorded.
    """
    by_layer = {layer: rows for layer, rows in by_layer.items() if len(rows.equal)}
    if not by_layer:
        return []
    pooled = figures(pool(by_layer.values()))
    ok = all(keeps(pooled, limit) for limit in limits)

    def measure(layer: int | None, rows: int, found: Mapping[Figure, float]) -> Measure:
        return Measure(
            case=case,
            phase=phase,
            quantity=quantity,
            layer=layer,
            rows=rows,
            figures=found,
            limits=limits,
            ok=ok,
        )

    total = sum(len(rows.equal) for rows in by_layer.values())
    layers = [
        measure(layer, len(rows.equal), figures(rows))
        for layer, rows in by_layer.items()
        if layer is not None
    ]
    return [measure(None, total, pooled), *layers]


def uncompared(case: str, quantity: str, note: str) -> Measure:
    """The failing measure of a case in which nothing could be compared."""
    return Measure(
        case=case,
        phase=None,
        quantity=quantity,
        layer=None,
        rows=0,
        figures={},
        limits=(),
        ok=False,
        note=note,
    )

"""The table of measures, and the exit status they add up to."""

import json
from collections.abc import Iterable, Iterator

from dsv41_jax.verify.measure import Figure, Limit, Measure, keeps

_WORDS: dict[Figure, str] = {
    "equal": "equal",
    "mean_rel": "mean",
    "p99_rel": "p99",
    "max_rel": "max",
    "median_rel": "median",
    "close": "within 1e-3",
    "overlap": "overlap",
    "far": "farthest",
}
_SHARES: tuple[Figure, ...] = ("equal", "close", "overlap")
_COLUMNS = "{what:<44} {rows:>6}  {worst:<34} {tolerance:<38} {ok}"


def heading() -> str:
    """First line of the table."""
    return _COLUMNS.format(
        what="what", rows="rows", worst="worst figure", tolerance="tolerance", ok="ok"
    )


def _figure(name: Figure, value: float) -> str:
    """Shares are cut, not rounded: 1 means all of them."""
    if name in _SHARES:
        return f"{_WORDS[name]} {int(value * 1e4) / 1e4:g}"
    return f"{_WORDS[name]} {value:.1e}"


def _limit(limit: Limit) -> str:
    name, sign, bound = limit
    return f"{_WORDS[name]} {sign} {bound:g}"


def _worst(measure: Measure) -> str:
    """The limited figures, or what there is to say where nothing is limited."""
    if measure.note is not None:
        return measure.note
    limited = [name for name, _, _ in measure.limits]
    first = "overlap" if "overlap" in measure.figures else "mean_rel"
    names = limited or ([first] if first in measure.figures else ["equal"])
    return ", ".join(_figure(name, measure.figures[name]) for name in names)


def line(measure: Measure) -> str:
    """One line of the table."""
    layer = None if measure.layer is None else f"layer {measure.layer}"
    parts = (measure.case, measure.phase, measure.quantity, layer)
    alone = all(keeps(measure.figures, limit) for limit in measure.limits)
    ok = measure.ok if measure.layer is None else alone
    return _COLUMNS.format(
        what=" ".join(part for part in parts if part),
        rows=measure.rows,
        worst=_worst(measure),
        tolerance=", ".join(_limit(limit) for limit in measure.limits) or "-",
        ok="yes" if ok else "NO",
    )


def table(measures: Iterable[Measure]) -> Iterator[str]:
    """Lines of the table: pools, and the layers of those that fall short."""
    for measure in measures:
        if measure.layer is None or not measure.ok:
            yield line(measure)


def show(measures: Iterable[Measure], *, as_json: bool) -> bool:
    """Prints measures as they come, a table or one JSON object a line; returns whether all hold."""
    ok = True
    if not as_json:
        print(heading(), flush=True)
    for measure in measures:
        ok = ok and measure.ok
        lines = [json.dumps(measure.json())] if as_json else table([measure])
        for text in lines:
            print(text, flush=True)
    return ok

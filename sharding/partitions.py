"""Choosing where to cut a row of layers, given the places where a cut is legal.

A partition is the tuple of its cuts: the first layer of every stage but the first.
"""

from collections.abc import Callable, Sequence

Cuts = tuple[int, ...]


def counts_of(cuts: Cuts, num_layers: int) -> tuple[int, ...]:
    """Layers per stage."""
    bounds = (0, *cuts, num_layers)
    return tuple(b - a for a, b in zip(bounds, bounds[1:], strict=False))


def nearest_partitions(
    ranges: Sequence[range], num_layers: int, legal_cuts: Sequence[int], *, limit: int
) -> tuple[tuple[int, Cuts], ...]:
    """Legal partitions with as many stages as `ranges`, fewest layers moved first.

    Args:
      ranges: the wanted stages; layers outside them count as moved.
      num_layers: layers to partition.
      legal_cuts: places where a cut is legal.
      limit: how many to return at most.

    Returns:
      (layers that change their stage, cuts); empty when there are too few legal cuts.
    """

    def moved(stage: int, start: int, stop: int) -> int:
        kept = min(stop, ranges[stage].stop) - max(start, ranges[stage].start)
        return stop - start - max(kept, 0)

    return _best(num_layers, len(ranges), legal_cuts, moved, limit)


def balanced_partition(
    costs: Sequence[float], num_stages: int, legal_cuts: Sequence[int]
) -> Cuts | None:
    """The legal partition whose dearest stage is cheapest; among equals the most even one.

    Args:
      costs: cost of every layer.
      num_stages: stages wanted.
      legal_cuts: places where a cut is legal.

    Returns:
      Its cuts, or None when there are too few legal ones.
    """
    if num_stages > len(legal_cuts) + 1:
        return None
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    bound = _lowest_bound(sums, num_stages, legal_cuts)

    def unevenness(_: int, start: int, stop: int) -> float | None:
        cost = sums[stop] - sums[start]
        return None if cost > bound else cost * cost

    best = _best(len(costs), num_stages, legal_cuts, unevenness, 1)
    return best[0][1] if best else None


def _lowest_bound(sums: Sequence[float], num_stages: int, legal_cuts: Sequence[int]) -> float:
    """The cost of the dearest stage, at its lowest."""
    bounds = {0: 0.0}
    for stage in range(num_stages):
        last = stage == num_stages - 1
        stops = [len(sums) - 1] if last else legal_cuts
        bounds = {
            stop: min(
                max(b, sums[stop] - sums[start]) for start, b in bounds.items() if start < stop
            )
            for stop in stops
            if any(start < stop for start in bounds)
        }
    return min(bounds.values(), default=0.0)


def _best(
    num_layers: int,
    num_stages: int,
    legal_cuts: Sequence[int],
    cost: Callable[[int, int, int], float | None],
    limit: int,
) -> tuple[tuple[float, Cuts], ...]:
    """Partitions with the lowest sum of `cost(stage, start, stop)`; None forbids a stage."""
    if num_stages > len(legal_cuts) + 1:
        return ()
    # by last bound: the cheapest ways to fill the stages so far with the layers before it
    ways: dict[int, list[tuple[float, Cuts]]] = {0: [(0, ())]}
    for stage in range(num_stages):
        last = stage == num_stages - 1
        longer: dict[int, list[tuple[float, Cuts]]] = {}
        for stop in [num_layers] if last else legal_cuts:
            found = []
            for start, paths in ways.items():
                price = cost(stage, start, stop) if start < stop else None
                if price is not None:
                    found += [(total + price, (*cuts, stop)) for total, cuts in paths]
            if found:
                longer[stop] = sorted(found)[:limit]
        ways = longer
    return tuple((total, cuts[:-1]) for total, cuts in ways.get(num_layers, []))

"""Checks in order of importance within a time budget; programs compile side by side."""

import concurrent.futures
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

Facts = dict[str, Any]
Measure = Callable[[], list[Facts]]

REPEATS = 7  # timed calls of a program at most
LEAST_REPEATS = 3
ENOUGH_SECONDS = 0.4  # of timed calls; no further one then


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Something to check.

    Attributes:
      part: of the report, such as "operations".
      name: says in progress and report what it is.
      priority: lower ones come first; those that the budget does not hold are dropped.
      prepare: compiles its programs, on any thread; returns what measures them, on the main one.
      guess: seconds it takes, before one of its part was seen.
    """

    part: str
    name: str
    priority: int
    prepare: Callable[[], Measure]
    guess: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of the tasks.

    Attributes:
      facts: what was measured, by part.
      failed: name of a task, and the error in words.
      dropped: names of tasks that the budget did not hold.
    """

    facts: Mapping[str, list[Facts]]
    failed: list[tuple[str, str]]
    dropped: list[str]


class Budget:
    """Seconds to spend, and what a task of each part has cost so far."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = time.monotonic()
        self._costs: dict[str, float] = {}

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def holds(self, task: Task) -> int:
        """How many tasks like this one still fit."""
        each = self._costs.get(task.part, task.guess)
        return max(0, int((self.seconds - self.spent) / each))

    def learn(self, part: str, seconds: float) -> None:
        """A task of a part took so long; the dearest counts half, the last one half."""
        before = self._costs.get(part, seconds)
        self._costs[part] = max(seconds, 0.5 * (before + seconds), 1e-3)


def run_tasks(
    tasks: Iterable[Task],
    budget: Budget,
    *,
    workers: int,
    say: Callable[[str], None],
    keep: Callable[[Outcome], object],
) -> Outcome:
    """Runs tasks in order of priority; whatever fails is noted and the rest goes on.

    Nothing compiles while something is measured.

    Args:
      tasks: all of them.
      budget: of all of them together.
      workers: tasks that compile at once, and are then measured in turn.
      say: takes a line of progress.
      keep: takes what is known so far, every now and then.
    """
    facts: dict[str, list[Facts]] = {}
    failed: list[tuple[str, str]] = []
    dropped: list[str] = []
    outcome = Outcome(facts=facts, failed=failed, dropped=dropped)
    with concurrent.futures.ThreadPoolExecutor(workers, "compile") as pool:
        for chunk in _chunks(sorted(tasks, key=lambda task: task.priority), workers):
            kept = chunk[: budget.holds(chunk[0])]
            dropped += [task.name for task in chunk[len(kept) :]]
            if not kept:
                continue
            began = time.monotonic()
            waiting = [(task, pool.submit(task.prepare)) for task in kept]
            concurrent.futures.wait([future for _, future in waiting])
            while waiting:
                task, future = waiting.pop(0)
                if budget.spent > budget.seconds:
                    dropped.append(task.name)
                    continue
                try:
                    found = future.result()()
                except Exception as error:  # a device may refuse a kernel in any way
                    failed.append((task.name, describe(error)))
                    say(f"{task.name}: failed, {describe(error)}")
                else:
                    facts.setdefault(task.part, []).extend(found)
                    say(f"{budget.spent:5.0f} s  {task.name}")
                del future  # its program holds memory of the device
            budget.learn(kept[0].part, (time.monotonic() - began) / len(kept))
            keep(outcome)
    return outcome


def _chunks(tasks: Sequence[Task], most: int) -> Iterable[list[Task]]:
    """Neighbours of the same part and priority, at most `most` together."""
    chunk: list[Task] = []
    for task in tasks:
        same = chunk and (chunk[0].part, chunk[0].priority) == (task.part, task.priority)
        if chunk and (not same or len(chunk) == most):
            yield chunk
            chunk = []
        chunk.append(task)
    if chunk:
        yield chunk


def describe(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"


def repeat(call: Callable[[Any], Any], sets: Any, rounds: int) -> Any:
    """Calls a function of arrays on every set of arguments, `rounds` times over.

    The compiler may neither hoist a call out of the loop nor share its result with another's:
    the next round's arguments depend on this one's results.

    Returns:
      The results of the last round, one for each set.
    """
    zeros = jax.tree.map(
        lambda a: jax.numpy.zeros(a.shape, a.dtype), [jax.eval_shape(call, given) for given in sets]
    )

    def one_round(_: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        sets, _ = carry
        return jax.lax.optimization_barrier((sets, [call(given) for given in sets]))

    return jax.lax.fori_loop(0, rounds, one_round, (sets, zeros))[1]


def median_seconds(run: Callable[[], Any]) -> float:
    """Median wall time of some calls, each waited for, after one that warms up."""
    jax.block_until_ready(run())
    times: list[float] = []
    while len(times) < LEAST_REPEATS or (len(times) < REPEATS and sum(times) < ENOUGH_SECONDS):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return statistics.median(times)

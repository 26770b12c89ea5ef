"""Every operation at its named shapes: the kernel against its reference, and their times."""

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.forward import COMPILER_OPTIONS
from dsv41_jax.host_batch import round_rows
from pallas_kernels import (
    dense_matmul,
    grouped_matmul,
    hyper_connections,
    index_topk,
    kv_write,
    rms_norm,
    scaled_matmul,
    sparse_attention,
)
from pallas_kernels.dispatch import Implementation
from serving.bench.device_parity import compare
from serving.bench.device_setting import Setting
from serving.bench.device_tasks import Facts, Measure, Task, describe, median_seconds, repeat

PART = "operations"
OPERATIONS: tuple[ModuleType, ...] = (
    scaled_matmul,
    grouped_matmul,
    sparse_attention,
    index_topk,
    kv_write,
    hyper_connections,
    dense_matmul,
    rms_norm,
)
FIRST_ROWS = (4, 512)  # the rest comes after the layers
MORE_ROWS = (1, 16, 64)
_ALL_EXPERTS = 384
_MOST_COPIES = 4  # of arguments, so that weights come from memory
_REFERENCE_ROUNDS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One operation at one shape.

    Attributes:
      module: the operation.
      shape: one of its shapes.
      references: whether the reference is timed as well.
    """

    module: ModuleType
    shape: Any
    references: bool

    @property
    def operation(self) -> str:
        """Name of the operation; which one, where its module has several."""
        name, which = self.module.__name__.rpartition(".")[2], getattr(self.shape, "op", None)
        return f"{name}.{which}" if which else name

    @property
    def name(self) -> str:
        """Operation and shape."""
        return f"{self.operation} {self.shape.name}"


def operation_tasks(setting: Setting, *, tensor: Sequence[int], quick: bool) -> list[Task]:
    """Tasks of the shapes that matter: released on a GPU, tiny ones elsewhere.

    Args:
      setting: the device.
      tensor: tensor parallel sizes, the most important first.
      quick: leave out further batch sizes, and times of the reference.
    """
    chosen = _released_cases(tensor, quick) if setting.measures else _tiny_cases()
    return [
        Task(
            part=PART,
            name=case.name,
            priority=priority,
            prepare=functools.partial(prepare, case, setting),
            guess=4.0,
        )
        for priority, case in chosen
    ]


def _released_cases(tensor: Sequence[int], quick: bool) -> Iterator[tuple[int, Case]]:
    for module in OPERATIONS:
        for shape in module.SHAPES:
            partition = re.search(r"\b(tp|ep)(\d+)\b", shape.name)
            rank = 0
            if partition is not None:
                if partition[1] == "ep" or int(partition[2]) not in tensor:
                    continue
                rank = tensor.index(int(partition[2]))
            if shape.rows in FIRST_ROWS or (module is index_topk and "prefill" in shape.name):
                later = 0
            elif shape.rows in MORE_ROWS and not quick:
                later = 3
            else:
                continue
            priority = later + (5 * rank if rank else 0)
            yield priority, Case(module=module, shape=shape, references=not quick)


def _tiny_cases() -> Iterator[tuple[int, Case]]:
    """A small shape of every operation, for devices on which kernels are interpreted."""
    sizes: dict[str, dict[str, int]] = {
        "scaled_matmul": {"outputs": 64, "inputs": 96},
        "grouped_output": {"outputs": 64, "inputs": 64, "groups": 2},
        "grouped_matmul": {"intermediate": 64, "experts": 8, "hidden": 96, "chosen": 2},
        "dense_matmul": {"outputs": 40, "inputs": 96},
        "rms_norm": {"channels": 96},
        "sparse_attention": {
            **{"heads": 4, "dim": 64, "rope": 16, "window": 16, "chosen": 8},
            **{"window_rows": 64, "chosen_rows": 64},
        },
        "index_topk": {
            **{"positions": 64, "rows_per_page": 16, "heads": 4, "dim": 32},
            **{"k": 8, "block_size": 8, "topk_blocks": 4},
        },
        "kv_write": {"cached": 32, "turning": 16},
        "hyper_connections": {"hidden": 96},
    }
    for module in OPERATIONS:
        seen = set()
        for shape in module.SHAPES:
            grouped = getattr(shape, "groups", 0) > 0
            kind = (getattr(shape, "op", getattr(shape, "row_format", None)), grouped)
            if kind in seen:
                continue
            seen.add(kind)
            name = "grouped_output" if grouped else module.__name__.rpartition(".")[2]
            tiny = dataclasses.replace(shape, rows=4, **sizes[name])
            label = f"tiny, like {shape.name}"
            yield (
                0,
                Case(module=module, shape=dataclasses.replace(tiny, name=label), references=False),
            )


def make_arguments(case: Case, seed: int) -> Any:
    """Random arguments of a case. Large weights repeat a block of rows, made up on the device.

    Routed experts are chosen among all 384 where the shape holds that many or fewer.
    """
    module, shape = case.module, case.shape
    rng, small = np.random.default_rng(seed), shape
    if module in (scaled_matmul, dense_matmul):
        block = 64 * max(1, getattr(shape, "groups", 0))
        small = dataclasses.replace(shape, outputs=min(shape.outputs, block))
    elif module is grouped_matmul:
        small = dataclasses.replace(shape, experts=min(shape.experts, 8))
    given = module.make_arguments(small, rng)
    if small is shape or small == shape:
        return given
    arguments = jax.tree.map(_tile, given, module.abstract_arguments(shape))
    if module is grouped_matmul:
        order = rng.random((shape.rows, _ALL_EXPERTS)).argsort(axis=1)[:, : shape.chosen]
        held = np.where(order < shape.experts, order, -1)
        arguments = (arguments[0], jnp.asarray(held, jnp.int32), *arguments[2:])
    return arguments


def _tile(block: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    times = [-(-size // part) for size, part in zip(like.shape, block.shape, strict=True)]
    return jnp.tile(block, times)[tuple(slice(size) for size in like.shape)]


def moved_bytes(case: Case, arguments: Any) -> int:
    """Bytes that must move at least."""
    if case.module is grouped_matmul:
        experts = np.asarray(arguments[1])
        return case.module.bytes(case.shape, len(np.unique(experts[experts >= 0])))
    return case.module.bytes(case.shape)


def prepare(case: Case, setting: Setting) -> Measure:
    """Compiles kernel and reference in loops; returns what makes arguments and measures."""
    shape, module = case.shape, case.module
    expected = (module.active_experts(shape),) if module is grouped_matmul else ()
    moved = module.bytes(shape, *expected)
    copies = 1
    if setting.measures and module is not kv_write:
        copies = max(1, min(_MOST_COPIES, -(-2 * setting.cache_bytes // moved)))
    rounds = setting.rounds(moved, module.flops(shape), copies)
    reference_rounds = min(rounds, _REFERENCE_ROUNDS) if case.references else 1

    def compiled(implementation: Implementation, copies: int, rounds: int) -> jax.stages.Compiled:
        program = _program(case, implementation, rounds)
        here = jax.sharding.SingleDeviceSharding(setting.device)
        given = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here),
            [module.abstract_arguments(shape)] * copies,
        )
        return jax.jit(program, compiler_options=COMPILER_OPTIONS).lower(given).compile()

    kernel = compiled(setting.implementation, copies, rounds)
    try:
        reference: jax.stages.Compiled | str = compiled("xla", 1, reference_rounds)
    except Exception as error:  # the compiler may refuse it in any way
        reference = describe(error)

    def measure() -> list[Facts]:
        arguments = make_arguments(case, setting.seed)
        sets = [arguments]
        for _ in range(copies - 1):
            sets.append(jax.tree.map(lambda a: jnp.array(a, copy=True), arguments))
        found = jax.block_until_ready(kernel(sets))[0]
        facts: Facts = {
            "operation": case.operation,
            "shape": shape.name,
            "rows": shape.rows,
            **_parity(case, found, reference, arguments),
        }
        if setting.measures:
            bytes_, flops = moved_bytes(case, arguments), module.flops(shape)
            seconds = median_seconds(lambda: kernel(sets)) / (rounds * copies)
            facts |= speed(setting, seconds, bytes_, flops)
            facts["cached"] = bytes_ * copies < setting.cache_bytes
            facts["launches"] = rounds * copies
            if case.references and "reference_error" not in facts:
                slow = median_seconds(lambda: reference([arguments])) / reference_rounds
                facts["reference_seconds"] = slow
        return [facts]

    return measure


def _parity(case: Case, found: Any, reference: jax.stages.Compiled | str, arguments: Any) -> Facts:
    """How far results are from the reference's, or why it has none: the times stay."""
    try:
        if isinstance(reference, str):
            raise RuntimeError(reference)
        wanted = reference([arguments])[0]
        deviations = compare(case.operation, *jax.device_get((found, wanted)), arguments)
    except Exception as error:  # such as too little memory
        return {"parity": [], "ok": False, "reference_error": describe(error)}
    return {
        "parity": [deviation.json() for deviation in deviations],
        "ok": all(d.ok for d in deviations),
    }


def _program(case: Case, implementation: Implementation, rounds: int) -> Any:
    def call(arguments: Any) -> Any:
        if case.module is kv_write and implementation == "xla":
            arguments = _whole_tiles(arguments)
        return case.module.run(case.shape, arguments, implementation=implementation)

    def program(sets: Any) -> Any:
        if case.module is not kv_write:
            return repeat(call, sets, rounds)
        # Each round writes the same rows into the cache of the one before, in place.
        cache, *others = sets[0]
        written = jax.lax.fori_loop(0, rounds, lambda _, cache: call((cache, *others)), cache)
        return [written]

    return program


def _whole_tiles(arguments: Any) -> Any:
    """Arguments of `write_rows` with padding rows, which the reference wants and drops."""
    cache, slots, x, weight, cos, sin = arguments
    padding = round_rows(len(slots)) - len(slots)

    def pad(array: jax.Array, value: int = 0) -> jax.Array:
        widths = [(0, padding)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, widths, constant_values=value)

    return cache, pad(slots, -1), pad(x), weight, pad(cos), pad(sin)


def speed(setting: Setting, seconds: float, moved: float, flops: float) -> Facts:
    """Time of a call, and how near it is to what the device can do."""
    bound = setting.bound(moved, flops)
    return {
        "seconds": seconds,
        "bytes": moved,
        "flops": flops,
        "bytes_per_second": moved / seconds,
        "bound_seconds": bound,
        "bandwidth_share": setting.chip and moved / seconds / setting.chip.memory,
        "bound_share": bound and bound / seconds,
    }

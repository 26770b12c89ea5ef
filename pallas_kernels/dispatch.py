"""Which implementation of an operation runs, and the one place that launches kernels."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

Implementation = Literal["xla", "pallas", "pallas_interpret"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

_OFFSET_32 = 2**31  # elements up to here are reached with signed 32-bit offsets
_OFFSET_64 = 2**32  # arrays of more bytes are reached with 64-bit ones


class KernelError(ValueError):
    """A size that the kernels cannot take, though the references can."""


def resolve(implementation: Implementation | None) -> Implementation:
    """The implementation asked for, or the default of the backend: kernels on a GPU.

    Raises:
      ValueError: not one of `IMPLEMENTATIONS`.
    """
    if implementation is None:
        return "pallas" if jax.default_backend() == "gpu" else "xla"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation is {implementation!r}; it must be one of {', '.join(IMPLEMENTATIONS)}"
        )
    return implementation


def launch(
    kernel: Callable[..., None],
    *arguments: jax.Array,
    name: str,
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Any,
    out_shape: Any,
    num_warps: int,
    num_stages: int,
    implementation: Implementation,
    input_output_aliases: dict[int, int] | None = None,
) -> Any:
    """Runs a Pallas kernel on the Triton backend, or in the interpreter.

    Inside `shard_map` a kernel needs `check_vma=False`.

    Args:
      kernel: the body, over refs of the arguments and then of the results; a function of a
        module, or a `functools.partial` of one whose keywords can be compared.
      *arguments: arrays; FP4 codes and E8M0 scales as uint8.
      name: what profiles and dumps call it.
      grid: programs along each axis.
      in_specs: block of each argument.
      out_specs: block of each result.
      out_shape: `ShapeDtypeStruct`s of the results.
      num_warps: warps of a program.
      num_stages: loads in flight in a loop.
      implementation: "pallas" or "pallas_interpret".
      input_output_aliases: arguments that results overwrite, by number.

    Raises:
      KernelError: an array whose offsets would overflow; names kernel, shape and bytes.
    """
    for array in (*arguments, *jax.tree.leaves(out_shape)):
        check_offsets(name, array.shape, array.dtype.itemsize)
    settings: dict[str, Any] = {}
    while isinstance(kernel, functools.partial):
        settings = {**kernel.keywords, **settings}
        kernel = kernel.func
    call = _Call(
        kernel=kernel,
        settings=tuple(sorted(settings.items())),
        name=name,
        grid=grid,
        blocks=tuple(spec.block_shape for spec in jax.tree.leaves((in_specs, out_specs))),
        results=tuple(jax.tree.leaves(out_shape)),
        specs=(in_specs, out_specs, out_shape),
        num_warps=num_warps,
        num_stages=num_stages,
        interpret=implementation == "pallas_interpret",
        aliases=tuple((input_output_aliases or {}).items()),
    )
    return _run(call, *arguments)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """A launch, but for its arguments.

    Index maps and the structure of results are left out of comparisons: they follow from the
    kernel, its settings and the shapes.
    """

    kernel: Callable[..., None]
    settings: tuple[tuple[str, Any], ...]
    name: str
    grid: tuple[int, ...]
    blocks: tuple[Any, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    specs: tuple[Any, Any, Any] = dataclasses.field(compare=False)
    num_warps: int
    num_stages: int
    interpret: bool
    aliases: tuple[tuple[int, int], ...]


@functools.partial(jax.jit, static_argnums=0)
def _run(call: _Call, *arguments: jax.Array) -> Any:
    """Layers that launch alike share one trace and one lowering, which take most of the time."""
    in_specs, out_specs, out_shape = call.specs
    return pl.pallas_call(
        functools.partial(call.kernel, **dict(call.settings)),
        name=call.name,
        grid=call.grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        input_output_aliases=dict(call.aliases),
        compiler_params=triton.CompilerParams(num_warps=call.num_warps, num_stages=call.num_stages),
        interpret=call.interpret,
    )(*arguments)


def check_offsets(name: str, shape: Sequence[int], itemsize: int) -> None:
    """Refuses an array whose offsets the Triton backend computes in too few bits.

    It takes 64-bit offsets above 4 GiB and signed 32-bit ones below, which overflow past 2^31
    elements.

    Raises:
      KernelError: names the kernel, the shape and the limit.
    """
    elements = math.prod(shape)
    if largest_addressable(elements, itemsize) < elements:
        raise KernelError(
            f"kernel {name} cannot address an array of shape {tuple(shape)}, {elements} elements "
            f"in {elements * itemsize} bytes: offsets are 32 bits wide up to {_OFFSET_64} bytes. "
            f"Split it to at most {_OFFSET_32} elements, or make it larger than 4 GiB"
        )


def largest_addressable(elements: int, itemsize: int) -> int:
    """The most elements up to `elements` whose offsets a kernel can compute; see `check_offsets`.

    Args:
      elements: of an array.
      itemsize: bytes of one.
    """
    if elements > _OFFSET_32 and elements * itemsize <= _OFFSET_64:
        return _OFFSET_32
    return elements


def whole(array: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
    """The block of a kernel that addresses an array by itself."""
    return pl.BlockSpec(array.shape, lambda *_: (0,) * len(array.shape))

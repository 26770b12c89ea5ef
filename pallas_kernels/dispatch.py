"""Which implementation of an operation runs, and the one place that launches kernels."""

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
      kernel: the body, over refs of the arguments and then of the results.
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
      ValueError: an array whose offsets would overflow; names kernel, shape and bytes.
    """
    for array in (*arguments, *jax.tree.leaves(out_shape)):
        check_offsets(name, array.shape, array.dtype.itemsize)
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        input_output_aliases=input_output_aliases or {},
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=implementation == "pallas_interpret",
    )(*arguments)


def check_offsets(name: str, shape: Sequence[int], itemsize: int) -> None:
    """Refuses an array whose offsets the Triton backend computes in too few bits.

    It takes 64-bit offsets above 4 GiB and signed 32-bit ones below, which overflow past 2^31
    elements.

    Raises:
      ValueError: names the kernel, the shape and the limit.
    """
    elements = math.prod(shape)
    if elements > _OFFSET_32 and elements * itemsize <= _OFFSET_64:
        raise ValueError(
            f"kernel {name} cannot address an array of shape {tuple(shape)}, {elements} elements "
            f"in {elements * itemsize} bytes: offsets are 32 bits wide up to {_OFFSET_64} bytes. "
            f"Split it to at most {_OFFSET_32} elements, or make it larger than 4 GiB"
        )


def whole(array: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
    """The block of a kernel that addresses an array by itself."""
    return pl.BlockSpec(array.shape, lambda *_: (0,) * len(array.shape))

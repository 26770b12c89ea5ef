"""Packed rows: what a quantized cache or table row is made of."""

import dataclasses

import jax

from pallas_kernels import formats


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Rows of codes with the scales that belong to them.

    Attributes:
      codes: uint8[..., C] E4M3 bytes, or two E2M1 codes a byte (even element low).
      scales: uint8[..., G] E8M0 or E4M3 bytes, one per group of elements.
    """

    codes: jax.Array
    scales: jax.Array


def pack_window(x: jax.Array) -> PackedRows:
    """FP8 rows of bf16[..., D]: D + D / 32 bytes."""
    return PackedRows(*formats.quantize_fp8(x))


def unpack_window(rows: PackedRows) -> jax.Array:
    """float32[..., D], exact in bf16; Engram table rows have this format too."""
    return formats.dequantize_fp8(rows.codes, rows.scales)


def pack_kv(x: jax.Array) -> PackedRows:
    """FP4 rows of bf16[..., D] with E4M3 scales: D / 2 + D / 16 bytes."""
    return PackedRows(*formats.quantize_kv(x))


def unpack_kv(rows: PackedRows) -> jax.Array:
    """float32[..., D], exact in bf16."""
    return formats.dequantize_kv(rows.codes, rows.scales)


def pack_index(x: jax.Array) -> PackedRows:
    """FP4 rows of bf16[..., D] with E8M0 scales: D / 2 + D / 32 bytes."""
    return PackedRows(*formats.quantize_fp4(x))


def unpack_index(rows: PackedRows) -> jax.Array:
    """float32[..., D], exact in bf16."""
    return formats.dequantize_fp4(rows.codes, rows.scales)


def gather(rows: PackedRows, index: jax.Array) -> PackedRows:
    """Rows at int32[...]; negative entries give zeros, whatever the rows hold."""
    inside = (index >= 0)[..., None]
    index = jax.numpy.maximum(index, 0)
    return jax.tree.map(
        lambda a: jax.numpy.where(inside, a[index], jax.numpy.zeros((), a.dtype)), rows
    )


def scatter(rows: PackedRows, index: jax.Array, values: PackedRows) -> PackedRows:
    """Writes `values` at int32[N]; negative entries are dropped."""

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[jax.numpy.where(index < 0, old.shape[0], index)].set(new, mode="drop")

    return jax.tree.map(write, rows, values)

"""Packed rows: what a quantized cache or table row is made of."""

import dataclasses

import jax


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

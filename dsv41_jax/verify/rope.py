"""Rotary tables and rotations of case `ops`."""

from collections.abc import Iterator
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.config import ModelConfig
from dsv41_jax.hf_config import RELEASED, load_config
from dsv41_jax.layers.rotary import angles, layer_frequencies
from dsv41_jax.verify.forward import compiled
from dsv41_jax.verify.measure import Rows, compare_absolute, compare_bf16
from dsv41_jax.verify.tolerances import BF16, ROPE_FAR, ROPE_NEAR, ROPE_STORED, Limits
from pallas_kernels.rope import turn

NEAR = 128  # positions below it have the tighter limit


class Arrays(Protocol):
    """The arrays of one recorded operation."""

    name: str

    def __getitem__(self, part: str) -> np.ndarray: ...
    def __contains__(self, part: str) -> bool: ...


def check_rope(config: ModelConfig, op: Arrays) -> Iterator[tuple[str, Rows, Limits]]:
    """Tables of cosines and sines, or rotations by recorded ones."""
    if op.name == "rope.apply":
        yield from _rotations(op)
    else:
        yield from _tables(config, op)


def _rotations(op: Arrays) -> Iterator[tuple[str, Rows, Limits]]:
    cos, sin = jnp.asarray(op["cos"]), jnp.asarray(op["sin"])
    for shape in ("bshd", "bsd"):
        for part, angle in (("y", sin), ("y_inverse", -sin)):
            if f"{shape}.{part}" in op:
                x = jnp.asarray(op[f"{shape}.x"]).astype(jnp.bfloat16)
                turned = jnp.stack([compiled(turn)(rows, cos, angle) for rows in x])
                name = f"{op.name}.{shape}.{part}"
                yield name, compare_bf16(name, turned, op[f"{shape}.{part}"]), BF16


def _frequencies(config: ModelConfig, name: str) -> np.ndarray:
    """`cfg_*` tables have the directory's settings, the others the released ones."""
    config = config if ".cfg_" in name else load_config(RELEASED)
    return layer_frequencies(config, 1 if name.endswith("yarn") else 0)


def _tables(config: ModelConfig, op: Arrays) -> Iterator[tuple[str, Rows, Limits]]:
    positions = op["pos"] if "pos" in op else np.arange(len(op["cos"]), dtype=np.int32)
    near, far = positions < NEAR, positions >= NEAR
    own, stored = _frequencies(config, op.name), op["freqs"]
    for source, freqs in (("own", own), ("stored", stored)):
        cos, sin = _table(positions, freqs)
        for part, table in (("cos", cos), ("sin", sin)):
            parts = (
                ((part, near, ROPE_NEAR), (f"{part}.far", far, ROPE_FAR))
                if source == "own"
                else ((f"{part}.stored", near | far, ROPE_STORED),)
            )
            for quantity, rows, limits in parts:
                if rows.any():
                    name = f"{op.name}.{quantity}"
                    yield name, compare_absolute(name, table[rows], op[part][rows]), limits


def _table(positions: np.ndarray, freqs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines as the model's rotation applies them: where it turns (1, 0) to."""
    units = jnp.tile(jnp.array([1.0, 0.0], jnp.float32), len(freqs))

    def turned(positions: jax.Array) -> jax.Array:
        x = jnp.broadcast_to(units[None], (len(positions), len(units)))
        return turn(x, *angles(positions, freqs))

    pairs = np.asarray(compiled(turned)(positions)).reshape(len(positions), -1, 2)
    return pairs[..., 0], pairs[..., 1]

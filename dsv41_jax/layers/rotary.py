"""Rotary position embedding with interleaved pairs, plain or YaRN."""

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.config import ModelConfig, YarnConfig


def frequencies(dim: int, theta: float, yarn: YarnConfig | None) -> np.ndarray:
    """float32[dim / 2] radians per position (spec: attention, RoPE)."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    freqs = (np.float32(1) / np.power(np.float32(theta), exponents)).astype(np.float32)
    if yarn is None:
        return freqs

    def pair(rotations: float) -> float:
        trained = yarn.original_max_position_embeddings
        return dim * np.log(trained / (rotations * 2 * np.pi)) / (2 * np.log(theta))

    low = max(np.floor(pair(yarn.beta_fast)), 0)
    high = min(np.ceil(pair(yarn.beta_slow)), dim - 1)
    steps = np.arange(dim // 2, dtype=np.float32)
    ramp = np.clip((steps - np.float32(low)) / np.float32(max(high - low, 1e-3)), 0, 1)
    smooth = np.float32(1) - ramp.astype(np.float32)
    return freqs / np.float32(yarn.factor) * (np.float32(1) - smooth) + freqs * smooth


def layer_frequencies(config: ModelConfig, ratio: int) -> np.ndarray:
    """Frequencies of a layer: YaRN exactly where it reads compressed rows."""
    if ratio:
        return frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling)
    return frequencies(config.qk_rope_head_dim, config.rope_theta, None)


def angles(positions: jax.Array, freqs: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32[T, r / 2], of int32[T] positions."""
    radians = positions.astype(jnp.float32)[:, None] * freqs[None]
    return jnp.cos(radians), jnp.sin(radians)

"""Random checkpoints in the released layout, healthy enough to compute with."""

import functools
import json
import math
import pathlib
import re
import statistics
import zlib
from collections.abc import Collection

import ml_dtypes
import numpy as np

from dsv41_jax.checkpoint.config_json import config_json
from dsv41_jax.checkpoint.errors import CheckpointError
from dsv41_jax.checkpoint.key_map import Component, TensorSpec, expected_tensors
from dsv41_jax.checkpoint.reader import DTYPES, INDEX_NAME, SINGLE_NAME
from dsv41_jax.checkpoint.writer import write_index, write_shard
from dsv41_jax.config import ModelConfig

# Standard deviation of a weight times the square root of its input size, by name; streams stay
# small beside the embedding so that every sublayer matters and nothing grows with depth.
_GAINS = (
    (r"\.attn\.(wq_a|wo_a)\.", 1.6),
    (r"\.attn\.wkv\.", 1.8),
    (r"\.attn\.wo_b\.", 0.15),
    (r"\.compressor\.wkv\.", 1.8),
    (r"\.compressor\.wgate\.", 40.0),
    (r"\.(experts\.\d+|shared_experts)\.w[13]\.", 1.5),
    (r"\.(experts\.\d+|shared_experts)\.w2\.", 0.6),
    (r"\.gate\.weight$", 2.9),
    (r"\.engram\.wkv\.", 0.15),
)
# Mean and standard deviation of parameters that are no matrices.
_OFFSETS = (
    (r"\.attn_norm\.weight$", 0.025, 0.0025),
    (r"\.ffn_norm\.weight$", 0.2, 0.02),
    (r"\.kv_norm\.weight$", 0.4, 0.04),
    (r"\.compressor\.norm\.weight$", 0.6, 0.06),
    (r"\.k_norm\.weight$", 0.5, 0.05),
    (r"(^|[._])(main_norm|q_norm|norm\d?)\.weight$", 1.0, 0.1),
    (r"\.engram\.[qk]_weight$", 1.0, 0.3),
    (r"\.gate\.bias(_vl)?$", 0.0, 0.25),
    (r"\.bias$", 0.0, 0.05),
    (r"\.attn_sink$", 0.0, 0.3),
    (r"\.hc_(attn|ffn)_base$", 0.0, 0.5),
    (r"\.hc_(attn|ffn)_scale$", 0.2, 0.6),
    (r"^embed\.weight$", 0.0, 0.12),
    (r"^image_", 0.0, 0.12),
    (r"\.markov_head\.embed\.weight$", 0.0, 1.0),
)
_ENGRAM_ROW = 1.15  # standard deviation of a table's values
_COPY_SELF = 1.5  # how much each residual copy favours itself, before the softmax

# Scale exponents vary by block; this is the root mean square of 2^jitter.
_JITTER = (-1, 0, 1)
_JITTER_RMS = math.sqrt(sum(4.0**j for j in _JITTER) / len(_JITTER))
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# Typical code magnitudes: at most twice these are reached on average, three times in the tails.
_FP8_AMPLITUDE = 64.0
_FP4_AMPLITUDE = 1.25


@functools.cache
def _normal_quantiles(count: int) -> tuple[float, ...]:
    """Values that stand for equal shares of the standard normal distribution."""
    normal = statistics.NormalDist()
    return tuple(normal.inv_cdf((i + 0.5) / count) for i in range(count))


def _fp8_table(amplitude: float) -> np.ndarray:
    """uint8[256]: random byte to an E4M3 code, normally distributed."""
    return (
        (np.array(_normal_quantiles(256)) * amplitude)
        .astype(ml_dtypes.float8_e4m3fn)
        .view(np.uint8)
    )


def _fp4_table(amplitude: float) -> np.ndarray:
    """uint8[256]: random byte to two E2M1 codes, normally distributed."""
    values = np.array(_normal_quantiles(16)) * amplitude
    nearest = np.abs(np.abs(values)[:, None] - np.array(_E2M1)).argmin(axis=1)
    codes = (nearest + 8 * (values < 0)).astype(np.uint8)
    byte = np.arange(256)
    return codes[byte & 15] | codes[byte >> 4] << 4


def _split_scale(std: float, amplitude: float) -> tuple[float, int]:
    """Code amplitude, at least the given one, and the exponent that together make `std`."""
    exponent = math.floor(math.log2(std / (amplitude * _JITTER_RMS)))
    return std / (_JITTER_RMS * 2.0**exponent), exponent


def _matrix_std(name: str, spec: TensorSpec, columns: int) -> float:
    if spec.component == "engram":
        return _ENGRAM_ROW
    gain = next((gain for pattern, gain in _GAINS if re.search(pattern, name)), 1.0)
    return gain / math.sqrt(columns)


def _offset(name: str) -> tuple[float, float] | None:
    return next(((mean, std) for pattern, mean, std in _OFFSETS if re.search(pattern, name)), None)


def _amplitude(spec: TensorSpec) -> float:
    return _FP4_AMPLITUDE if spec.dtype == "I8" else _FP8_AMPLITUDE


def _scale_exponent(name: str, expected: dict[str, TensorSpec]) -> int:
    weight = f"{name.removesuffix('scale')}weight"
    spec = expected[weight]
    columns = spec.shape[1] * (2 if spec.dtype == "I8" else 1)
    return _split_scale(_matrix_std(weight, spec, columns), _amplitude(spec))[1]


def random_tensor(name: str, expected: dict[str, TensorSpec], seed: int) -> np.ndarray:
    """Values of one tensor; they depend on nothing but its name, its spec and the seed.

    Args:
      name: a tensor of the layout.
      expected: the whole layout.
      seed: of the checkpoint.

    Returns:
      Array of the spec's shape and dtype.
    """
    spec = expected[name]
    shape, dtype = spec.shape, DTYPES[spec.dtype]
    rng = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    if spec.dtype == "F8_E8M0":
        exponent = 127 + _scale_exponent(name, expected)
        jitter = rng.integers(_JITTER[0], _JITTER[-1] + 1, shape, np.int8)
        return (jitter.astype(np.int16) + exponent).astype(np.uint8).view(dtype)
    if spec.dtype in ("I8", "F8_E4M3"):
        packed = spec.dtype == "I8"
        columns = shape[1] * (2 if packed else 1)
        amplitude, _ = _split_scale(_matrix_std(name, spec, columns), _amplitude(spec))
        table = _fp4_table(amplitude) if packed else _fp8_table(amplitude)
        codes = rng.bytes(math.prod(shape)).translate(table.tobytes())
        return np.frombuffer(codes, dtype).reshape(shape)
    mean, std = _offset(name) or (0.0, _matrix_std(name, spec, shape[-1]))
    values = mean + std * rng.standard_normal(shape, np.float32)
    if name.endswith(("hc_attn_base", "hc_ffn_base")):
        copies = math.isqrt(shape[0] + 1) - 1  # shape is (2 + copies) * copies
        values[2 * copies :] += _COPY_SELF * np.eye(copies, dtype=np.float32).reshape(-1)
    return values.astype(dtype)


def _split(expected: dict[str, TensorSpec], shards: int) -> list[dict[str, TensorSpec]]:
    """Consecutive parts of about equal size, each with its widest elements first."""
    left = sum(spec.nbytes for spec in expected.values())
    parts: list[list[tuple[str, TensorSpec]]] = [[]]
    size = 0
    for item in expected.items():
        # a table may be larger than a share: what is left is shared out anew
        if parts[-1] and size >= (left + size) / (shards - len(parts) + 1):
            parts.append([])
            size = 0
        parts[-1].append(item)
        size += item[1].nbytes
        left -= item[1].nbytes
    return [dict(sorted(part, key=lambda item: -DTYPES[item[1].dtype].itemsize)) for part in parts]


def make_checkpoint(
    directory: str | pathlib.Path,
    config: ModelConfig,
    seed: int = 0,
    *,
    shards: int = 3,
    sparse: Collection[Component] = (),
) -> None:
    """Writes `config.json`, the shards and their index; the tokenizer is the caller's.

    The same arguments give the same values, whatever the number of shards.

    Args:
      directory: made if it does not exist.
      config: the model; its draft and vision parts are written too, if it has them.
      seed: of all values.
      shards: about how many files.
      sparse: components whose data is left out: it reads as zeros.

    Raises:
      CheckpointError: the directory holds a checkpoint already.
    """
    directory = pathlib.Path(directory)
    for name in (INDEX_NAME, SINGLE_NAME):
        if (directory / name).exists():
            raise CheckpointError(
                str(directory), [f"it holds a checkpoint already ({name}); name an empty directory"]
            )
    directory.mkdir(parents=True, exist_ok=True)
    expected = dict(expected_tensors(config))
    parts = _split(expected, shards)
    weight_map: dict[str, str] = {}
    for i, part in enumerate(parts, 1):
        shard = f"model-{i:05d}-of-{len(parts):05d}.safetensors"
        arrays = (
            None if spec.component in sparse else random_tensor(name, expected, seed)
            for name, spec in part.items()
        )
        write_shard(directory / shard, part, arrays)
        weight_map |= dict.fromkeys(part, shard)
    total = sum(spec.nbytes for spec in expected.values())
    write_index(directory, weight_map, total)
    (directory / "config.json").write_text(
        json.dumps(config_json(config), indent=1), encoding="utf-8"
    )

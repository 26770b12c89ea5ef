"""Case `ops`: single operations, each by the function or module that the model uses."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.axes import WHOLE
from dsv41_jax.config import ModelConfig
from dsv41_jax.layers.compressor import Compressor
from dsv41_jax.layers.linear import RMSNorm
from dsv41_jax.layers.moe import Gate, SharedExpert
from dsv41_jax.slots import window_positions
from dsv41_jax.verify.forward import compiled
from dsv41_jax.verify.measure import (
    Measure,
    Rows,
    compare_absolute,
    compare_bf16,
    compare_exact,
    compare_rows,
    judge,
    uncompared,
)
from dsv41_jax.verify.rope import check_rope
from dsv41_jax.verify.tolerances import (
    BF16,
    EXACT,
    EXPERT_MLP,
    GATE_WEIGHTS,
    GEMM_BF16,
    GEMM_FP32,
    OPEN_GROUP,
    SINKHORN,
    Limits,
)
from dsv41_jax.verify.vectors import Vectors
from pallas_kernels import (
    formats,
    grouped_matmul,
    hyper_connections,
    index_topk,
    scaled_matmul,
    sparse_attention,
)
from pallas_kernels.dispatch import Implementation

CASE = "ops"
Found = Iterator[tuple[str, Rows, Limits]]  # quantity, comparison, limits
Check = Callable[[ModelConfig, "Op"], Found]


@dataclasses.dataclass(frozen=True)
class Op:
    """One recorded operation: its arrays by the last parts of their names, and who runs it."""

    name: str
    arrays: Mapping[str, np.ndarray]
    implementation: Implementation

    def __getitem__(self, part: str) -> np.ndarray:
        return self.arrays[f"{self.name}.{part}"]

    def __contains__(self, part: str) -> bool:
        return f"{self.name}.{part}" in self.arrays

    def bf16(self, part: str) -> jax.Array:
        """An array of values that are bf16 in the model."""
        return _bf16(self[part])

    def compare(
        self, compare: Callable[..., Rows], limits: Limits, found: Mapping[str, Any]
    ) -> Found:
        """Compares what is recorded of some results."""
        for part, got in found.items():
            if part in self:
                name = f"{self.name}.{part}"
                yield name, compare(name, np.asarray(got), self[part]), limits


def _bf16(x: Any) -> jax.Array:
    return jnp.asarray(x).astype(jnp.bfloat16)


def _e4m3(bits: np.ndarray) -> jax.Array:
    return jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float8_e4m3fn)


def _act_quant(config: ModelConfig, op: Op) -> Found:
    codes, scales = compiled(formats.quantize_fp8)(op.bf16("x"))
    found = {
        "q_e4m3_bits": codes,
        "q": formats.decode_e4m3(codes),
        "scale_e8m0_bits": scales,
        "scale": formats.decode_e8m0(scales),
        "inplace": compiled(formats.dequantize_fp8)(codes, scales),
    }
    yield from op.compare(compare_exact, EXACT, found)


def _fp4_act_quant(config: ModelConfig, op: Op) -> Found:
    for group, quantize, dequantize in (
        ("e8m0_g32", formats.quantize_fp4, formats.dequantize_fp4),
        ("e4m3_g16", formats.quantize_kv, formats.dequantize_kv),
    ):
        codes, scales = compiled(quantize)(op.bf16("x"))
        decode = formats.decode_e4m3 if group == "e4m3_g16" else formats.decode_e8m0
        found = {
            "packed": codes,
            "scale_bits": scales,
            "scale": decode(scales),
            "inplace": compiled(dequantize)(codes, scales),
        }
        named = {f"{group}.{part}": array for part, array in found.items()}
        yield from op.compare(compare_exact, EXACT, named)


def _gemm(op: Op, y: jax.Array) -> Found:
    yield from op.compare(compare_rows, GEMM_FP32, {"y_fp32": y})
    yield from op.compare(compare_bf16, GEMM_BF16, {"y": y.astype(jnp.bfloat16)})


def _fp8_gemm(config: ModelConfig, op: Op) -> Found:
    weight, scale = _e4m3(op["w_bits"]), op["w_scale_bits"]

    def multiply(*arguments: jax.Array) -> jax.Array:
        return scaled_matmul.scaled_matmul(*arguments, implementation=op.implementation)

    yield from _gemm(op, compiled(multiply)(op.bf16("x"), weight, scale))


def _fp4_gemm(config: ModelConfig, op: Op) -> Found:
    weight = compiled(formats.dequantize_fp4)(op["w_packed"], op["w_scale_bits"])
    yield from op.compare(compare_exact, EXACT, {"w_dequant": weight})

    def multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
        return scaled_matmul.scaled_matmul_reference(scaled_matmul.quantized(x), weight)

    yield from _gemm(op, compiled(multiply)(op.bf16("x"), weight))


def _sparse_attention(config: ModelConfig, op: Op) -> Found:
    scale, outputs = float(op["scale"]), []

    def attend(q: jax.Array, keys: jax.Array, valid: jax.Array) -> jax.Array:
        sink = jnp.asarray(op["sink"])
        return sparse_attention.sparse_attention_reference(q, keys, valid, sink, scale=scale)

    run = compiled(attend)
    for q, kv, index in zip(op["q"], op["kv"], op["idx"], strict=True):
        valid = index >= 0
        keys = np.where(valid[..., None], kv[np.maximum(index, 0)], 0)
        outputs.append(np.asarray(run(_bf16(q), keys, valid)))
    yield from op.compare(compare_bf16, BF16, {"out": np.stack(outputs)})


def _split_sinkhorn(config: ModelConfig, op: Op) -> Found:
    mixes = op["mixes"]
    copies = op["comb"].shape[-1]

    def split(m: jax.Array, scale: jax.Array, base: jax.Array) -> tuple[jax.Array, ...]:
        return hyper_connections.split_sinkhorn(
            m,
            scale,
            base,
            copies=copies,
            sinkhorn_iters=int(op["iters"]),
            hc_eps=config.hc_eps,
        )

    flat = mixes.reshape(-1, mixes.shape[-1])
    numbers = compiled(split)(flat, op["scale"], op["base"])
    found = {
        part: np.asarray(array).reshape(op[part].shape)
        for part, array in zip(("pre", "post", "comb"), numbers, strict=True)
    }
    yield from op.compare(compare_absolute, SINKHORN, found)


def _hc_block(config: ModelConfig, op: Op) -> Found:
    def mix(x: jax.Array, fn: jax.Array, scale: jax.Array, base: jax.Array) -> Any:
        return hyper_connections.mixes(
            x,
            fn,
            scale,
            base,
            sinkhorn_iters=config.hc_sinkhorn_iters,
            hc_eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
            implementation=op.implementation,
        )

    x, y = op["x"], op["sublayer_out"]
    rows = x.shape[0] * x.shape[1]
    x, y = _bf16(x.reshape(rows, *x.shape[2:])), _bf16(y.reshape(rows, -1))
    numbers = compiled(mix)(x, op["fn"], op["scale"], op["base"])
    named = dict(zip(("pre", "post", "comb"), numbers, strict=True))
    flat = {part: op[part].reshape(rows, *op[part].shape[2:]) for part in named}
    shaped = {part: np.asarray(a).reshape(op[part].shape) for part, a in named.items()}
    yield from op.compare(compare_absolute, SINKHORN, shaped)

    def expand(*arrays: jax.Array) -> jax.Array:
        return hyper_connections.expand(*arrays, implementation=op.implementation)

    found = {
        "hc_pre": compiled(hyper_connections.collapse)(x, flat["pre"]),
        "hc_post": compiled(expand)(x, y, flat["post"], flat["comb"]),
    }
    found = {part: np.asarray(array).reshape(op[part].shape) for part, array in found.items()}
    yield from op.compare(compare_bf16, BF16, found)


def _candidate_blocks(config: ModelConfig, op: Op) -> Found:
    size, outputs = int(op["block_size"]), []
    for logits in op["logits"]:
        visible = np.isfinite(logits)
        last = logits.shape[1] - 1 - np.argmax(visible[:, ::-1], axis=1)
        newest = np.where(visible.any(axis=1), last, -1).astype(np.int32)
        blocks = index_topk.select_candidate_blocks(
            jnp.asarray(logits),
            newest,
            block_size=size,
            topk_blocks=int(op["topk_blocks"]),
            implementation=op.implementation,
        )
        outputs.append(np.repeat(np.asarray(blocks), size, axis=1)[:, : logits.shape[1]])
    yield from op.compare(compare_exact, EXACT, {"out": np.stack(outputs)})


def _rmsnorm(config: ModelConfig, op: Op) -> Found:
    params = {"params": {"weight": op.bf16("weight")}}
    x = op.bf16("x")
    norm = RMSNorm(x.shape[-1], config.rms_norm_eps, op.implementation)
    y = compiled(norm.apply)(params, x.reshape(-1, x.shape[-1])).reshape(x.shape)
    yield from op.compare(compare_bf16, BF16, {"y": y})


def _window_positions(config: ModelConfig, op: Op) -> Found:
    """Prompt tables list positions; tables of single steps list ring slots, unused ones first."""
    window, count, start = (int(value) for value in op.arrays[f"{op.name}.args"])
    want = op.arrays[op.name]
    positions = np.arange(start, start + count, dtype=np.int32)
    earliest = jnp.zeros(count, jnp.int32)
    own = np.asarray(window_positions(jnp.asarray(positions), earliest, window))
    if start:
        unused = (own < 0).sum(axis=1)
        rings = np.where(own < 0, -1, own % window)
        own = np.stack([np.roll(row, n) for row, n in zip(rings, unused, strict=True)])
    # A prompt shorter than the window has no more columns than tokens.
    beyond = own[:, want.shape[1] :]
    rows = compare_exact(op.name, own[:, : want.shape[1]], want)
    yield op.name, Rows(equal=rows.equal & np.all(beyond < 0, axis=1)), EXACT


def _compressor(config: ModelConfig, op: Op) -> Found:
    ratio = int(op.name.rsplit("r", 1)[1])
    x = op["x"][0]
    sized = dataclasses.replace(config, head_dim=op["wkv"].shape[0])
    module = Compressor(sized, ratio, op.implementation)
    names = ("wkv", "norm", "wgate") if ratio > 1 else ("wkv", "norm")
    params = {"params": {name: {"weight": op.bf16(name)} for name in names}}

    def pool_and_norm(module: Compressor, kv: jax.Array, score: jax.Array) -> jax.Array:
        return module.norm(module.pool(kv, score))

    def project(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return module.apply(params, x, method=Compressor.project)

    def pool(kv: jax.Array, score: jax.Array) -> jax.Array:
        return module.apply(params, kv, score, method=pool_and_norm)

    kv, score = (np.asarray(a) for a in compiled(project)(_bf16(x)))
    groups = len(x) // ratio
    members = [a[: groups * ratio].reshape(groups, ratio, -1) for a in (kv, score)]
    latents = np.asarray(compiled(pool)(*members))
    prompt = 11  # tokens of the recorded prompt
    ends = (np.arange(len(x)) + 1) % ratio == 0
    first = prompt // ratio
    found = {"prefill11": latents[None, :first], "decode": latents[None, first:]}
    yield from op.compare(compare_bf16, BF16, found)
    yield from op.compare(compare_exact, EXACT, {"decode_has_output": ends[prompt:]})
    # Recorded as a view of the live state, so that it shows the last tokens of all.
    last = np.arange(len(x) - ratio, len(x))
    for part, rows in (("kv_state_after11", kv), ("score_state_after11", score)):
        if part in op:
            name = f"{op.name}.{part}"
            yield name, compare_rows(name, rows[last], op[part][0][last % ratio]), OPEN_GROUP


def _gate(config: ModelConfig, op: Op) -> Found:
    experts = len(op["bias"])
    chosen = op["text.ids"].shape[1]
    sized = dataclasses.replace(config, n_routed_experts=experts, num_experts_per_tok=chosen)
    params = {"weight": op.bf16("weight"), "bias": op["bias"], "bias_vl": op["bias_vl"]}
    run = compiled(Gate(sized, op.implementation).apply)
    for mode in ("text", "vl"):
        image = op["image_mask"] & (mode == "vl")
        ids, weights = run({"params": params}, op.bf16("x"), image)
        yield from op.compare(compare_exact, EXACT, {f"{mode}.ids": ids})
        yield from op.compare(compare_rows, GATE_WEIGHTS, {f"{mode}.weights": weights})


def _expert_fp4(config: ModelConfig, op: Op) -> Found:
    packed = [(op[f"{w}.bits"][None], op[f"{w}.scale_bits"][None]) for w in ("w1", "w2", "w3")]
    rows = len(op["x"])
    limit, ones = float(op["limit"]), np.ones((rows, 1), np.float32)
    for part, weights, bound in (
        ("y", ones, limit),
        ("y_weighted", op["route_w"], limit),
        ("y_nolimit", ones, np.inf),
    ):

        def mlp(x: jax.Array, weights: jax.Array, bound: float = bound) -> jax.Array:
            first = jnp.zeros((rows, 1), jnp.int32)
            return grouped_matmul.expert_mlp(
                x, first, weights, *packed, limit=bound, implementation=op.implementation
            )

        y = compiled(mlp)(op.bf16("x"), weights)
        yield from op.compare(compare_rows, EXPERT_MLP, {part: y})


def _expert_fp8(config: ModelConfig, op: Op) -> Found:
    """The shared expert; it has no routing weight."""
    inner, hidden = op["w1.bits"].shape
    params = {
        w: {"weight": _e4m3(op[f"{w}.bits"]), "scale": op[f"{w}.scale_bits"]}
        for w in ("w1", "w2", "w3")
    }
    for part, bound in (("y", float(op["limit"])), ("y_nolimit", np.inf)):
        sized = dataclasses.replace(
            config,
            hidden_size=hidden,
            moe_intermediate_size=inner,
            n_shared_experts=1,
            swiglu_limit=bound,
        )
        expert = SharedExpert(sized, WHOLE, op.implementation)
        y = compiled(expert.apply)({"params": params}, op.bf16("x"))
        yield from op.compare(compare_rows, EXPERT_MLP, {part: y})


# By the first parts of the arrays' names; the parts that follow name an instance of it.
_CHECKS: dict[str, tuple[int, Check]] = {
    "act_quant": (1, _act_quant),
    "fp4_act_quant": (1, _fp4_act_quant),
    "fp8_gemm": (2, _fp8_gemm),
    "fp4_gemm": (2, _fp4_gemm),
    "sparse_attn": (2, _sparse_attention),
    "hc_split_sinkhorn": (2, _split_sinkhorn),
    "hc_block": (1, _hc_block),
    "select_candidate_blocks": (2, _candidate_blocks),
    "rmsnorm": (1, _rmsnorm),
    "rope": (2, check_rope),
    "window_idx": (2, _window_positions),
    "compressor": (2, _compressor),
    "gate": (3, _gate),
    "expert.fp4": (2, _expert_fp4),
    "expert.fp8": (2, _expert_fp8),
}


def _is_variant(op: str) -> bool:
    """Gates that this model does not use."""
    return op.startswith("gate.") and (".sqrtsoftplus." not in op or op.endswith(".top1"))


def _instances(vectors: Vectors) -> dict[str, Check]:
    """Recorded operations that have a check, by name."""
    found: dict[str, Check] = {}
    for array in vectors:
        key = _key(array)
        if key in _CHECKS:
            depth, check = _CHECKS[key]
            name = ".".join(array.split(".")[:depth])
            if not _is_variant(name):
                found[name] = check
    return found


def _key(array: str) -> str:
    parts = array.split(".")
    return ".".join(parts[:2]) if parts[0] == "expert" else parts[0]


def unchecked_ops(vectors: Vectors) -> list[str]:
    """Kinds of recorded operations that have no check: of parts the model does not have yet."""
    return sorted({_key(array) for array in vectors} - set(_CHECKS))


def check_ops(
    config: ModelConfig, vectors: Vectors, implementation: Implementation, only: str = ""
) -> Iterator[Measure]:
    """Measures of every recorded operation.

    Args:
      config: of the directory.
      vectors: arrays of `golden_ops.npz`.
      implementation: of the operations.
      only: names start with this.

    Raises:
      VectorError: an array that an operation needs is missing or misshapen.
    """
    compared = False
    for name, check in _instances(vectors).items():
        if name.startswith(only):
            for quantity, rows, limits in check(config, Op(name, vectors, implementation)):
                compared = True
                yield from judge(CASE, None, quantity, {None: rows}, limits)
    if not compared:
        yield uncompared(CASE, "ops", "no operation is recorded")

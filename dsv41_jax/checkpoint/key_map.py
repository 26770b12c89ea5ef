"""The released tensor layout, derived from the configuration, and its parameter tree.

Letters as in the configuration: D hidden, H heads, d head dim, E routed experts.
"""

import dataclasses
import functools
import math
import re
import types
from collections.abc import Iterator, Mapping
from typing import Literal, get_args

from dsv41_jax.checkpoint.reader import DTYPES, StoredTensor
from dsv41_jax.config import DraftConfig, EngramConfig, ModelConfig, VisionConfig
from dsv41_jax.layer_plan import LayerSpec, layer_plan

Component = Literal["experts", "dense", "engram", "embedding", "other", "draft", "vision"]
COMPONENTS: tuple[Component, ...] = get_args(Component)

BLOCK = 32  # elements that share a scale, along each axis of a dense weight


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the released layout.

    Attributes:
      dtype: as safetensors spells it.
      shape: as stored.
      component: `experts` routed experts; `dense` FP8 linears; `engram` host tables;
        `embedding` input and output embeddings; `other` BF16 and F32 parameters of the text
        model; `draft` and `vision` whole parts.
    """

    dtype: str
    shape: tuple[int, ...]
    component: Component

    @property
    def nbytes(self) -> int:
        """Size of its data."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def in_params(self) -> bool:
        """Whether the text model's parameters hold it; the rest stays in the file."""
        return self.component in ("experts", "dense", "embedding", "other")


Entries = Iterator[tuple[str, TensorSpec]]


def _bf16(name: str, *shape: int) -> Entries:
    yield name, TensorSpec("BF16", shape, "other")


def _f32(name: str, *shape: int) -> Entries:
    yield name, TensorSpec("F32", shape, "other")


def _fp8(name: str, rows: int, columns: int) -> Entries:
    yield f"{name}.weight", TensorSpec("F8_E4M3", (rows, columns), "dense")
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    yield f"{name}.scale", TensorSpec("F8_E8M0", blocks, "dense")


def _fp4(name: str, rows: int, columns: int) -> Entries:
    yield f"{name}.weight", TensorSpec("I8", (rows, columns // 2), "experts")
    yield f"{name}.scale", TensorSpec("F8_E8M0", (rows, -(-columns // BLOCK)), "experts")


def _attention(config: ModelConfig) -> Entries:
    hidden, rank, dim = config.hidden_size, config.q_lora_rank, config.head_dim
    queries = config.num_attention_heads * dim
    grouped = config.o_groups * config.o_lora_rank
    yield from _fp8("attn.wq_a", rank, hidden)
    yield from _bf16("attn.q_norm.weight", rank)
    yield from _fp8("attn.wq_b", queries, rank)
    yield from _fp8("attn.wkv", dim, hidden)
    yield from _bf16("attn.kv_norm.weight", dim)
    yield from _fp8("attn.wo_a", grouped, queries // config.o_groups)
    yield from _fp8("attn.wo_b", hidden, grouped)
    yield from _f32("attn.attn_sink", config.num_attention_heads)


def _compression(config: ModelConfig, spec: LayerSpec) -> Entries:
    hidden, dim = config.hidden_size, config.head_dim
    if spec.owns_kv:
        yield from _bf16("attn.compressor.wkv.weight", dim, hidden)
        if spec.ratio > 1:
            yield from _bf16("attn.compressor.wgate.weight", dim, hidden)
        yield from _bf16("attn.compressor.norm.weight", dim)
    if spec.owns_index:
        heads, index_dim = config.index_n_heads, config.index_head_dim
        yield from _fp8("attn.indexer.wq_b", heads * index_dim, config.q_lora_rank)
        yield from _bf16("attn.indexer.weights_proj.weight", heads, hidden)
        if spec.owns_kv:
            yield from _bf16("attn.indexer.wk.weight", index_dim, dim)
            yield from _bf16("attn.indexer.k_norm.weight", index_dim)


def _feed_forward(config: ModelConfig, experts: int) -> Entries:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    yield from _bf16("ffn.gate.weight", experts, hidden)
    yield from _f32("ffn.gate.bias", experts)
    yield from _f32("ffn.gate.bias_vl", experts)
    for expert in range(experts):
        yield from _fp4(f"ffn.experts.{expert}.w1", inner, hidden)
        yield from _fp4(f"ffn.experts.{expert}.w2", hidden, inner)
        yield from _fp4(f"ffn.experts.{expert}.w3", inner, hidden)
    shared = inner * config.n_shared_experts
    if shared:
        yield from _fp8("ffn.shared_experts.w1", shared, hidden)
        yield from _fp8("ffn.shared_experts.w2", hidden, shared)
        yield from _fp8("ffn.shared_experts.w3", shared, hidden)


def _norms_and_streams(config: ModelConfig) -> Entries:
    copies, hidden = config.hc_mult, config.hidden_size
    yield from _bf16("attn_norm.weight", hidden)
    yield from _bf16("ffn_norm.weight", hidden)
    for part in ("attn", "ffn"):
        yield from _f32(f"hc_{part}_fn", (2 + copies) * copies, copies * hidden)
        yield from _f32(f"hc_{part}_base", (2 + copies) * copies)
        yield from _f32(f"hc_{part}_scale", 3)


def _engram(config: ModelConfig, engram: EngramConfig, rows: int) -> Entries:
    copies, hidden, dim = config.hc_mult, config.hidden_size, engram.head_dim
    yield "engram.embed.weight", TensorSpec("F8_E4M3", (rows, dim), "engram")
    yield "engram.embed.scale", TensorSpec("F8_E8M0", (rows, -(-dim // BLOCK)), "engram")
    yield from _fp8("engram.wkv", hidden * (copies + 1), engram.num_columns * dim)
    yield from _bf16("engram.q_weight", copies, hidden)
    yield from _bf16("engram.k_weight", copies, hidden)


def _layer(config: ModelConfig, spec: LayerSpec) -> Entries:
    yield from _attention(config)
    yield from _compression(config, spec)
    yield from _feed_forward(config, config.n_routed_experts)
    yield from _norms_and_streams(config)
    if config.engram is not None and spec.engram is not None:
        yield from _engram(config, config.engram, config.engram.num_embeddings[spec.engram])


def _draft_block(config: ModelConfig, draft: DraftConfig, block: int) -> Entries:
    hidden = config.hidden_size
    yield from _attention(config)
    yield from _feed_forward(config, draft.n_routed_experts)
    yield from _norms_and_streams(config)
    if block == 0:
        yield from _fp8("main_proj", hidden, len(draft.target_layer_ids) * hidden)
        yield from _bf16("main_norm.weight", hidden)
    if block == draft.num_layers - 1:
        yield from _bf16("norm.weight", hidden)
        yield from _bf16("markov_head.embed.weight", config.vocab_size, draft.markov_rank)
        yield from _bf16("markov_head.head.weight", config.vocab_size, draft.markov_rank)
        yield from _bf16("confidence_head.proj.weight", 1, hidden + draft.markov_rank)


def _vision(config: ModelConfig, vision: VisionConfig) -> Entries:
    width, hidden = vision.hidden_size, config.hidden_size
    yield from _bf16("vision.patch_embed.proj.weight", width, 3 * vision.patch_size**2)
    yield from _bf16("vision.patch_embed.proj.bias", width)
    for block in range(vision.num_hidden_layers):
        name = f"vision.blocks.{block}"
        yield from _bf16(f"{name}.norm1.weight", width)
        yield from _bf16(f"{name}.attn.wqkv.weight", 3 * width, width)
        yield from _bf16(f"{name}.attn.wqkv.bias", 3 * width)
        yield from _bf16(f"{name}.attn.wo.weight", width, width)
        yield from _bf16(f"{name}.attn.wo.bias", width)
        yield from _bf16(f"{name}.norm2.weight", width)
        yield from _bf16(f"{name}.mlp.w1.weight", 2 * vision.intermediate_size, width)
        yield from _bf16(f"{name}.mlp.w2.weight", width, vision.intermediate_size)
    yield from _bf16("vision.norm.weight", width)
    yield from _bf16("aligner.w1.weight", hidden, width * vision.downsample_ratio**2)
    yield from _bf16("aligner.w1.bias", hidden)
    yield from _bf16("aligner.w2.weight", hidden, hidden)
    yield from _bf16("aligner.w2.bias", hidden)
    for part in ("start", "end", "newline"):
        yield from _bf16(f"image_{part}", hidden)


@functools.lru_cache(maxsize=4)
def expected_tensors(config: ModelConfig) -> Mapping[str, TensorSpec]:
    """Every tensor of a checkpoint with this configuration, in layer order."""
    hidden = config.hidden_size
    table = TensorSpec("BF16", (config.vocab_size, hidden), "embedding")
    result = {"embed.weight": table}
    for spec in layer_plan(config):
        for name, tensor in _layer(config, spec):
            result[f"layers.{spec.layer}.{name}"] = tensor
    result |= _bf16("norm.weight", hidden)
    result["head.weight"] = table
    if config.draft is not None:
        for block in range(config.draft.num_layers):
            for name, tensor in _draft_block(config, config.draft, block):
                result[f"mtp.{block}.{name}"] = dataclasses.replace(tensor, component="draft")
    if config.vision is not None:
        for name, tensor in _vision(config, config.vision):
            result[name] = dataclasses.replace(tensor, component="vision")
    return types.MappingProxyType(result)


def _describe(tensor: TensorSpec | StoredTensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def layout_faults(
    expected: Mapping[str, TensorSpec], found: Mapping[str, StoredTensor]
) -> list[str]:
    """One sentence for each tensor that is missing, unexpected, misshapen or wrongly typed.

    Names that have hardly anything in common are one fault: the files are another model's.
    """
    common = sum(name in found for name in expected)
    if found and 2 * common < min(len(expected), len(found)):
        missing = next(name for name in expected if name not in found)
        other = next(name for name in found if name not in expected)
        return [
            f"it holds another model: only {common} of its {len(found)} tensors are among the "
            f"{len(expected)} that config.json describes ({other} is unexpected, {missing} is "
            "missing)"
        ]
    faults = []
    for name, spec in expected.items():
        tensor = found.get(name)
        if tensor is None:
            faults.append(f"{name} is missing; expected {_describe(spec)}")
        elif (tensor.dtype, tensor.shape) != (spec.dtype, spec.shape):
            faults.append(f"{name} is {_describe(tensor)}; expected {_describe(spec)}")
    faults += [
        f"{name} ({_describe(tensor)}) is unexpected; config.json describes none"
        for name, tensor in found.items()
        if name not in expected
    ]
    return faults


_NUMBERED = re.compile(r"(layers|mtp|blocks)\.(\d+)(?=\.)")
_NUMBERED_KEY = re.compile(r"(layers|mtp|blocks)_(\d+)")
_EXPERT = re.compile(r"(?<=\.experts)\.(\d+)(?=\.)")


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterPath:
    """Where a tensor stands in the parameter tree.

    Attributes:
      keys: from the root to the leaf.
      expert: index along the leaf's first axis, where the experts are stacked; else None.
    """

    keys: tuple[str, ...]
    expert: int | None = None


def parameter_path(name: str) -> ParameterPath:
    """Parameter path of a tensor: `layers.3.attn.wkv.weight` is at layers_3, attn, wkv, weight.

    The experts' tensors of one layer share a leaf and are told apart by `expert`.
    """
    match = _EXPERT.search(name)
    stacked = _EXPERT.sub("", name, count=1)
    keys = tuple(_NUMBERED.sub(r"\1_\2", stacked).split("."))
    return ParameterPath(keys, int(match.group(1)) if match else None)


def tensor_name(path: ParameterPath) -> str:
    """Inverse of `parameter_path`."""
    keys = [_NUMBERED_KEY.sub(r"\1.\2", key) for key in path.keys]
    if path.expert is not None:
        keys.insert(keys.index("experts") + 1, str(path.expert))
    return ".".join(keys)

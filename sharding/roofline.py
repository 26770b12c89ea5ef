"""The least time a step can take: bytes and operations that no program avoids.

Counted per device, from the configuration alone, operation by operation as `pallas_kernels`
defines them: every parameter an operation multiplies by is read once, every cache row it needs
once per request, every other argument and result once. Elementwise work between them is left out,
it can be part of its neighbours; so are incomplete groups and block tables, which are small.
Operations follow each other, so the bound of a step is the sum of theirs.
"""

import dataclasses
import functools
import math
import re
import types
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from dsv41_jax.checkpoint.key_map import expected_tensors
from dsv41_jax.config import ModelConfig
from dsv41_jax.layer_plan import LayerSpec, layer_spec
from pallas_kernels import dense_matmul, hyper_connections, rms_norm, scaled_matmul
from sharding.memory import device_shape, in_stage
from sharding.stage_plan import Boundary, StageContents
from sharding.tensor_plan import TensorPlan

BF16, F32, I32 = 2, 4, 4


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a device can do at most, per second.

    Attributes:
      name: of the device.
      memory: bytes from and to its memory.
      flops: dense bf16 operations of its tensor cores, float32 accumulation.
      link: bytes it can send to its neighbours over NVLink, one direction.
    """

    name: str
    memory: float
    flops: float
    link: float


# Data sheets of the SXM and HGX modules, without sparsity. NVLink is sold as the sum of both
# directions: 900 GB/s of generation 4, 1800 GB/s of generation 5.
CHIPS = (
    Chip("H100", 3.35e12, 989.4e12, 450e9),
    Chip("H200", 4.8e12, 989.4e12, 450e9),
    Chip("B200", 8.0e12, 2250e12, 900e9),
)


@dataclasses.dataclass(kw_only=True)
class Row:
    """What one operation of a step moves and computes on one device, over all layers.

    Attributes:
      op: name.
      calls: how often the step runs it.
      parameters: bytes of parameters read.
      caches: bytes of cache rows read and written.
      activations: bytes of other arguments and of results.
      flops: multiplications and additions.
      sent: bytes sent to other devices.
    """

    op: str
    calls: int = 0
    parameters: float = 0
    caches: float = 0
    activations: float = 0
    flops: float = 0
    sent: float = 0

    @property
    def bytes(self) -> float:
        """From and to the device's memory."""
        return self.parameters + self.caches + self.activations

    def seconds(self, chip: Chip) -> float:
        """The least time it takes: whichever of memory, arithmetic and links is slowest."""
        return max(self.bytes / chip.memory, self.flops / chip.flops, self.sent / chip.link)

    def bound(self, chip: Chip) -> str:
        """What it waits for: memory, compute or link."""
        times = {
            "memory": self.bytes / chip.memory,
            "compute": self.flops / chip.flops,
            "link": self.sent / chip.link,
        }
        return max(times, key=times.__getitem__)


def active_experts(config: ModelConfig, tokens: int) -> float:
    """Expected number of different experts that a layer's tokens choose, were choices random."""
    total, chosen = config.n_routed_experts, config.num_experts_per_tok
    return float(chosen) if tokens == 1 else total * (1 - (1 - chosen / total) ** tokens)


def roofline(
    config: ModelConfig,
    stage: StageContents,
    tensor: TensorPlan,
    *,
    tokens: int,
    requests: int,
    context: int,
    active: float | None = None,
    boundary: Boundary | None = None,
) -> tuple[Row, ...]:
    """Bytes, operations and sent bytes of one step of a stage, on each of its devices.

    A decode step has tokens == requests; a prefill step has more. Every request has the same
    number of tokens, wants logits of its last one, and has `context` tokens in the caches
    already.

    Args:
      config: the model.
      stage: what the stage holds.
      tensor: how it divides over its devices.
      tokens: rows of the step.
      requests: requests that share them.
      context: tokens of each request before this step.
      active: different routed experts that a layer's tokens reach, over all devices; None for
        `active_experts`.
      boundary: what goes to the next stage, or None for the last one.

    Returns:
      One row per operation, in the order of a step. Its time on a device is `row.seconds(chip)`
      for a chip of `CHIPS`; that of the step is the sum (`step_seconds`).

    Raises:
      ValueError: the requests do not share the tokens equally.
    """
    if requests < 1 or tokens % requests or tokens < requests:
        raise ValueError(f"{tokens} tokens do not divide equally over {requests} requests")
    experts = active_experts(config, tokens) if active is None else active
    step = _Step(config, tensor, tokens, requests, context, experts)
    parameters = stage_parameters(config, stage, tensor)
    if stage.embedding:
        step.embedding()
    else:
        step.gather("receive", tokens * _stream_bytes(config))
    for layer in stage.layers:
        step.layer(layer_spec(config, layer), parameters[f"layers.{layer}"])
    if stage.head:
        step.head(parameters["head"], parameters["norm"])
    if boundary is not None:
        # The stream is sent by rows, what the relay adds by every device.
        stream = tokens * boundary.stream_bytes_per_token / tensor.devices
        step.add("send", sent=stream + tokens * boundary.relay_bytes_per_token)
    return tuple(step.rows.values())


def step_seconds(rows: tuple[Row, ...], chip: Chip) -> float:
    """The least time of a step whose operations follow each other."""
    return sum(row.seconds(chip) for row in rows)


def _stream_bytes(config: ModelConfig) -> int:
    return config.hc_mult * (BF16 * config.hidden_size + F32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter's share on a device; of one expert, where it is one.

    Attributes:
      shape: in stored units: FP4 weights as bytes of two.
      nbytes: its size.
    """

    shape: tuple[int, ...]
    nbytes: int


@functools.lru_cache(maxsize=64)  # the same for every size of step
def stage_parameters(
    config: ModelConfig, stage: StageContents, tensor: TensorPlan
) -> Mapping[str, Mapping[str, Parameter]]:
    """Parameters of a stage on a device, by layer (or `embed`, `norm`, `head`) and inner name.

    Routed experts are alike: `ffn.experts.w1.weight` stands for each.
    """
    found: defaultdict[str, dict[str, Parameter]] = defaultdict(dict)
    for name, spec in expected_tensors(config).items():
        if spec.component == "experts" and ".experts.0." not in name:
            continue
        if not spec.in_params or not in_stage(stage, name):
            continue
        shape = device_shape(name, spec, tensor)
        size = math.prod(shape) * spec.nbytes // math.prod(spec.shape)
        part = re.match(r"layers\.\d+|\w+", name)[0]
        inner = name[len(part) + 1 :].replace(".experts.0.", ".experts.")
        found[part][inner] = Parameter(shape=shape, nbytes=size)
    return types.MappingProxyType(dict(found))


class _Step:
    """Adds up the rows of a step; one method per part of the model."""

    def __init__(
        self,
        config: ModelConfig,
        tensor: TensorPlan,
        tokens: int,
        requests: int,
        context: int,
        experts: float,
    ) -> None:
        self.config, self.tensor = config, tensor
        self.tokens, self.requests, self.experts = tokens, requests, experts
        self.context = context
        self.positions = context + np.arange(tokens // requests)  # of each request
        self.rows: dict[str, Row] = {}

    def add(self, op: str, **amounts: float) -> None:
        """One call of an operation."""
        row = self.rows.setdefault(op, Row(op=op))
        row.calls += 1
        for name, amount in amounts.items():
            setattr(row, name, getattr(row, name) + amount)

    def reduce(self, op: str, size: float) -> None:
        """A sum over the stage's devices of an array of `size` bytes, without switches' help."""
        devices = self.tensor.devices
        if devices > 1:
            self.add(op, sent=2 * (devices - 1) / devices * size)

    def gather(self, op: str, size: float) -> None:
        """An array of `size` bytes from the shares of the stage's devices."""
        devices = self.tensor.devices
        if devices > 1:
            self.add(op, sent=(devices - 1) / devices * size)

    def embedding(self) -> None:
        """Rows of the vocabulary, then equal copies of them."""
        config, tokens = self.config, self.tokens
        size = BF16 * tokens * config.hidden_size
        found = BF16 * min(tokens, self.tensor.vocabulary) * config.hidden_size
        self.add("embed", parameters=found, activations=size * config.hc_mult)
        self.reduce("all-reduce of embed", size)

    def head(self, head: Mapping[str, Parameter], norm: Mapping[str, Parameter]) -> None:
        """Logits of each request's last row."""
        self.stream_op("collapse_norm", norm, self.requests)
        self.dense("head", head["weight"], self.requests)
        self.gather("all-gather of head", F32 * self.requests * self.config.vocab_size)

    def layer(self, spec: LayerSpec, held: Mapping[str, Parameter]) -> None:
        """One backbone layer."""

        def of(*prefixes: str) -> dict[str, Parameter]:
            return {name: p for name, p in held.items() if name.startswith(prefixes)}

        if spec.engram is not None:
            self.engram(of("engram."))
        for part in ("attn", "ffn"):
            self.stream_op("mixes", of(f"hc_{part}_"), self.tokens)
            self.stream_op("collapse_norm", of(f"{part}_norm."), self.tokens)
            if part == "attn":
                self.attention(spec, held)
            else:
                self.feed_forward(of("ffn."))
            self.stream_op("expand", {}, self.tokens)

    def stream_op(self, op: hyper_connections.Op, held: Mapping[str, Parameter], rows: int) -> None:
        """An operation of the hyper-connections on `rows` rows."""
        copies, hidden = self.config.hc_mult, self.config.hidden_size
        shape = hyper_connections.Shape(name=op, op=op, rows=rows, copies=copies, hidden=hidden)
        self.counted(f"hc.{op}", hyper_connections, shape, held)

    def counted(self, op: str, module: Any, shape: Any, held: Mapping[str, Parameter]) -> None:
        """An operation of a module that counts its own bytes and flops, and its parameters."""
        moved, flops = _counted(module, shape)
        parameters = _nbytes(held)
        self.add(op, parameters=parameters, activations=moved - parameters, flops=flops)

    def dense(self, op: str, weight: Parameter, rows: int) -> None:
        """A product of `rows` rows with a bf16 weight."""
        outputs, inputs = weight.shape
        shape = dense_matmul.Shape(name=op, rows=rows, outputs=outputs, inputs=inputs)
        self.counted(op, dense_matmul, shape, {"weight": weight})

    def quantized(
        self, op: str, held: Mapping[str, Parameter], name: str, *, groups: int = 0
    ) -> None:
        """A product of all tokens with the FP8 weight `name`."""
        both = {part: held[f"{name}.{part}"] for part in ("weight", "scale")}
        outputs, inputs = both["weight"].shape
        shape = scaled_matmul.Shape(
            name=op, rows=self.tokens, outputs=outputs, inputs=inputs, groups=groups
        )
        self.counted(op, scaled_matmul, shape, both)

    def engram(self, held: Mapping[str, Parameter]) -> None:
        """Table rows from the host, their projection, and the gate."""
        config, tokens = self.config, self.tokens
        self.quantized("engram.wkv", held, "engram.wkv")
        stream = tokens * config.hc_mult * config.hidden_size
        self.add(
            "engram.gate",
            parameters=_nbytes(held, "engram.q_weight", "engram.k_weight"),
            activations=BF16 * (3 * stream + tokens * config.hidden_size),
            flops=9 * stream,
        )

    def attention(self, spec: LayerSpec, held: Mapping[str, Parameter]) -> None:
        """What a layer writes to its caches, chooses and attends to."""
        config, tokens, dim = self.config, self.tokens, self.config.head_dim
        self.quantized("attn.wkv", held, "attn.wkv")
        self.write(held["attn.kv_norm.weight"], tokens, dim + dim // 32)
        if spec.owns_kv:
            self.compress(spec, held)
        self.quantized("attn.wq_a", held, "attn.wq_a")
        norm = rms_norm.Shape(name="q_norm", rows=tokens, channels=config.q_lora_rank)
        self.counted("q_norm", rms_norm, norm, {"weight": held["attn.q_norm.weight"]})
        if spec.owns_index:
            self.index(spec, held)
        self.quantized("attn.wq_b", held, "attn.wq_b")
        self.attend(spec, held)
        self.quantized("attn.wo_a", held, "attn.wo_a", groups=self.tensor.output_groups)
        self.quantized("attn.wo_b", held, "attn.wo_b")
        self.reduce("all-reduce of wo_b", F32 * tokens * config.hidden_size)

    def write(self, norm: Parameter, rows: int, row_bytes: int) -> None:
        """Rows normalized, turned and written to a cache."""
        channels, turning = norm.shape[0], self.config.qk_rope_head_dim
        self.add(
            "kv_write",
            parameters=norm.nbytes,
            caches=rows * row_bytes,
            activations=rows * (BF16 * channels + F32 * turning + I32),
            flops=rows * (5 * channels + 3 * turning),
        )

    def compress(self, spec: LayerSpec, held: Mapping[str, Parameter]) -> None:
        """Latents and index keys of the groups that the step completes."""
        dim, key = self.config.head_dim, self.config.index_head_dim
        for name in ("wkv", "wgate"):
            if f"attn.compressor.{name}.weight" in held:
                self.dense("compressor", held[f"attn.compressor.{name}.weight"], self.tokens)
        groups = self.requests * int(np.sum((self.positions + 1) % spec.ratio == 0))
        self.dense("indexer.wk", held["attn.indexer.wk.weight"], groups)
        self.write(held["attn.compressor.norm.weight"], groups, dim // 2 + dim // 16)
        self.write(held["attn.indexer.k_norm.weight"], groups, key // 2 + key // 32)

    def index(self, spec: LayerSpec, held: Mapping[str, Parameter]) -> None:
        """Scores of all visible index keys, and the best of them."""
        config, tokens = self.config, self.tokens
        self.quantized("indexer.wq_b", held, "attn.indexer.wq_b")
        self.dense("indexer.weights_proj", held["attn.indexer.weights_proj.weight"], tokens)
        heads, dim = config.index_n_heads, config.index_head_dim
        keys = int(self.positions[-1] + 1) // spec.ratio
        visible = self.requests * int(np.sum((self.positions + 1) // spec.ratio))
        self.add(
            "index_scores",
            caches=self.requests * keys * (dim // 2 + dim // 32),
            activations=tokens * heads * (F32 * dim + BF16) + F32 * visible,
            flops=2 * visible * heads * dim,
        )
        blocks = tokens * -(-keys // config.candidate_block_size)  # a byte of the mask for each
        if spec.publishes_candidates:
            self.add("index_candidates", activations=F32 * visible + blocks)
        masked = blocks if spec.candidate_source is not None else 0
        topk = I32 * tokens * config.index_topk
        self.add("index_topk", activations=F32 * visible + masked + topk)

    def attend(self, spec: LayerSpec, held: Mapping[str, Parameter]) -> None:
        """Window and chosen rows, of which a request's tokens share what they can."""
        config, dim, heads = self.config, self.config.head_dim, self.tensor.heads
        window = np.minimum(self.positions + 1, config.sliding_window)
        read = min(self.context, config.sliding_window - 1) + len(self.positions)
        keys, caches = int(window.sum()), read * (dim + dim // 32)
        slots, turning = config.sliding_window, config.qk_rope_head_dim
        if spec.ratio:
            latents = (self.positions + 1) // spec.ratio
            chosen = int(np.minimum(latents, config.index_topk).sum())
            keys += chosen
            caches += min(chosen, int(latents[-1])) * (dim // 2 + dim // 16)
            slots += config.index_topk
        self.add(
            "sparse_attention",
            parameters=_nbytes(held, "attn.attn_sink"),
            caches=self.requests * caches,
            activations=self.tokens * (2 * BF16 * heads * dim + I32 * slots + F32 * turning),
            flops=4 * self.requests * keys * heads * dim,
        )

    def feed_forward(self, held: Mapping[str, Parameter]) -> None:
        """Gate, routed experts and the shared one."""
        config, tensor, tokens = self.config, self.tensor, self.tokens
        self.dense("ffn.gate", held["ffn.gate.weight"], tokens)
        biases = _nbytes(held, "ffn.gate.bias", "ffn.gate.bias_vl")
        chosen = (F32 + I32) * tokens * config.num_experts_per_tok
        scores = F32 * tokens * config.n_routed_experts
        self.add("ffn.route", parameters=biases, activations=scores + chosen)
        one = _nbytes({name: p for name, p in held.items() if name.startswith("ffn.experts.")})
        spread = tensor.devices if tensor.expert_parallel else 1
        width = 3 * config.hidden_size * config.moe_intermediate_size / tensor.devices
        self.add(
            "ffn.experts",
            parameters=self.experts / spread * one,
            activations=tokens * config.hidden_size * (BF16 + F32) + chosen,
            flops=2 * tokens * config.num_experts_per_tok * width,
        )
        if config.n_shared_experts:
            for name in ("w1", "w3", "w2"):
                self.quantized("ffn.shared_experts", held, f"ffn.shared_experts.{name}")
        # Whole experts are summed apart from the shared one.
        parts = 2 if tensor.expert_parallel else 1
        self.reduce("all-reduce of ffn", parts * F32 * tokens * config.hidden_size)


@functools.lru_cache(maxsize=1024)  # every layer asks for the same
def _counted(module: Any, shape: Any) -> tuple[int, int]:
    return module.bytes(shape), module.flops(shape)


def _nbytes(held: Mapping[str, Parameter], *names: str) -> int:
    return sum(held[name].nbytes for name in names or held)

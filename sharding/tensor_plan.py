"""How one stage's parameters divide over its devices, checked by the parameter's name."""

import dataclasses

from dsv41_jax.config import ModelConfig
from dsv41_jax.config_checks import GROUP
from sharding.stage_plan import PartitionError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """What each of the devices of a stage holds.

    Attributes:
      devices: devices per stage.
      expert_parallel: routed experts are split by expert, not along their channels.
      heads, output_groups, vocabulary: per device.
      shared_intermediate: channels of the shared expert per device.
      experts: routed experts per device.
      padding_experts: empty experts, over all devices, that make them divide.
      expert_intermediate: channels of each routed expert per device.
    """

    devices: int
    expert_parallel: bool
    heads: int
    output_groups: int
    vocabulary: int
    shared_intermediate: int
    experts: int
    padding_experts: int
    expert_intermediate: int


def plan_tensor_parallel(
    config: ModelConfig, devices: int, *, expert_parallel: bool = False
) -> TensorPlan:
    """Divides a stage's parameters over `devices`.

    Raises:
      PartitionError: a parameter does not divide; names it, its size and its unit.
    """
    if devices < 1:
        raise PartitionError(f"tensor parallel size is {devices}: it must be at least 1")
    channels = config.moe_intermediate_size
    divided = [
        ("attn.wq_b.weight and attn.attn_sink", "num_attention_heads", "heads"),
        ("attn.wo_a.weight", "o_groups", "output groups"),
        ("embed.weight and head.weight", "vocab_size", "rows"),
    ]
    for parameter, key, unit in divided:
        if getattr(config, key) % devices:
            raise PartitionError(
                f"{parameter} has {getattr(config, key)} {unit} ({key}), which do not divide "
                f"by the tensor parallel size {devices}"
            )
    groups = config.o_groups // devices
    scaled = [("attn.wo_b.weight", "o_groups * o_lora_rank", config.o_groups * config.o_lora_rank)]
    experts = ["ffn.shared_experts.w2.weight"]
    if not expert_parallel:
        experts.append("ffn.experts.*.w2.weight")
    scaled += [(name, "moe_intermediate_size", channels) for name in experts]
    for parameter, key, size in scaled:
        if size % (devices * GROUP):
            way_out = (
                " or use --enable-expert-parallel" if parameter.startswith("ffn.experts") else ""
            )
            raise PartitionError(
                f"{parameter} has {size} input channels ({key}), which do not divide by the "
                f"tensor parallel size {devices} into whole scale groups of {GROUP}: choose "
                f"another size{way_out}"
            )
    split = devices if expert_parallel else 1
    per_device = -(-config.n_routed_experts // split)
    return TensorPlan(
        devices=devices,
        expert_parallel=expert_parallel,
        heads=config.num_attention_heads // devices,
        output_groups=groups,
        vocabulary=config.vocab_size // devices,
        shared_intermediate=channels // devices,
        experts=per_device,
        padding_experts=per_device * split - config.n_routed_experts,
        expert_intermediate=channels if expert_parallel else channels // devices,
    )

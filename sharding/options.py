"""Options of the partition, the same in every command that takes one."""

import argparse
import dataclasses
import re

from dsv41_jax.config import ModelConfig
from sharding.stage_plan import StagePlan, build_stage_plan
from sharding.tensor_plan import TensorPlan, plan_tensor_parallel

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """How the model is to be spread over devices, as asked for.

    Attributes:
      pipeline_parallel_size: stages; None where the layer counts say it, or for one stage.
      pipeline_stages: layers per stage; None to choose the best balanced legal partition.
      pipeline_relay: whether shared things may cross stages.
      pipeline_relay_max_bytes: most bytes per token over one hop; None for no limit.
      pipeline_microbatches: parts a step is cut into; None for the number of stages.
      tensor_parallel_size: devices per stage.
      enable_expert_parallel: split routed experts by expert.
    """

    pipeline_parallel_size: int | None = None
    pipeline_stages: tuple[int, ...] | None = None
    pipeline_relay: bool = False
    pipeline_relay_max_bytes: int | None = None
    pipeline_microbatches: int | None = None
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False

    def stage_plan(self, config: ModelConfig) -> StagePlan:
        """The stages; raises ConfigError or PartitionError where they are refused."""
        return build_stage_plan(
            config,
            stages=self.pipeline_stages,
            num_stages=self.pipeline_parallel_size,
            relay=self.pipeline_relay,
            relay_max_bytes=self.pipeline_relay_max_bytes,
        )

    def tensor_plan(self, config: ModelConfig) -> TensorPlan:
        """What a device of a stage holds; raises PartitionError where it does not divide."""
        return plan_tensor_parallel(
            config, self.tensor_parallel_size, expert_parallel=self.enable_expert_parallel
        )

    @property
    def devices(self) -> int:
        """Devices of all stages."""
        stages = self.pipeline_parallel_size or len(self.pipeline_stages or (0,))
        return stages * self.tensor_parallel_size

    def microbatches(self, plan: StagePlan) -> int:
        """Parts a step is cut into."""
        return self.pipeline_microbatches or len(plan.stages)


def add_partition_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options to a command; read them with `partition_options`."""
    group = parser.add_argument_group("partition")
    group.add_argument(
        "--pipeline-parallel-size",
        type=positive,
        metavar="N",
        help="pipeline stages; without --pipeline-stages the best balanced legal partition",
    )
    group.add_argument(
        "--pipeline-stages", type=layer_counts, metavar="20,20", help="layers of every stage"
    )
    group.add_argument(
        "--pipeline-relay",
        action="store_true",
        help="carry shared KV, index keys, top-k sets and candidates across stages",
    )
    group.add_argument(
        "--pipeline-relay-max-bytes",
        type=positive,
        metavar="BYTES",
        help="most bytes per token that the relay may carry from one stage to the next",
    )
    group.add_argument(
        "--pipeline-microbatches",
        type=positive,
        metavar="N",
        help="parts a step is cut into (default: the number of stages)",
    )
    group.add_argument(
        "--tensor-parallel-size",
        type=positive,
        default=1,
        metavar="N",
        help="devices per stage (default: 1)",
    )
    group.add_argument(
        "--enable-expert-parallel",
        action="store_true",
        help="split routed experts by expert over the devices of a stage",
    )


def partition_options(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> PartitionOptions:
    """Reads what `add_partition_options` added; contradictions end in a usage error."""
    size, stages = args.pipeline_parallel_size, args.pipeline_stages
    if size is not None and stages is not None and size != len(stages):
        parser.error(
            f"--pipeline-parallel-size {size} contradicts --pipeline-stages "
            f"{','.join(map(str, stages))}, which has {len(stages)} stages"
        )
    if args.pipeline_relay_max_bytes is not None and not args.pipeline_relay:
        parser.error("--pipeline-relay-max-bytes needs --pipeline-relay")
    names = [field.name for field in dataclasses.fields(PartitionOptions)]
    return PartitionOptions(**{name: getattr(args, name) for name in names})


def positive(text: str) -> int:
    """An integer of at least 1, from an option's text."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return number


def byte_size(text: str) -> int:
    """Bytes, from text such as "4G" or "512M" (powers of two) or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:iB|B)?", text)
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: give bytes, or a number with K, M or G such as 512M"
        )
    return size


def layer_counts(text: str) -> tuple[int, ...]:
    """Layers per stage, from text such as "20,20"."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be layer counts with commas between, such as 20,20"
        ) from None

"""Mesh axis names, and how many devices share the work along each inside one stage."""

import dataclasses

DATA, EXPERT, TENSOR = "data", "expert", "tensor"
EXPERT_AXES = (EXPERT, TENSOR)  # what whole experts are spread over


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partition:
    """Devices of one stage, by mesh axis.

    Modules declare their parameters at the shapes ONE device holds. A size of 1 means that
    the axis is unused and that nothing is communicated along it.

    Attributes:
      tensor: devices that split heads, output groups, vocabulary and intermediate channels.
      expert: devices that split the routed experts, along `EXPERT_AXES`: all of the stage's,
        or 1 where each holds a slice of every expert.
    """

    tensor: int = 1
    expert: int = 1


WHOLE = Partition()

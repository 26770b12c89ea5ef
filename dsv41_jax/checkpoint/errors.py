"""The error of everything that is wrong with a checkpoint directory."""

from collections.abc import Sequence

_SHOWN = 5


class CheckpointError(ValueError):
    """A checkpoint directory that cannot be served.

    Attributes:
      faults: one sentence each; the message shows the first few and how many there are.
    """

    def __init__(self, where: str, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        if len(faults) == 1:
            message = f"{where}: {faults[0]}"
        else:
            rest = len(faults) - _SHOWN
            more = f"; and {rest} more" if rest > 0 else ""
            message = f"{where}: {len(faults)} faults: {'; '.join(faults[:_SHOWN])}{more}"
        super().__init__(message)


class NoCheckpointError(CheckpointError):
    """A path that is no checkpoint directory at all."""

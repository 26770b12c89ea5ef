"""The embedding table, memory-mapped on the host, and the rows of a step's tokens."""

import pathlib
from typing import Self

import numpy as np

from dsv41_jax.checkpoint import CheckpointError, open_checkpoint
from dsv41_jax.config import ModelConfig

_NAME = "embed.weight"


class EmbeddingTable:
    """Embedding rows from host memory, for stages whose `embedding` is "host"."""

    def __init__(self, weight: np.ndarray) -> None:
        """
        Args:
          weight: bf16[V, D], in any host memory.
        """
        self._weight = weight

    @classmethod
    def open(cls, path: str | pathlib.Path, config: ModelConfig) -> Self:
        """Maps the table of a checkpoint directory; nothing is read before it is looked up.

        Raises:
          CheckpointError: the directory is not a complete checkpoint in the released layout.
        """
        checkpoint = open_checkpoint(path, config)
        if _NAME not in checkpoint.tensors:
            raise CheckpointError(
                str(path),
                [f"{_NAME} is not in its shards: rows on the host need the original checkpoint"],
            )
        return cls(checkpoint.read(_NAME))

    def rows(self, token_ids: np.ndarray) -> np.ndarray:
        """bf16[T, D] of int32[T]."""
        return self._weight.take(token_ids, axis=0)

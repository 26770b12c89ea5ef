"""Engram tables, memory-mapped on the host, and the lookup of a step's rows."""

import mmap
import pathlib
from collections.abc import Iterable, Mapping
from typing import Self

import numpy as np
import tokenizers

from dsv41_jax.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from dsv41_jax.config import ConfigError, ModelConfig
from dsv41_jax.engram_hash import EngramHasher, token_map_from_tokenizer
from dsv41_jax.quantization.rows import PackedRows

TOKENIZER_NAME = "tokenizer.json"


def read_tokenizer(path: str | pathlib.Path) -> tokenizers.Tokenizer:
    """Reads a checkpoint directory's tokenizer.

    Raises:
      CheckpointError: there is none, or it cannot be parsed.
    """
    file = pathlib.Path(path) / TOKENIZER_NAME
    if not file.is_file():
        raise CheckpointError(str(path), [f"{TOKENIZER_NAME} is missing"])
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(
            str(path), [f"{TOKENIZER_NAME} is no tokenizer file: {error}"]
        ) from None


class EngramTables:
    """The tables of some Engram layers, and the hash that addresses them.

    Attributes:
      hasher: token ids to row numbers.
      layer_ids: backbone layers whose tables are here.
    """

    def __init__(self, hasher: EngramHasher, tables: Mapping[int, PackedRows]) -> None:
        """Takes tables that lie in any host memory.

        Args:
          hasher: of the whole model.
          tables: by layer, uint8[rows, head_dim] codes and uint8[rows, head_dim / 32] scales.
        """
        self.hasher = hasher
        self.layer_ids = tuple(tables)
        self._tables = [
            (hasher.layer_ids.index(layer), layer, table) for layer, table in tables.items()
        ]

    @classmethod
    def open(
        cls,
        path: str | pathlib.Path,
        config: ModelConfig,
        *,
        tokenizer: tokenizers.Tokenizer | None = None,
        layers: Iterable[int] | None = None,
    ) -> Self:
        """Maps the tables of a checkpoint directory; nothing is read before it is looked up.

        Args:
          path: checkpoint directory.
          config: its configuration, with an Engram part.
          tokenizer: the directory's, if it is already at hand.
          layers: backbone layers of one stage, all if None; those without a table are passed by.

        Raises:
          CheckpointError: the directory is not a complete checkpoint, has no tokenizer, or one
            whose texts do not give the configured compressed vocabulary.
          ConfigError: the configuration has no Engram part, or its table sizes contradict it.
        """
        engram = config.engram
        if engram is None:
            raise ConfigError("the configuration has no Engram layers (engram_layer_ids)")
        tokenizer = tokenizer or read_tokenizer(path)
        hasher = EngramHasher(engram, token_map_from_tokenizer(tokenizer, config.vocab_size))
        checkpoint = open_checkpoint(path, config)
        wanted = set(engram.layer_ids if layers is None else layers)
        tables = {
            layer: PackedRows(
                codes=_map(checkpoint, f"layers.{layer}.engram.embed.weight"),
                scales=_map(checkpoint, f"layers.{layer}.engram.embed.scale"),
            )
            for layer in engram.layer_ids
            if layer in wanted
        }
        return cls(hasher, tables)

    def lookup(self, token_ids: np.ndarray, history: np.ndarray) -> dict[int, PackedRows]:
        """Gathers the rows of every n-gram that ends at a token of the step.

        Args:
          token_ids: int[n], -1 for image tokens.
          history: int[max_ngram_size - 1], the ids before them, oldest first, -1 for none.

        Returns:
          By layer, numpy uint8[n, columns, head_dim] codes and uint8[n, columns, head_dim / 32]
          scales.

        Raises:
          ValueError: a wrong history length, or an id outside the vocabulary.
        """
        rows = self.hasher.hash(token_ids, history)
        return {
            layer: PackedRows(
                codes=table.codes.take(rows[:, axis], axis=0),
                scales=table.scales.take(rows[:, axis], axis=0),
            )
            for axis, layer, table in self._tables
        }


def _map(checkpoint: Checkpoint, name: str) -> np.ndarray:
    # Rows are far apart: reading ahead of them would fill memory with bytes nobody asks for.
    checkpoint.advise(name, mmap.MADV_RANDOM)
    return checkpoint.read_bytes(name)

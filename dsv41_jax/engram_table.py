"""Engram tables, memory-mapped on the host, and the lookup of a step's rows."""

import concurrent.futures
import mmap
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol, Self

import numpy as np
import tokenizers
import tqdm

from dsv41_jax.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from dsv41_jax.config import ConfigError, EngramConfig, ModelConfig
from dsv41_jax.engram_hash import EngramHasher, token_map_from_tokenizer
from pallas_kernels.packed_rows import PackedRows

TOKENIZER_NAME = "tokenizer.json"
Placement = Literal["mmap", "ram", "device"]

_COPY_BYTES = 16 << 20


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


class EngramRows(Protocol):
    """Where the Engram rows of a step come from.

    Attributes:
      layer_ids: the layers it has rows of.
    """

    layer_ids: tuple[int, ...]

    def step_rows(
        self, token_ids: Sequence[np.ndarray], histories: Sequence[np.ndarray], tokens: int
    ) -> dict[int, PackedRows]:
        """Rows of a step by layer, uint8[tokens, columns, ...]; zeros past the last token.

        Args:
          token_ids, histories: by request, see `EngramTables.lookup`.
          tokens: T of the bucket, at least as many as are given.

        Raises:
          ValueError: a wrong history length, or an id outside the vocabulary.
        """
        ...


class EngramTables:
    """The tables of some Engram layers, and the hash that addresses them.

    Attributes:
      hasher: token ids to row numbers.
      layer_ids: backbone layers whose tables are here.
      tables: by layer, codes and scales of all rows.
    """

    def __init__(self, hasher: EngramHasher, tables: Mapping[int, PackedRows]) -> None:
        """Takes tables that lie in any host memory.

        Args:
          hasher: of the whole model.
          tables: by layer, uint8[rows, head_dim] codes and uint8[rows, head_dim / 32] scales.
        """
        self.hasher = hasher
        self.layer_ids = tuple(tables)
        self.tables = dict(tables)
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
        placement: Placement = "mmap",
        prefault: bool = False,
        progress: bool = True,
    ) -> Self:
        """Opens the tables of a checkpoint directory.

        A memory map is shared by all processes of a host, and nothing of it is read before it is
        looked up, unless it is pre-faulted.

        Args:
          path: checkpoint directory.
          config: its configuration, with an Engram part.
          tokenizer: the directory's, if it is already at hand.
          layers: backbone layers of one stage, all if None; those without a table are passed by.
          placement: "mmap" leaves the tables in the files, to be read here and there; "ram"
            copies them to memory; "device" leaves them in the files, to be read once from
            front to back (see `dsv41_jax.engram_device`).
          prefault: whether to read memory-mapped tables into the page cache now.
          progress: whether to show a progress bar on stderr while tables are read.

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
        held = [layer for layer in engram.layer_ids if layer in wanted]
        rows = sum(engram.num_embeddings[engram.layer_ids.index(layer)] for layer in held)
        with tqdm.tqdm(
            total=rows * (engram.head_dim + engram.head_dim // 32),
            desc="Reading Engram tables",
            unit="B",
            unit_scale=True,
            disable=not (progress and (prefault or placement == "ram")),
        ) as bar:
            tables = {
                layer: _table(checkpoint, layer, placement, prefault=prefault, bar=bar)
                for layer in held
            }
        return cls(hasher, tables)

    def lookup(self, token_ids: np.ndarray, history: np.ndarray) -> dict[int, PackedRows]:
        """Gathers the rows of every n-gram that ends at a token of one request.

        Args:
          token_ids: int[n], -1 for image tokens.
          history: int[max_ngram_size - 1], the ids before them, oldest first, -1 for none.

        Returns:
          By layer, numpy uint8[n, columns, head_dim] codes and uint8[n, columns, head_dim / 32]
          scales.

        Raises:
          ValueError: a wrong history length, or an id outside the vocabulary.
        """
        out = empty_rows(self.hasher.config, self.layer_ids, len(token_ids))
        self.lookup_many([token_ids], [history], out)
        return out

    def lookup_many(
        self,
        token_ids: Sequence[np.ndarray],
        histories: Sequence[np.ndarray],
        out: Mapping[int, PackedRows],
    ) -> None:
        """Gathers the rows of several requests at once, one request after the other.

        Args:
          token_ids, histories: by request, see `lookup`.
          out: by layer, numpy arrays like those of `lookup` for at least as many tokens; rows
            past the last token are left as they are.

        Raises:
          ValueError: a wrong history length, or an id outside the vocabulary.
        """
        self.gather(self.hasher.ngrams(token_ids, histories), out)

    def step_rows(
        self, token_ids: Sequence[np.ndarray], histories: Sequence[np.ndarray], tokens: int
    ) -> dict[int, PackedRows]:
        """Numpy rows of a whole step; see `EngramRows`."""
        out = empty_rows(self.hasher.config, self.layer_ids, tokens)
        self.lookup_many(token_ids, histories, out)
        return out

    def gather(self, ngrams: np.ndarray, out: Mapping[int, PackedRows]) -> None:
        """Gathers the rows of int64[n, N] n-grams (see `EngramHasher.ngrams`) to the first n."""
        rows, count = self.hasher.hash_ngrams(ngrams), len(ngrams)
        for axis, layer, table in self._tables:
            index, found = rows[:, axis], out[layer]
            # Row numbers are within their table, so nothing is clipped; raising would buffer.
            table.codes.take(index, axis=0, out=found.codes[:count], mode="clip")
            table.scales.take(index, axis=0, out=found.scales[:count], mode="clip")


def empty_rows(config: EngramConfig, layers: Iterable[int], tokens: int) -> dict[int, PackedRows]:
    """Zeroed rows of `tokens` tokens by layer, for `EngramTables.lookup_many`."""
    shape = (tokens, config.num_columns)
    return {
        layer: PackedRows(
            np.zeros((*shape, config.head_dim), np.uint8),
            np.zeros((*shape, config.head_dim // 32), np.uint8),
        )
        for layer in layers
    }


def _table(
    checkpoint: Checkpoint, layer: int, placement: Placement, *, prefault: bool, bar: tqdm.tqdm
) -> PackedRows:
    codes, scales = (f"layers.{layer}.engram.embed.{part}" for part in ("weight", "scale"))
    if placement == "ram":
        return PackedRows(*(_copy(checkpoint.read_bytes(name), bar) for name in (codes, scales)))
    for name in (codes, scales):
        if prefault:
            checkpoint.populate(name, bar.update)
        if placement == "mmap":
            # Rows are far apart: reading ahead would fill memory with bytes nobody asks for.
            checkpoint.advise(name, mmap.MADV_RANDOM)
    return PackedRows(checkpoint.read_bytes(codes), checkpoint.read_bytes(scales))


def _copy(source: np.ndarray, bar: tqdm.tqdm) -> np.ndarray:
    """A copy in memory of this process, made by several threads."""
    copied = np.empty_like(source)
    step = max(1, _COPY_BYTES // source.shape[1])

    def copy(row: int) -> int:
        np.copyto(copied[row : row + step], source[row : row + step])
        return copied[row : row + step].size

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for size in pool.map(copy, range(0, len(source), step)):
            bar.update(size)
    return copied

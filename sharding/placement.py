"""What need not be on the devices: options of tables and experts, and opening the tables."""

import argparse
import dataclasses
import pathlib
from collections.abc import Iterable
from typing import get_args

import tokenizers
from jax.sharding import Mesh

from dsv41_jax.config import ModelConfig
from dsv41_jax.embedding_table import EmbeddingTable
from dsv41_jax.engram_device import DeviceTables
from dsv41_jax.engram_table import EngramRows, EngramTables, Placement
from dsv41_jax.model import EmbeddingPlacement
from sharding.offload import GIB


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablePlacement:
    """Where tables and routed experts are, as asked for.

    Attributes:
      engram: "mmap" leaves Engram tables in the files, "ram" copies them to host memory,
        "device" spreads them over the devices of their stage.
      engram_prefault: whether memory-mapped Engram tables are read before anything is served.
      embedding: "device" splits the embedding over the devices of the first stage, "host" leaves
        it in the files and sends a step's rows.
      cpu_offload_bytes: host memory for routed experts of each device; see `sharding.offload`.
    """

    engram: Placement = "mmap"
    engram_prefault: bool = False
    embedding: EmbeddingPlacement = "device"
    cpu_offload_bytes: int = 0

    def open_engram(
        self,
        path: str | pathlib.Path,
        config: ModelConfig,
        mesh: Mesh,
        *,
        layers: Iterable[int] | None = None,
        tokenizer: tokenizers.Tokenizer | None = None,
        progress: bool = True,
    ) -> EngramRows:
        """The tables of a stage's Engram layers, where they are to be.

        Args:
          path: checkpoint directory.
          config: its configuration, with an Engram part.
          mesh: devices of the stage.
          layers: of the stage, all if None.
          tokenizer: the directory's, if it is already at hand.
          progress: whether to show a progress bar on stderr while tables are read.

        Raises:
          CheckpointError, ConfigError: see `EngramTables.open`.
        """
        tables = EngramTables.open(
            path,
            config,
            tokenizer=tokenizer,
            layers=layers,
            placement=self.engram,
            prefault=self.engram_prefault,
            progress=progress,
        )
        if self.engram == "device":
            return DeviceTables(tables, mesh, progress=progress)
        return tables

    def open_embedding(
        self, path: str | pathlib.Path, config: ModelConfig
    ) -> EmbeddingTable | None:
        """The embedding on the host, or None where it is a parameter of the first stage.

        Raises:
          CheckpointError: see `EmbeddingTable.open`.
        """
        return EmbeddingTable.open(path, config) if self.embedding == "host" else None


_MOST_GIB = 2**20
DEFAULT_PLACEMENT = TablePlacement()


def add_placement_options(group: argparse._ActionsContainer) -> None:
    """Adds the options that decide what devices hold; read them with `placement_options`."""
    group.add_argument(
        "--engram-placement",
        choices=get_args(Placement),
        default="mmap",
        help="Engram tables as memory maps that processes share, copied to RAM, or spread over "
        "the devices of their stage; %(default)s",
    )
    group.add_argument(
        "--embedding-placement",
        choices=get_args(EmbeddingPlacement),
        default="device",
        help="the embedding split over the devices of the first stage, or a memory map on the "
        "host; %(default)s",
    )
    group.add_argument(
        "--cpu-offload-gb",
        type=_gib,
        default=0,
        dest="cpu_offload_bytes",
        metavar="N",
        help="GiB of pinned host memory for each device that hold routed experts of its stage's "
        "last layers, as many as fit; every step copies them, so only for devices that are too "
        "small; 0",
    )


def placement_options(args: argparse.Namespace, *, engram_prefault: bool = False) -> TablePlacement:
    """Reads what `add_placement_options` added."""
    return TablePlacement(
        engram=args.engram_placement,
        engram_prefault=engram_prefault,
        embedding=args.embedding_placement,
        cpu_offload_bytes=args.cpu_offload_bytes,
    )


def _gib(text: str) -> int:
    """Bytes, from a number of GiB."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= _MOST_GIB:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB from 0 to {_MOST_GIB}")
    return int(number * GIB)

"""Engram tables on the devices of a stage, and the lookup of a step's rows there."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv41_jax.axes import TENSOR
from dsv41_jax.engram_hash import EngramHasher
from dsv41_jax.engram_table import EngramTables
from pallas_kernels.packed_rows import PackedRows


class DeviceTables:
    """The tables of some Engram layers on devices, which share them by row; see `EngramRows`.

    The host hashes, a small program of its own gathers, and the rows never leave the devices: a
    step takes them as it takes those of the host.

    Attributes:
      hasher: token ids to row numbers.
      layer_ids: backbone layers whose tables are here.
      tables: by layer, codes and scales of all rows, split by row.
    """

    def __init__(self, tables: EngramTables, mesh: Mesh, *, progress: bool = False) -> None:
        """Copies tables to the devices, each device its rows.

        Args:
          tables: in any host memory; not kept.
          mesh: the devices, along `TENSOR`.
          progress: whether to show a progress bar on stderr.
        """
        self.hasher: EngramHasher = tables.hasher
        self.layer_ids = tables.layer_ids
        with tqdm.tqdm(
            total=sum(leaf.nbytes for leaf in jax.tree.leaves(tables.tables)),
            desc="Copying Engram tables to the devices",
            unit="B",
            unit_scale=True,
            disable=not progress,
        ) as bar:
            self.tables = jax.tree.map(functools.partial(_place, mesh, bar), tables.tables)
        self._gather = _gather_program(mesh)
        self._index_sharding = NamedSharding(mesh, PartitionSpec())

    def step_rows(
        self, token_ids: Sequence[np.ndarray], histories: Sequence[np.ndarray], tokens: int
    ) -> dict[int, PackedRows]:
        """Rows of a whole step, the same on every device; see `EngramRows`."""
        rows = self.hasher.hash_many(token_ids, histories)
        index = {}
        for layer in self.layer_ids:
            found = rows[:, self.hasher.layer_ids.index(layer)]
            index[layer] = np.full((tokens, found.shape[1]), -1, np.int32)
            index[layer][: len(found)] = found
        return self._gather(self.tables, jax.device_put(index, self._index_sharding))


def rows_per_device(rows: int, devices: int) -> int:
    """Rows of a table that each of a stage's devices holds, the last ones perhaps unused."""
    return -(-rows // devices)


def _place(mesh: Mesh, bar: tqdm.tqdm, table: np.ndarray) -> jax.Array:
    devices, (rows, width) = mesh.shape[TENSOR], table.shape
    share = rows_per_device(rows, devices)

    def read(index: tuple[slice, slice]) -> np.ndarray:
        begin = index[0].start or 0
        own = table[begin : begin + share]
        bar.update(own.nbytes)
        return own if len(own) == share else np.pad(own, ((0, share - len(own)), (0, 0)))

    sharding = NamedSharding(mesh, PartitionSpec(TENSOR, None))
    return jax.make_array_from_callback((share * devices, width), sharding, read)


def _gather_program(
    mesh: Mesh,
) -> Callable[[dict[int, PackedRows], dict[int, jax.Array]], dict[int, PackedRows]]:
    """The jitted lookup: tables and int32[T, columns] row numbers, -1 for zeros, to rows."""
    split, everywhere = PartitionSpec(TENSOR, None), PartitionSpec()

    def take(index: jax.Array, table: jax.Array) -> jax.Array:
        local = index - jax.lax.axis_index(TENSOR) * table.shape[0]
        here = (index >= 0) & (local >= 0) & (local < table.shape[0])
        found = jnp.where(here[..., None], table[jnp.where(here, local, 0)], jnp.uint8(0))
        return jax.lax.psum(found, TENSOR)  # one device has the row, the others zeros

    def gather(tables: dict[int, PackedRows], index: dict[int, jax.Array]) -> dict[int, PackedRows]:
        return {
            layer: jax.tree.map(functools.partial(take, index[layer]), table)
            for layer, table in tables.items()
        }

    sharded = jax.shard_map(
        gather, mesh=mesh, in_specs=(split, everywhere), out_specs=everywhere, check_vma=False
    )
    return jax.jit(sharded)

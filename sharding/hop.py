"""From one stage's devices to the next one's, where they are of different processes.

`device_put` between processes is not there on every platform. A permutation over both stages'
devices is a collective like any other: all processes that have one of them dispatch it, in the
order of the microbatches.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv41_jax.axes import TENSOR
from dsv41_jax.config import ModelConfig
from dsv41_jax.layers.block import Stream
from sharding.boundary import bundle_shardings
from sharding.hosts import own_devices
from sharding.relay import Bundle

_HOP = "hop"
_SPEC = PartitionSpec((_HOP, TENSOR))

Shards = dict[jax.Device, jax.Array]


class Hop:
    """Passes the stream from a stage to the next, device by device; nothing is relayed."""

    def __init__(self, config: ModelConfig, sender: Mesh, receiver: Mesh) -> None:
        """
        Args:
          config: the model.
          sender, receiver: meshes of two stages, as large as each other, with no device in both.
        """
        copies, width = config.hc_mult, config.hidden_size
        self._leaves = (((copies, width), jnp.bfloat16), ((copies,), jnp.float32))  # of Stream
        self._receiver = receiver
        self._receivers = own_devices(receiver.devices.flat)
        mesh = Mesh(np.stack([sender.devices.ravel(), receiver.devices.ravel()]), (_HOP, TENSOR))
        self._own = own_devices(mesh.devices.flat)
        self._sharding = NamedSharding(mesh, _SPEC)
        self._program = jax.jit(
            jax.shard_map(_move, mesh=mesh, in_specs=_SPEC, out_specs=_SPEC, check_vma=False),
            in_shardings=self._sharding,
            out_shardings=self._sharding,
        )
        self._blanks: dict[int, list[Shards]] = {}

    def carry(self, sent: Bundle | None, tokens: int) -> Bundle | None:
        """Starts the hop, if this process has a part in it.

        Args:
          sent: by the stage before; None where that is on other processes.
          tokens: T of the microbatch.

        Returns:
          What the next stage receives; None where that is on other processes.
        """
        if not self._own:
            return None
        rows = -(-tokens // self._receiver.size)
        shards = self._blank(rows)
        if sent is not None:
            leaves = (sent.stream.x, sent.stream.pre)
            shards = [own | _shards(leaf) for own, leaf in zip(shards, leaves, strict=True)]
        x, pre = (_join(own, self._own, self._sharding) for own in shards)
        moved = self._program(Stream(x, pre))
        if not self._receivers:
            return None
        to = bundle_shardings(self._receiver).stream
        return Bundle(
            Stream(
                _join(_shards(moved.x), self._receivers, to.x),
                _join(_shards(moved.pre), self._receivers, to.pre),
            ),
            *({}, {}, {}, {}),
        )

    def _blank(self, rows: int) -> list[Shards]:
        """What the receiving devices of this process put in: zeros, by leaf."""
        if rows not in self._blanks:
            self._blanks[rows] = [
                {
                    device: jax.device_put(np.zeros((rows, *shape), dtype), device)
                    for device in self._receivers
                }
                for shape, dtype in self._leaves
            ]
        return self._blanks[rows]


def _move(stream: Stream) -> Stream:
    return jax.tree.map(lambda a: jax.lax.ppermute(a, _HOP, [(0, 1)]), stream)


def _shards(array: jax.Array) -> Shards:
    """What this process holds of an array, by device."""
    return {shard.device: shard.data for shard in array.addressable_shards}


def _join(shards: Shards, devices: list[jax.Device], sharding: NamedSharding) -> jax.Array:
    """An array that is split by rows over all devices of a sharding, from this process's part."""
    rows, *rest = shards[devices[0]].shape
    shape = (rows * sharding.mesh.size, *rest)
    parts = [shards[device] for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)

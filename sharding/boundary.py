"""The stream at a stage boundary: every device of a stage sends and receives its own rows."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv41_jax.axes import TENSOR
from dsv41_jax.layers.block import Stream
from sharding.relay import Bundle


def shard_rows(stream: Stream, devices: int) -> Stream:
    """This device's rows of a stream that all devices of the stage hold.

    Args:
      stream: [T, ...], equal on all devices; padded with zeros to a multiple of `devices`.
      devices: of the tensor axis.
    """
    if devices == 1:
        return stream
    share = -(-stream.x.shape[0] // devices)

    def own(a: jax.Array) -> jax.Array:
        padding = [(0, share * devices - a.shape[0])] + [(0, 0)] * (a.ndim - 1)
        first = jax.lax.axis_index(TENSOR) * share
        return jax.lax.dynamic_slice_in_dim(jnp.pad(a, padding), first, share)

    return jax.tree.map(own, stream)


def gather_rows(stream: Stream, rows: int, devices: int) -> Stream:
    """The whole stream of `rows` rows from every device's own; padding is trimmed.

    Args:
      stream: [ceil(rows / devices), ...], the rows that `shard_rows` gave this device.
      rows: T.
      devices: of the tensor axis.
    """
    if devices == 1:
        return stream
    return jax.tree.map(lambda a: jax.lax.all_gather(a, TENSOR, axis=0, tiled=True)[:rows], stream)


def bundle_specs() -> Bundle:
    """How a bundle lies on a stage: the stream by rows, relayed things on every device."""
    rows, everywhere = PartitionSpec(TENSOR), PartitionSpec()
    return Bundle(Stream(rows, rows), everywhere, everywhere, everywhere, everywhere)


def bundle_shardings(mesh: Mesh) -> Bundle:
    """`bundle_specs` on a stage's devices."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), bundle_specs())

"""Routed experts that stay in host memory and are copied to the device a layer ahead.

A step's program takes them as arguments in host memory and copies each layer's whole experts
while the layer before computes. The copy waits for the input of that layer: by then the layer
before it is done, so the experts of at most `BUFFERS` layers that are copied are on the device at
any time.
"""

from typing import Any

import jax

from dsv41_jax.layers.block import Stream

HOST = "pinned_host"  # memory that devices copy from while they compute
BUFFERS = 2  # one layer computes, the next one's experts arrive


def fetch_experts(layer: Any, stream: Stream) -> tuple[Any, Stream]:
    """Starts to copy a layer's routed experts to the device.

    Args:
      layer: parameters of the layer, its routed experts in host memory.
      stream: the copy starts when it is there.

    Returns:
      The parameters with the experts on the device, and the stream; what reads the returned one
      does not wait for the copy.
    """
    ffn = layer["ffn"]
    # Both pass one barrier, or the compiler could start all layers' copies at once.
    experts, stream = jax.lax.optimization_barrier((ffn["experts"], stream))
    arriving = jax.device_put(experts, jax.memory.Space.Device)
    return layer | {"ffn": ffn | {"experts": arriving}}, stream

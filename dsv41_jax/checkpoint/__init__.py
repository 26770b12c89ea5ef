"""Checkpoints in the released layout: reading, checking, loading, making random ones."""

from dsv41_jax.checkpoint.errors import CheckpointError, NoCheckpointError
from dsv41_jax.checkpoint.groups import abstract_params
from dsv41_jax.checkpoint.key_map import (
    ParameterPath,
    TensorSpec,
    expected_tensors,
    layout_faults,
    parameter_path,
    tensor_name,
)
from dsv41_jax.checkpoint.loader import (
    ComponentSize,
    component_sizes,
    load_params,
    open_checkpoint,
)
from dsv41_jax.checkpoint.reader import Checkpoint, StoredTensor

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ComponentSize",
    "NoCheckpointError",
    "ParameterPath",
    "StoredTensor",
    "TensorSpec",
    "abstract_params",
    "component_sizes",
    "expected_tensors",
    "layout_faults",
    "load_params",
    "open_checkpoint",
    "parameter_path",
    "tensor_name",
]

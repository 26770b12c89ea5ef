"""Top-level entries of the parameter tree in Orbax: written sharded, restored to any mesh."""

import pathlib
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp

from dsv41_jax.checkpoint.errors import CheckpointError
from dsv41_jax.checkpoint.groups import ParameterGroup, Shardings, abstract_leaf, params_tree

_UNFINISHED = ".orbax-checkpoint-tmp"


def _checkpointer() -> ocp.Checkpointer:
    # One plain file per shard: any number of devices reads its own without the others'.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True))


def save_unit(path: pathlib.Path, tree: dict[str, Any]) -> None:
    """Writes one top-level entry, a shard per device that holds a part of a leaf."""
    with _checkpointer() as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))


def remove_unfinished(directory: pathlib.Path) -> None:
    """Removes what an interrupted conversion left half written."""
    for path in directory.glob(f"stage_*/*{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def restore_unit(
    path: pathlib.Path, groups: list[ParameterGroup], shardings: Shardings | None
) -> dict[tuple[str, ...], jax.Array]:
    """Reads leaves of one top-level entry to their devices, whatever mesh they were written from.

    Raises:
      CheckpointError: files are damaged or of another model.
    """
    tree = params_tree((g.keys[1:], abstract_leaf(g, shardings)) for g in groups)

    def placed(leaf: jax.ShapeDtypeStruct) -> ocp.ArrayRestoreArgs:
        sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        # not strict: padding experts are cut off or added
        return ocp.ArrayRestoreArgs(
            sharding=sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=False
        )

    args = ocp.args.PyTreeRestore(
        item=tree, restore_args=jax.tree.map(placed, tree), partial_restore=True
    )
    try:
        with _checkpointer() as checkpointer:
            restored = checkpointer.restore(path, args=args)
    except (ValueError, KeyError, OSError) as error:
        text = " ".join(str(error).split())
        raise CheckpointError(str(path), [f"it cannot be restored: {text[:300]}"]) from None
    flat = jax.tree_util.tree_leaves_with_path(restored)
    found = {tuple(key.key for key in keys): leaf for keys, leaf in flat}
    return {group.keys: found[group.keys[1:]] for group in groups}

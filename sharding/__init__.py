"""Stages, meshes and the relay: how one model runs on many devices."""

from typing import Any

__all__ = ["build_pipeline"]


def __getattr__(name: str) -> Any:
    """Imports `build_pipeline` on first use, so that the plan command starts without JAX."""
    if name == "build_pipeline":
        from sharding.pipeline import build_pipeline

        return build_pipeline
    raise AttributeError(f"module 'sharding' has no attribute {name!r}")

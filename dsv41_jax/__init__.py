"""DeepSeek-V4.1-Flash inference as pure functional JAX."""

import importlib
from typing import Any

_PUBLIC = ("Model", "generate", "load", "score")
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Imports the public names on first use, so that commands without JAX start at once."""
    if name in _PUBLIC:
        return getattr(importlib.import_module("dsv41_jax.inference"), name)
    raise AttributeError(f"module 'dsv41_jax' has no attribute {name!r}")

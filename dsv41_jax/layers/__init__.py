"""Layers as Flax modules: parameters and row-wise arithmetic, nothing that crosses rows."""

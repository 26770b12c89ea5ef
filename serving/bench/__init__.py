"""Benchmarks: scripts with fixed seeds that print their setup and a ratio."""

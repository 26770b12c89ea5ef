"""Packed rows of caches and tables."""

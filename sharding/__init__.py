"""Stages, meshes and the relay: how one model runs on many devices."""

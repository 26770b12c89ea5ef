"""A tiny checkpoint and pipelines over it, built once for all tests."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from tiny_pipeline import LENGTH, run, tiny_config, write_tiny

import dsv41_jax
from sharding.pipeline import build_pipeline
from sharding.stage_plan import build_stage_plan
from sharding.tensor_plan import plan_tensor_parallel


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny_pipeline"))


@pytest.fixture(scope="session")
def token_ids():
    return np.random.default_rng(0).integers(0, tiny_config().vocab_size, LENGTH)


@pytest.fixture(scope="session")
def whole(tiny, token_ids):
    """Logits of the whole model as one program on one device."""
    return dsv41_jax.score(dsv41_jax.load(tiny, progress=False), token_ids.tolist())


@pytest.fixture(scope="session")
def pipeline_of(tiny):
    """Builds a pipeline of the tiny model; equal arguments give the same one."""

    @functools.cache
    def build(stages, *, tensor=1, expert=False, relay=False, places=None):
        config = tiny_config()
        plan = build_stage_plan(config, stages=stages, relay=relay)
        devices = None
        if places:  # each stage's first device; stages may share them
            devices = [device for i in places for device in jax.devices()[i : i + tensor]]
        division = plan_tensor_parallel(config, tensor, expert_parallel=expert)
        return build_pipeline(tiny, plan, division, devices=devices, progress=False)

    return build


@pytest.fixture(scope="session")
def logits_of(pipeline_of, token_ids):
    """Logits of a pipeline, for any cutting of the prompt into chunks and microbatches."""

    @functools.cache
    def logits(stages, *, chunk=LENGTH, microbatches=1, **options):
        pipeline = pipeline_of(stages, **options)
        pipeline = dataclasses.replace(pipeline, microbatches=microbatches)
        return run(pipeline, token_ids, chunk)[0]

    return logits

"""A model just large enough to have every kind of layer and of crossing."""

import dataclasses

import numpy as np

from dsv41_jax.checkpoint.synthetic import make_checkpoint
from dsv41_jax.checkpoint.tiny_tokenizer import tiny_tokenizer
from dsv41_jax.inference import columns_for, request_rows
from dsv41_jax.verify.forward import CHUNK
from serving.default_model import default_config
from sharding.stage_runner import Bucket

CROSSING = (2, 2, 1, 1)  # a cut inside the ratio-2 group and two inside the ratio-1 half
LEGAL = (1, 2, 3)
LENGTH = 48  # tokens of the prompt: more than the window, and more than the top-k


def tiny_config():
    """Layer by layer: window; ratio-2 source, its reader with an Engram; ratio-1 source of
    KV, index keys and candidates, a reader, and an index source that reads all three.
    """
    config = default_config()
    return dataclasses.replace(
        config,
        num_hidden_layers=6,
        hidden_size=64,
        q_lora_rank=32,
        o_groups=4,
        o_lora_rank=32,
        qk_rope_head_dim=16,
        sliding_window=8,
        compress_ratios=(0, 2, 2, 1, 1, 1),
        kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3, 5),
        candidate_source_layer_id=3,
        candidate_topk_blocks=3,
        candidate_block_size=4,
        index_n_heads=2,
        index_topk=6,
        n_routed_experts=3,
        moe_intermediate_size=128,
        hc_mult=2,
        hc_sinkhorn_iters=2,
        engram=dataclasses.replace(config.engram, layer_ids=(2,), num_embeddings=(3144,)),
    )


def write_tiny(directory):
    """Writes its checkpoint; returns the directory."""
    make_checkpoint(directory, tiny_config(), seed=3)
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def step_sizes():
    """Bucket and pools of any part of the prompt: those of `sharding.verify`, compiled once."""
    pages = columns_for(tiny_config(), LENGTH)
    bucket = Bucket(tokens=CHUNK, requests=1, columns=pages, logit_rows=CHUNK)
    return bucket, dict(window_pages=pages, global_pages=pages, slots=1)


def run(pipeline, token_ids, chunk):
    """Logits and final caches of a prompt; one compiled shape whatever the chunk."""
    config = pipeline.config
    bucket, pools = step_sizes()
    states = pipeline.init_state(**pools)
    logits = []
    for start in range(0, len(token_ids), chunk):
        stop = min(start + chunk, len(token_ids))
        rows = request_rows(config, token_ids.tolist(), start, stop, LENGTH)
        rows = dataclasses.replace(rows, logits=stop - start)
        results, states = pipeline.step(states, [rows], bucket, None)
        logits += [np.asarray(result.value)[: result.num_logits] for result in results]
    return np.concatenate(logits), states

"""Workloads of full-size models; nothing of them is ever made."""

from dsv41_jax.hf_config import load_config
from sharding.fit import GIB, Workload
from sharding.stage_plan import build_stage_plan
from sharding.tensor_plan import plan_tensor_parallel

BUDGET = 4 * GIB


def workload(config, stages, *, tensor=1, relay=False, **sizes):
    chosen = {
        "microbatches": len(stages),
        "max_model_len": 4096,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
    }
    return Workload(
        config=config,
        plan=build_stage_plan(config, stages=stages, relay=relay),
        tensor=plan_tensor_parallel(config, tensor),
        **{**chosen, **sizes},
    )


def reference():
    return workload(load_config("released"), (20, 20), tensor=2, kv_cache_memory_bytes=BUDGET)

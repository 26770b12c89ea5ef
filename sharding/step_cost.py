"""A simple estimate of what a layer costs in a decode step: the weight bytes it reads.

Decode is bound by memory: a token reads every dense weight of a layer once and those of the
experts it is routed to. Larger batches touch more experts, in every layer alike. Caches are
left out: window and chosen rows are below a megabyte per token and layer (`roofline` has them).
"""

import functools

from dsv41_jax.checkpoint.key_map import expected_tensors
from dsv41_jax.config import ModelConfig


@functools.lru_cache(maxsize=4)
def layer_costs(config: ModelConfig) -> tuple[int, ...]:
    """Bytes read per decode token, by backbone layer; the last one carries the head too."""
    costs = [0] * config.num_hidden_layers
    for name, spec in expected_tensors(config).items():
        expert = spec.component == "experts"
        if expert and ".experts.0." not in name:
            continue  # all experts of a layer are alike
        if not spec.in_params or name.startswith("embed."):
            continue
        layer = int(name.split(".", 2)[1]) if name.startswith("layers.") else -1
        costs[layer] += spec.nbytes * (config.num_experts_per_tok if expert else 1)
    return tuple(costs)

"""How far apart two right answers may be: the limits of every tier.

Limits come from variants of the published code (other summation orders, other mathematical
libraries, deliberate bugs). Quantities without a limit are measured and reported only.
"""

from typing import Literal

from dsv41_jax.verify.measure import Limit

Tier = Literal["strict", "loose"]
Limits = tuple[Limit, ...]


def at_least(figure: str, bound: float) -> Limit:
    """A lower limit."""
    return (figure, ">=", bound)


def at_most(figure: str, bound: float) -> Limit:
    """An upper limit."""
    return (figure, "<=", bound)


EXACT: Limits = (at_least("equal", 1.0),)

# Single operations.
GEMM_FP32: Limits = (at_most("max_rel", 1e-6),)
GEMM_BF16: Limits = (at_most("far", 1.0), at_least("equal", 0.999))
BF16: Limits = (at_most("far", 1.0), at_least("equal", 0.99))
SINKHORN: Limits = (at_most("far", 1e-5),)
EXPERT_MLP: Limits = (at_most("mean_rel", 5e-3),)
GATE_WEIGHTS: Limits = (at_most("max_rel", 1e-5),)
ROPE_NEAR: Limits = (at_most("far", 1e-6),)  # positions below 128
ROPE_FAR: Limits = (at_most("far", 3e-3),)  # at 131071, by frequencies of one's own
ROPE_STORED: Limits = (at_most("far", 1e-7),)  # by the recorded frequencies
OPEN_GROUP: Limits = (at_most("max_rel", 1e-6),)  # a float32 product, as the matmuls

# Layers, each given the recorded stream.
_SUBLAYER: Limits = (at_least("equal", 0.95), at_most("mean_rel", 1e-3))
_CACHE_ROWS: Limits = (at_least("equal", 0.97),)
_LAYERS: dict[Tier, dict[str, Limits]] = {
    "strict": {
        "attn_out": _SUBLAYER,
        "ffn_out": _SUBLAYER,
        "x_out": (at_most("mean_rel", 2e-4),),
        "engram_out": (at_least("equal", 0.90), at_most("mean_rel", 1e-4)),
        "caches": (at_least("equal", 0.95), at_most("mean_rel", 1e-4)),
        "window_kv": _CACHE_ROWS,
        "compress_kv": _CACHE_ROWS,
        "index_k": _CACHE_ROWS,
        "candidates": (at_least("overlap", 0.999),),
        "experts": (at_least("equal", 0.995),),
        "pre_out": (at_most("max_rel", 2e-3),),
        "engram_ids": EXACT,
        # The head, the draft's inputs and the scores, given the streams: as a sublayer.
        "final_h": _SUBLAYER,
        "final_normed": _SUBLAYER,
        "main_hidden": _SUBLAYER,
        "logits": (at_most("mean_rel", 1e-3),),
        "index_score": (at_least("equal", 0.90), at_most("mean_rel", 1e-3)),
    },
    "loose": {
        "attn_out": (at_most("mean_rel", 0.015), at_most("p99_rel", 0.05)),
        "ffn_out": (at_most("mean_rel", 0.035), at_most("p99_rel", 0.09)),
        "engram_out": (at_most("mean_rel", 3e-3),),
        "caches": (at_most("mean_rel", 2e-3),),
        "candidates": (at_least("overlap", 0.995),),
        "engram_ids": EXACT,
    },
}
_TOPK: dict[Tier, dict[str, float]] = {
    "strict": {"prefill": 0.998, "decode": 0.995},
    "loose": {"prefill": 0.99, "decode": 0.985},
}


def layer_limits(tier: Tier, phase: str, quantity: str) -> Limits:
    """Limits of one quantity of the layers case, over all layers and rows."""
    if quantity == "topk":
        return (at_least("overlap", _TOPK[tier][phase]),)
    return _LAYERS[tier].get(quantity, ())


# Logits of whole runs. The model amplifies every rounding, so these are sanity only.
MULTI: Limits = (at_least("close", 0.10), at_most("median_rel", 0.05))
_SAME_ARGMAX = at_least("overlap", 0.6)
RUN: dict[str, Limits] = {
    "prefill": (at_most("median_rel", 0.15), _SAME_ARGMAX),
    "decode": (at_most("median_rel", 0.20), _SAME_ARGMAX),
}
CLEAR_MARGIN = 0.45  # between the best two logits: above it the arg max must be the same
GREEDY: Limits = (at_least("overlap", 1.0),)

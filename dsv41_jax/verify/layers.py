"""Case `layers`: every layer is given the recorded stream and compared on its own."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from dsv41_jax.config import ModelConfig
from dsv41_jax.verify.forward import Arrays, Forward, Phase, Run
from dsv41_jax.verify.measure import (
    Measure,
    Rows,
    compare_exact,
    compare_masks,
    compare_rows,
    compare_sets,
    judge,
    pool,
)
from dsv41_jax.verify.tolerances import Tier, layer_limits
from dsv41_jax.verify.vectors import Vectors

CASE = "layers"
# Recorded name of each quantity compared as rows of numbers.
_ROWS = ("attn_in", "attn_out", "ffn_in", "ffn_out", "x_out", "pre_out", "engram_out", "window_kv")


def check_layers(forward: Forward, vectors: Vectors, tier: Tier) -> Iterator[Measure]:
    """Measures of the layers that `forward` runs.

    Args:
      forward: the program.
      vectors: arrays of `golden_layers.npz`.
      tier: which limits hold.

    Raises:
      VectorError: an array that is needed is missing, or misshapen.
    """
    token_ids = vectors.token_ids("input_ids", forward.config.vocab_size)
    prefill_len = vectors.prefill_len(len(token_ids))
    look_up = _recorded(vectors)
    run = forward.run(token_ids, prefill_len, look_up)
    for phase, found in run.phases.items():
        first, last = (0, prefill_len) if phase == "prefill" else (prefill_len, len(token_ids))
        comparisons: dict[str, dict[int | None, Rows]] = {}
        for layer in forward.layers:
            positions = np.arange(first, last)
            compared = _layer(forward, found, vectors, f"{phase}.L{layer}.", layer, positions)
            for quantity, rows in compared:
                comparisons.setdefault(quantity, {})[layer] = rows
        for quantity, rows in _head(forward, found, vectors, phase):
            comparisons[quantity] = {None: rows}
        hashed = _engram_ids(forward, token_ids, vectors, phase, slice(first, last))
        comparisons |= {"engram_ids": hashed} if hashed else {}
        for quantity, by_layer in comparisons.items():
            limits = layer_limits(tier, phase, quantity)
            yield from judge(CASE, phase, quantity, by_layer, limits)
    yield from _all_caches(run, forward, vectors, prefill_len, len(token_ids), tier)


def _recorded(vectors: Vectors) -> Callable[[str, int, str], np.ndarray | None]:
    def look_up(phase: str, layer: int, quantity: str) -> np.ndarray | None:
        name = f"{phase}.L{layer}.{quantity}"
        return vectors[name] if name in vectors else None

    return look_up


def _layer(
    forward: Forward,
    phase: Phase,
    vectors: Vectors,
    prefix: str,
    layer: int,
    positions: np.ndarray,
) -> Iterator[tuple[str, Rows]]:
    """Comparisons of one layer and phase, by quantity."""
    got, config = phase.layers[layer], forward.config
    ratio = config.compress_ratios[layer]
    for quantity in _ROWS:
        if prefix + quantity in vectors:
            yield (
                quantity,
                compare_rows(prefix + quantity, got[quantity], vectors[prefix + quantity]),
            )
    # A row that completes a group carries the group's latent.
    for quantity in ("compress_kv", "index_k"):
        if prefix + quantity in vectors:
            groups = got[quantity][(positions + 1) % ratio == 0]
            yield quantity, compare_rows(prefix + quantity, groups, vectors[prefix + quantity])
    for quantity, name in (("experts", "moe_ids"), ("topk", "topk_idxs")):
        if prefix + name in vectors:
            yield quantity, compare_sets(prefix + name, got[quantity], vectors[prefix + name])
    if prefix + "moe_weights" in vectors:
        yield "moe_weights", _weights(got, vectors, prefix)
    if prefix + "candidates" in vectors:
        yield (
            "candidates",
            _candidates(got, vectors[prefix + "candidates"], config, prefix, positions),
        )
    if prefix + "index_score" in vectors:
        yield "index_score", _scores(got, vectors[prefix + "index_score"], prefix)


def _weights(got: Arrays, vectors: Vectors, prefix: str) -> Rows:
    """Routing weights by expert, so that the order of the choice does not matter."""
    ids, weights = vectors[prefix + "moe_ids"], vectors[prefix + "moe_weights"]

    def sorted_weights(experts: np.ndarray, values: np.ndarray) -> np.ndarray:
        return np.take_along_axis(values, np.argsort(experts, axis=1), axis=1)

    own = sorted_weights(got["experts"], got["moe_weights"])
    return compare_rows(prefix + "moe_weights", own, sorted_weights(ids, weights))


def _candidates(
    got: Arrays, want: np.ndarray, config: ModelConfig, prefix: str, positions: np.ndarray
) -> Rows:
    """Masks over the compressed rows that existed at the step."""
    ratio = config.compress_ratios[int(prefix.split(".L")[1].rstrip("."))]
    mask = np.repeat(got["candidates"], config.candidate_block_size, axis=1)
    mask = _columns(mask, want.shape[1], False)
    whole_prompt = prefix.startswith("prefill")
    existing = np.full(len(positions), want.shape[1]) if whole_prompt else (positions + 1) // ratio
    mask = mask & (np.arange(want.shape[1]) < existing[:, None])
    return compare_masks(prefix + "candidates", mask, want)


def _scores(got: Arrays, want: np.ndarray, prefix: str) -> Rows:
    """Scores of what both see; a row that sees something else is infinitely far off."""
    own = _columns(got["index_score"], want.shape[1], -np.inf)
    hidden = np.isneginf(want)
    same = np.all(np.isneginf(own) == hidden, axis=1)
    seen = [np.where(hidden, np.float32(0), scores) for scores in (own, want)]
    rows = compare_rows(prefix + "index_score", *seen)
    return Rows(equal=rows.equal & same, rel=np.where(same, rows.rel, np.inf))


def _columns(x: np.ndarray, count: int, fill: Any) -> np.ndarray:
    """The first `count` columns, filled up where there are fewer."""
    missing = max(0, count - x.shape[1])
    return np.pad(x[:, :count], ((0, 0), (0, missing)), constant_values=fill)


def _head(
    forward: Forward, phase: Phase, vectors: Vectors, name: str
) -> Iterator[tuple[str, Rows]]:
    """The last layer's result after the copies are folded, and the draft's inputs."""
    draft = forward.config.draft
    for quantity in ("final_h", "final_normed", "main_hidden", "logits"):
        whole_prompt = (name, quantity) == ("prefill", "logits")
        key = f"{name}.logits_all" if whole_prompt else f"{name}.{quantity}"
        if key not in vectors or quantity not in phase.head:
            continue
        if quantity == "main_hidden" and not set(draft.target_layer_ids) <= set(forward.layers):
            continue
        got = phase.head[quantity]
        if f"{name}.keep_pos" in vectors:
            got = got[vectors[f"{name}.keep_pos"]]
        yield quantity, compare_rows(key, got, vectors[key])


def _engram_ids(
    forward: Forward, token_ids: np.ndarray, vectors: Vectors, phase: str, rows: slice
) -> Mapping[int | None, Rows]:
    """Hash ids of the text, as the host computes them for a step."""
    if forward.engram is None:
        return {}
    hasher = forward.engram.hasher
    ids = hasher.hash(token_ids, np.full(hasher.history_size, -1))[rows]
    found = {}
    for axis, layer in enumerate(hasher.layer_ids):
        name = f"{phase}.L{layer}.engram_ids"
        if name in vectors and layer in forward.layers:
            found[layer] = compare_exact(name, ids[:, axis], vectors[name])
    return found


def _all_caches(
    run: Run, forward: Forward, vectors: Vectors, prefill_len: int, total: int, tier: Tier
) -> Iterator[Measure]:
    """Caches after the prompt and after the last step, all kinds of a layer together."""
    for phase, length in (("prefill", prefill_len), ("end", total)):
        by_layer = {}
        for layer in forward.layers:
            arrays = run.caches[phase][layer]
            parts = _caches(
                arrays, vectors, f"{phase}.state.L{layer}.", forward.config, layer, length
            )
            if found := [rows for rows in parts if len(rows.equal)]:
                by_layer[layer] = pool(found)
        yield from judge(CASE, phase, "caches", by_layer, layer_limits(tier, phase, "caches"))


def _caches(
    got: Arrays, vectors: Vectors, prefix: str, config: ModelConfig, layer: int, length: int
) -> Iterator[Rows]:
    """Compares what is alive after `length` tokens, by kind of cache."""
    window, ratio = config.sliding_window, config.compress_ratios[layer]
    recent = np.arange(max(0, length - window), length)
    if (name := prefix + "window_kv_cache") in vectors:
        yield compare_rows(name, got["window_kv_cache"][recent], vectors[name][recent % window])
    for kind in ("compress_kv_cache", "k_cache"):
        if (name := prefix + kind) in vectors:
            alive = length // ratio
            yield compare_rows(name, got[kind][:alive], vectors[name][:alive])
    for kind in ("kv_state", "score_state"):
        if (name := prefix + kind) in vectors:
            alive = np.arange(length % ratio)  # the open group's members
            yield compare_rows(name, got[kind][alive], vectors[name][alive])

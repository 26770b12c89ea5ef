"""The model against the recorded vectors, with the limits written out once more."""

import pathlib

import pytest

from dsv41_jax.verify import Directory, run_cases

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
CASES = ("engram", "layers", "multi", "text", "short", "greedy")

# quantity: lowest share of equal rows, highest mean, highest maximum, lowest overlap
STRICT = {
    "attn_out": (0.95, 1e-3, None, None),
    "ffn_out": (0.95, 1e-3, None, None),
    "x_out": (None, 2e-4, None, None),
    "pre_out": (None, None, 2e-3, None),
    "engram_out": (0.90, 1e-4, None, None),
    "window_kv": (0.97, None, None, None),
    "compress_kv": (0.97, None, None, None),
    "index_k": (0.97, None, None, None),
    "candidates": (None, None, None, 0.999),
    "experts": (0.995, None, None, None),
    "caches": (0.95, 1e-4, None, None),
}
TOPK = {"prefill": 0.998, "decode": 0.995}


@pytest.fixture(scope="module", params=["tiny_a", "tiny_b"])
def measures(request):
    """Pooled measures by case, phase and quantity."""
    directory = Directory(GOLDEN / request.param, progress=False)
    found = run_cases(directory, CASES, "strict", "xla", lambda text: None)
    return {(m.case, m.phase, m.quantity): m for m in found if m.layer is None}


def test_every_case_is_within_its_tolerances(measures):
    assert {case for case, _, _ in measures} == set(CASES)
    assert not [key for key, measure in measures.items() if not measure.ok]


def test_layers_keep_the_strict_limits(measures):
    checked = set()
    for (case, phase, quantity), measure in measures.items():
        if case != "layers" or quantity not in STRICT:
            continue
        equal, mean, largest, overlap = STRICT[quantity]
        figures = measure.figures
        assert equal is None or figures["equal"] >= equal, (phase, quantity)
        assert mean is None or figures["mean_rel"] <= mean, (phase, quantity)
        assert largest is None or figures["max_rel"] <= largest, (phase, quantity)
        assert overlap is None or figures["overlap"] >= overlap, (phase, quantity)
        checked.add(quantity)
    assert checked == set(STRICT)


def test_topk_sets_of_layers_overlap(measures):
    for phase, least in TOPK.items():
        assert measures["layers", phase, "topk"].figures["overlap"] >= least, phase


def test_attention_and_experts_are_met_to_the_bit(measures):
    for phase in ("prefill", "decode"):
        for quantity in ("attn_out", "ffn_out"):
            assert measures["layers", phase, quantity].figures["equal"] >= 0.99


def test_hash_ids_of_layers_are_exact(measures):
    for phase in ("prefill", "decode"):
        assert measures["layers", phase, "engram_ids"].figures["equal"] == 1


def test_short_prompts_are_one_computation(measures):
    figures = measures["multi", "prefill", "logits"].figures
    assert figures["close"] >= 0.1
    assert figures["median_rel"] <= 0.05


@pytest.mark.parametrize("case", ["text", "short"])
def test_long_runs_stay_near(case, measures):
    for phase, median in (("prefill", 0.15), ("decode", 0.20)):
        figures = measures[case, phase, "logits"].figures
        assert figures["median_rel"] <= median
        assert figures["overlap"] >= 0.6


def test_greedy_tokens_with_a_clear_margin_are_the_same(measures):
    assert measures["greedy", "decode", "argmax"].figures["overlap"] == 1


def test_real_vocabulary_is_hashed_exactly():
    directory = Directory(GOLDEN, progress=False)
    found = list(run_cases(directory, ["real_engram"], "strict", "xla", lambda text: None))
    assert {m.quantity for m in found} >= {"primes", "multipliers", "num_embeddings", "image.hash"}
    assert all(m.ok and m.figures["equal"] == 1 for m in found)

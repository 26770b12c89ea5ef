"""`verify` on a directory of another layout, whose vectors leave arrays out."""

import dataclasses
import functools
import pathlib
import shutil
from unittest import mock

import jax
import numpy as np
import pytest

from dsv41_jax.checkpoint.synthetic import make_checkpoint
from dsv41_jax.hf_config import load_config
from dsv41_jax.verify import Directory, VectorError, forward, run_cases
from dsv41_jax.verify.forward import Forward

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
PROMPT, TOTAL = 70, 74  # two chunks, the last group open
KEPT = np.array([0, 5, 33, 69])


def layout():
    """Groups of three from the first layer on; no Engram, candidates, draft or vision."""
    return dataclasses.replace(
        load_config(GOLDEN / "tiny_a"),
        num_hidden_layers=3,
        compress_ratios=(3, 3, 0),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0,),
        candidate_source_layer_id=-1,
        index_topk=5,
        sliding_window=9,
        hc_mult=2,
        engram=None,
        draft=None,
        vision=None,
        image_token_id=None,
    )


def recorded(config, run):
    """Arrays of a run, named and cut as recorded ones are."""
    arrays = {"prefill.keep_pos": KEPT}
    for phase, found in run.phases.items():
        for layer, got in found.layers.items():
            prefix = f"{phase}.L{layer}."
            for name in ("x_out", "pre_out", "attn_out"):
                arrays[prefix + name] = got[name].astype(np.float32)
            arrays[prefix + "moe_ids"] = got["experts"][:, ::-1]
            if layer == 0:
                arrays[prefix + "topk_idxs"] = got["topk"][:, ::-1]
        rows = KEPT if phase == "prefill" else slice(None)
        logits = "logits_all" if phase == "prefill" else "logits"
        arrays[f"{phase}.{logits}"] = found.head["logits"][rows]
    groups = np.arange(2, PROMPT, 3)
    prompt = run.phases["prefill"].layers[0]
    arrays["prefill.L0.compress_kv"] = prompt["compress_kv"][groups]
    arrays["prefill.L0.index_k"] = prompt["index_k"][groups]
    for layer in range(3):
        ring = np.full((9, config.head_dim), 7, np.float32)
        rows = [run.phases[phase].layers[layer]["window_kv"] for phase in ("prefill", "decode")]
        last = np.arange(TOTAL - 9, TOTAL)
        ring[last % 9] = np.concatenate(rows)[last]
        arrays[f"end.state.L{layer}.window_kv_cache"] = ring
    return arrays


@pytest.fixture(scope="module", autouse=True)
def quick_compiler():
    """The same roundings from a compiler that takes a third of the time."""
    options = {
        "xla_allow_excess_precision": False,
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_use_fusion_emitters": False,
    }
    quick = functools.partial(jax.jit, compiler_options=options)
    with mock.patch.object(forward, "compiled", quick):
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("layout")
    config = layout()
    make_checkpoint(path, config, seed=5)
    shutil.copy(GOLDEN / "tiny_a" / "tokenizer.json", path / "tokenizer.json")
    directory = Directory(path, progress=False)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, TOTAL)
    run = Forward(config, directory.params, None, positions=TOTAL, implementation="xla").run(
        ids, PROMPT
    )
    arrays = {"input_ids": ids, "prefill_len": PROMPT, **recorded(config, run)}
    np.savez(path / "golden_layers.npz", **arrays)
    np.savez(path / "golden_text.npz", **{k: v for k, v in arrays.items() if ".L" not in k})
    np.savez(path / "golden_multi.npz", input_ids=ids[None, :1], logits=np.zeros((0, 1, 512)))
    return directory


@pytest.fixture(scope="module")
def measures(directory):
    found = run_cases(directory, ["layers", "text"], "strict", "xla", lambda text: None)
    return {(m.case, m.phase, m.quantity): m for m in found if m.layer is None}


def test_recorded_streams_give_the_free_run_to_the_bit(measures):
    assert all(measure.ok and measure.figures["equal"] == 1 for measure in measures.values())


def test_what_is_recorded_is_what_is_compared(measures):
    prompt = {q for case, phase, q in measures if (case, phase) == ("layers", "prefill")}
    assert prompt == {
        *("x_out", "pre_out", "attn_out", "experts", "topk", "compress_kv", "index_k", "logits")
    }
    assert measures["layers", "prefill", "logits"].rows == len(KEPT)
    assert measures["layers", "prefill", "compress_kv"].rows == PROMPT // 3
    assert measures["layers", "end", "caches"].rows == 3 * 9
    assert measures["text", "decode", "logits"].rows == TOTAL - PROMPT


def test_prompts_without_logits_are_named(directory):
    with pytest.raises(VectorError, match="logits of 0 prompts are recorded, but 1 ids"):
        list(run_cases(directory, ["multi"], "strict", "xla", lambda text: None))

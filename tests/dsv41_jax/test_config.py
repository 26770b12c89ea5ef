"""Configurations: what parses, and every refusal with its message."""

import copy
import json
import math
import pathlib
import re

import pytest

from dsv41_jax import hf_config
from dsv41_jax.config import ConfigError
from dsv41_jax.hf_config import load_config, parse_config

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
RELEASED = json.loads(
    pathlib.Path(hf_config.__file__).with_name("released_config.json").read_text()
)


def edited(**changes):
    """The released configuration with keys replaced; `a__b` is key b of section a."""
    raw = copy.deepcopy(RELEASED)
    for name, value in changes.items():
        *sections, key = name.split("__")
        section = raw
        for part in sections or ["text_config"]:
            section = section[part]
        section[key] = value
    return raw


def top(**changes):
    return copy.deepcopy(RELEASED) | changes


def without(section, key):
    raw = copy.deepcopy(RELEASED)
    del (raw[section] if section else raw)[key]
    return raw


def without_prefix(prefix, **changes):
    raw = edited(**changes)
    raw["text_config"] = {k: v for k, v in raw["text_config"].items() if not k.startswith(prefix)}
    return raw


def rope(**changes):
    return edited(rope_scaling=RELEASED["text_config"]["rope_scaling"] | changes)


def test_released_is_available_by_name():
    config = load_config("released")
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (5120, 40, 512)
    assert config.compress_ratios == (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3
    assert config.kv_source_layer_ids == (2, 8, 14, 20)
    assert config.rms_norm_eps == 1e-20
    assert config.gate_temp == 1.0
    assert config.engram.num_embeddings == (384006168, 384016682)
    assert config.engram.num_columns == 24
    assert config.draft.target_layer_ids == (37, 38, 39)
    assert config.vision.max_wh_ratio is None
    assert config.rope_scaling.factor == 16
    assert config.image_token_id == 129264


@pytest.mark.parametrize("name", ["tiny_a", "tiny_b"])
def test_small_checkpoints_parse_from_directory_and_from_file(name):
    config = load_config(GOLDEN / name)
    assert config == load_config(GOLDEN / name / "config.json")
    assert len(config.compress_ratios) == config.num_hidden_layers + config.draft.num_layers


def test_optional_parts_are_none_where_the_config_has_none():
    raw = without_prefix("engram_", num_nextn_predict_layers=0)
    raw["text_config"]["compress_ratios"] = raw["text_config"]["compress_ratios"][:40]
    del raw["vision_config"], raw["image_token_id"]
    config = parse_config(raw)
    assert config.engram is None and config.draft is None and config.vision is None
    assert config.image_token_id is None


def test_empty_engram_layer_list_means_no_engram():
    assert parse_config(edited(engram_layer_ids=[], engram_num_embeddings=[])).engram is None


def test_irrelevant_and_agreeing_keys_are_accepted():
    raw = top(transformers_version="5.0", torch_dtype="bfloat16", use_cache=True)
    raw["text_config"] |= {"eos_token_id": 1, "gate_temp": 2, "initializer_range": 0.02}
    assert parse_config(raw).gate_temp == 2.0


def test_candidates_can_be_off():
    assert parse_config(edited(candidate_source_layer_id=-1)).candidate_source_layer_id == -1
    assert parse_config(edited(candidate_topk_blocks=0)).candidate_topk_blocks == 0


def test_window_only_model_parses():
    raw = edited(
        compress_ratios=[0] * 43,
        kv_source_layer_ids=[],
        index_source_layer_ids=[],
        candidate_source_layer_id=-1,
    )
    assert parse_config(raw).kv_source_layer_ids == ()


RATIOS = RELEASED["text_config"]["compress_ratios"]
FLAT_V4 = {"model_type": "deepseek_v4", "hidden_size": 7168, "num_hidden_layers": 61}

BROKEN = {
    "v4 flat": (FLAT_V4, "text_config is missing and hidden_size stands at the top level"),
    "v4 nested": (top(model_type="deepseek_v4"), 'model_type is "deepseek_v4": it must be'),
    "other class": (top(architectures=["LlamaForCausalLM"]), 'must be ["DeepseekV41ForCausalLM"]'),
    "no quantization": (without("", "quantization_config"), "quantization_config is missing"),
    "no text": (without("", "text_config"), "text_config is missing"),
    "no eos": (without("", "eos_token_id"), "eos_token_id is missing"),
    "text list": (top(text_config=[]), "text_config is []: it must be a JSON object"),
    "missing key": (without("text_config", "index_topk"), "text_config.index_topk is missing"),
    "missing ratios": (without("text_config", "compress_ratios"), "compress_ratios is missing"),
    "misspelt key": (
        edited(compress_ratio=2),
        "text_config.compress_ratio is not a key of this model; the nearest known key is "
        "text_config.compress_ratios",
    ),
    "unknown top key": (top(zzz=1), "zzz is not a key of this model"),
    "unknown vision key": (edited(vision_config__depth=1), "vision_config.depth is not a key"),
    "unknown rope key": (rope(mscale=1.0), "text_config.rope_scaling.mscale is not a key"),
    "unknown quantization key": (
        edited(quantization_config__modules_to_not_convert=[]),
        "quantization_config.modules_to_not_convert is not a key",
    ),
    "quant method": (
        edited(quantization_config__quant_method="awq"),
        'quantization_config.quant_method is "awq": it must be "fp8"',
    ),
    "block size": (
        edited(quantization_config__weight_block_size=[128, 128]),
        "weight_block_size is [128, 128]: it must be [32, 32]",
    ),
    "scale format": (edited(quantization_config__scale_fmt="f32"), 'must be "ue8m0"'),
    "expert dtype": (edited(quantization_config__expert_dtype="fp8"), 'must be "fp4"'),
    "activation scheme": (
        edited(quantization_config__activation_scheme="static"),
        'activation_scheme is "static": it must be "dynamic"',
    ),
    "text model type": (edited(model_type="deepseek_v4_text"), 'must be "deepseek_v41_text"'),
    "kv heads": (edited(num_key_value_heads=8), "num_key_value_heads is 8: it must be 1"),
    "kv heads bool": (edited(num_key_value_heads=True), "num_key_value_heads is true"),
    "activation": (edited(hidden_act="gelu"), 'hidden_act is "gelu": it must be "silu"'),
    "scoring": (edited(scoring_func="softmax"), 'must be "sqrtsoftplus"'),
    "top-k method": (edited(topk_method="greedy"), 'topk_method is "greedy"'),
    "no norm": (edited(norm_topk_prob=False), "norm_topk_prob is false: it must be true"),
    "norm is 1": (edited(norm_topk_prob=1), "norm_topk_prob is 1: it must be true"),
    "bias": (edited(attention_bias=True), "attention_bias is true: it must be false"),
    "tied": (top(tie_word_embeddings=True), "tie_word_embeddings is true: it must be false"),
    "dtype": (top(dtype="float16"), 'dtype is "float16": it must be "bfloat16"'),
    "eos disagrees": (edited(eos_token_id=7), "text_config.eos_token_id is 7: it must be 1"),
    "linear rope": (rope(rope_type="linear"), 'rope_type is "linear": it must be "yarn"'),
    "rope factor": (rope(factor=0.5), "rope_scaling.factor is 0.5: it must be at least 1"),
    "rope betas": (rope(beta_fast=1), "beta_fast is 1.0: it must be above rope_scaling.beta_slow"),
    "no rope scaling": (edited(rope_scaling=None), "rope_scaling is null: it must be a JSON"),
    "bool layers": (edited(num_hidden_layers=True), "num_hidden_layers is true: it must be an"),
    "float layers": (edited(num_hidden_layers=40.0), "num_hidden_layers is 40.0"),
    "text size": (edited(hidden_size="5120"), 'hidden_size is "5120": it must be an integer'),
    "text eps": (edited(hc_eps="small"), 'hc_eps is "small": it must be a number'),
    "nan": (edited(rope_theta=math.nan), "rope_theta is NaN: it must be a finite number"),
    "huge": (edited(swiglu_limit=10**400), "it must be a finite number"),
    "zero eps": (edited(rms_norm_eps=0), "rms_norm_eps is 0.0: it must be above 0"),
    "gate temp": (edited(gate_temp=0), "gate_temp is 0.0: it must be above 0"),
    "theta": (edited(rope_theta=1), "rope_theta is 1.0: it must be above 1"),
    # Rule 2.
    "too few ratios": (
        edited(compress_ratios=RATIOS[:40]),
        "compress_ratios has 40 entries: it must have one for each of the 43 layers",
    ),
    "ratio null": (edited(compress_ratios=None), "compress_ratios is null: it must be a list"),
    "negative ratio": (edited(compress_ratios=[-1, *RATIOS[1:]]), "compress_ratios[0] is -1"),
    "draft ratio": (edited(compress_ratios=[*RATIOS[:42], 1]), "compress_ratios[42] is 1: it"),
    # Rule 3.
    "unsorted": (edited(kv_source_layer_ids=[8, 2]), "names layer 2 after layer 8"),
    "repeats": (edited(kv_source_layer_ids=[2, 2]), "names layer 2 after layer 2"),
    "ratio 0 source": (
        edited(kv_source_layer_ids=[0, 2]),
        "kv_source_layer_ids [0, 2] names layer 0, whose compress_ratios entry is 0",
    ),
    "negative source": (edited(kv_source_layer_ids=[-1, 2]), "kv_source_layer_ids [-1, 2] names"),
    "source outside": (
        edited(kv_source_layer_ids=[2, 40]),
        "kv_source_layer_ids [2, 40] names layer 40: the backbone has layers 0 to 39",
    ),
    "bool source": (edited(kv_source_layer_ids=[True, 2]), "kv_source_layer_ids holds true"),
    "float source": (edited(index_source_layer_ids=[2.0]), "index_source_layer_ids holds 2.0"),
    "index unsorted": (
        edited(index_source_layer_ids=[2, 8, 14, 20, 28, 24]),
        "index_source_layer_ids [2, 8, 14, 20, 28, 24] names layer 24 after layer 28",
    ),
    # Rule 4.
    "kv without index": (
        edited(index_source_layer_ids=[2, 8, 20]),
        "layer 14 is in kv_source_layer_ids [2, 8, 14, 20] but not in index_source_layer_ids",
    ),
    # Rule 5.
    "no kv source": (
        edited(kv_source_layer_ids=[8, 14, 20]),
        "layer 2 (compress_ratios entry 2) has no KV source at or before it",
    ),
    "no sources": (
        edited(kv_source_layer_ids=[], index_source_layer_ids=[]),
        "layer 2 (compress_ratios entry 2) has no KV source at or before it: "
        "kv_source_layer_ids is []",
    ),
    # Rule 6.
    "ratio of source": (
        edited(kv_source_layer_ids=[2, 8, 14]),
        "layer 20 has compress_ratios entry 1, but its KV source, layer 14 of "
        "kv_source_layer_ids, has 2",
    ),
    # Rule 7.
    "candidate source": (
        edited(candidate_source_layer_id=21),
        "candidate_source_layer_id is 21: it must be one of index_source_layer_ids [2, 8, 14,",
    ),
    "candidate ratio": (
        edited(candidate_source_layer_id=14),
        "candidate_source_layer_id is 14, of ratio 2, but index source 20 after it has ratio 1",
    ),
    "candidate capacity": (
        edited(candidate_topk_blocks=64),
        "candidate_topk_blocks is 64: it must be larger: with candidate_block_size 8 it is sure "
        "to keep only (blocks - 1) * size + 1 = 505 rows, fewer than index_topk 512",
    ),
    "candidate blocks": (
        edited(candidate_topk_blocks=-1, candidate_source_layer_id=-1),
        "candidate_topk_blocks is -1",
    ),
    "hidden size": (edited(hidden_size=5121), "hidden_size is 5121: it must be a multiple of 32"),
    "head dim": (edited(head_dim=520), "head_dim is 520: it must be a multiple of 32"),
    "index head": (edited(index_head_dim=144), "index_head_dim is 144: it must be a multiple"),
    "low rank": (edited(o_lora_rank=1026), "o_groups * o_lora_rank is 8208: it must be a multiple"),
    "groups": (
        edited(o_groups=7, o_lora_rank=32),
        "o_groups is 7: it must be a divisor of num_attention_heads, which is 64",
    ),
    "odd rope": (edited(qk_rope_head_dim=63), "qk_rope_head_dim is 63: it must be even"),
    "wide rope": (
        edited(qk_rope_head_dim=160),
        "at most head_dim 512 and index_head_dim 128",
    ),
    "no experts": (edited(n_routed_experts=0), "n_routed_experts is 0: it must be above 0"),
    "too many chosen": (
        edited(num_experts_per_tok=385),
        "num_experts_per_tok is 385: it must be at most n_routed_experts, which is 384",
    ),
    "shared experts": (edited(n_shared_experts=2), "n_shared_experts is 2: it must be 1"),
    "eos outside": (top(eos_token_id=129280), "eos_token_id is 129280: it must be a token id"),
    "eos list": (top(eos_token_id=[1]), "eos_token_id is [1]: it must be an integer"),
    "image token": (top(image_token_id=-1), "image_token_id is -1: it must be a token id below"),
    "no image token": (without("", "image_token_id"), "image_token_id is missing"),
    "engram layer": (
        edited(engram_layer_ids=[1, 40]),
        "engram_layer_ids is [1, 40]: it must be strictly ascending backbone layers",
    ),
    "engram count": (
        edited(engram_num_embeddings=[384006168]),
        "engram_num_embeddings is [384006168]: it must be one number of rows for each of",
    ),
    "engram rows": (
        edited(engram_num_embeddings=[384006168, 5]),
        "engram_num_embeddings is 5: it must be the sum of 24 primes",
    ),
    "engram n-gram": (edited(engram_max_ngram_size=1), "engram_max_ngram_size is 1"),
    "engram row": (edited(engram_head_dim=48), "engram_head_dim is 48: it must be a multiple"),
    "engram pad": (edited(engram_pad_token_id=129280), "engram_pad_token_id is 129280"),
    "engram vocabulary": (
        edited(engram_compressed_vocab_size=129281),
        "engram_compressed_vocab_size is 129281: it must be from 1 to vocab_size",
    ),
    "engram part": (without("text_config", "engram_layer_ids"), "engram_layer_ids is missing"),
    "draft layers": (edited(num_nextn_predict_layers=-1), "num_nextn_predict_layers is -1"),
    "draft off": (edited(num_nextn_predict_layers=0), "compress_ratios has 43 entries"),
    "draft target": (
        edited(dspark_target_layer_ids=[38, 39, 40]),
        "dspark_target_layer_ids is [38, 39, 40]: it must be strictly ascending backbone layers",
    ),
    "draft noise": (edited(dspark_noise_token_id=129280), "dspark_noise_token_id is 129280"),
    "draft experts": (
        edited(dspark_num_experts_per_tok=129),
        "dspark_num_experts_per_tok is 129: it must be at most dspark_n_routed_experts",
    ),
    "draft part": (
        without("text_config", "dspark_block_size"),
        "text_config.dspark_block_size is missing",
    ),
    "vision heads": (
        edited(vision_config__num_attention_heads=15),
        "vision_config.hidden_size is 1024: it must be a multiple of 4 * num_attention_heads",
    ),
    "vision ratio": (edited(vision_config__max_wh_ratio=0), "vision_config.max_wh_ratio is 0"),
    "vision tokens": (edited(vision_config__max_image_tokens=3), "max_image_tokens is 3"),
    "not an object": ([], "the configuration is []: it must be a JSON object"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_config_is_refused_by_name(name):
    raw, message = BROKEN[name]
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config(raw)


def test_refusal_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(edited(hidden_size=0)))
    with pytest.raises(ConfigError, match=r"config\.json: hidden_size is 0: it must be above 0"):
        load_config(tmp_path)


def test_file_that_is_not_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON: Expecting value"):
        load_config(tmp_path)


def test_key_that_stands_twice_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"bos_token_id": 0, "bos_token_id": 1}')
    with pytest.raises(ConfigError, match="bos_token_id stands twice in one JSON object: 0, 1"):
        load_config(tmp_path)


def test_bytes_that_are_not_text_are_refused(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        load_config(tmp_path)


def test_endless_nesting_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(ConfigError, match=r"config\.json is not a configuration"):
        load_config(tmp_path)


def test_directory_without_a_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json: give a checkpoint directory"):
        load_config(tmp_path)


def test_path_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="nowhere does not exist: give a checkpoint directory"):
        load_config(tmp_path / "nowhere")

"""From a released `config.json` to `ModelConfig`; whatever is not understood is refused."""

import difflib
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NoReturn

from dsv41_jax.config import (
    ConfigError,
    DraftConfig,
    EngramConfig,
    ModelConfig,
    VisionConfig,
    YarnConfig,
)
from dsv41_jax.config_checks import check_config

RELEASED = "released"  # the name of the published configuration, which comes with this package

# Keys that say nothing about what the model computes.
IGNORED = frozenset(
    {
        "_commit_hash",
        "_name_or_path",
        "auto_map",
        "initializer_range",
        "transformers_version",
        "use_cache",
    }
)
# Keys with one right value; the first group may be left out.
OPTIONAL_FIXED = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
TEXT_FIXED = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}
QUANTIZATION_FIXED = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
TEXT_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "candidate_source_layer_id",
    "candidate_topk_blocks",
    "candidate_block_size",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "max_position_embeddings",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "hc_mult",
    "hc_sinkhorn_iters",
)
TEXT_NUMBERS = (
    "rope_theta",
    "compress_rope_theta",
    "routed_scaling_factor",
    "swiglu_limit",
    "rms_norm_eps",
    "hc_eps",
)
TEXT_LISTS = ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids")
ENGRAM_INTEGERS = (
    "max_ngram_size",
    "n_heads",
    "head_dim",
    "vocab_size",
    "pad_token_id",
    "compressed_vocab_size",
)
DRAFT_INTEGERS = (
    "block_size",
    "noise_token_id",
    "markov_rank",
    "n_routed_experts",
    "num_experts_per_tok",
)
VISION_INTEGERS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "patch_size",
    "downsample_ratio",
    "max_image_tokens",
    "min_pixels",
)
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")


def load_config(model: str | pathlib.Path) -> ModelConfig:
    """Reads and checks a configuration; no weight file is touched.

    Args:
      model: a checkpoint directory, its `config.json`, or "released" for the published
        configuration, which needs no download.

    Raises:
      ConfigError: the file is missing, is not JSON, or does not describe this model.
    """
    if str(model) == RELEASED:
        path = pathlib.Path(__file__).with_name("released_config.json")
    else:
        path = pathlib.Path(model)
        if path.is_dir():
            path = path / "config.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        has_none = path.name == "config.json" and path.parent.is_dir()
        what = f"{path.parent} has no config.json" if has_none else f"{model} does not exist"
        raise ConfigError(
            f"{what}: give a checkpoint directory, its config.json, "
            f"or {RELEASED!r} for the published configuration"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    try:
        raw = json.loads(text, object_pairs_hook=_object_without_repeats)
        return parse_config(raw)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is not a configuration: it is nested too deeply") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Turns the parsed `config.json` into a checked `ModelConfig`.

    Every key is either read, known to be irrelevant, or refused.

    Args:
      raw: the JSON object in the released layout, with `text_config`,
        `quantization_config` and optionally `vision_config` nested in it.

    Raises:
      ConfigError: an unknown, missing, contradicting or impossible key, by name.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"the configuration is {_show(raw)}: it must be a JSON object")
    _refuse_flat(raw)
    top = _Section(raw, "")
    top.fixed("model_type", "deepseek_v41")
    top.fixed("architectures", ["DeepseekV41ForCausalLM"])
    top.optional_fixed(OPTIONAL_FIXED)
    quantization = top.section("quantization_config")
    for key, right in QUANTIZATION_FIXED.items():
        quantization.fixed(key, right)
    quantization.finish()
    text = top.section("text_config")
    has_vision = raw.get("vision_config") is not None
    top.known("vision_config")
    vision = _vision(top.section("vision_config")) if has_vision else None
    tokens = _special_tokens(top, text, image=has_vision)
    config = _text(text, vision, tokens)
    top.finish()
    check_config(config)
    return config


def _refuse_flat(raw: Mapping[str, Any]) -> None:
    flat = [key for key in (*TEXT_INTEGERS, *TEXT_LISTS) if key in raw]
    if "text_config" not in raw and flat:
        raise ConfigError(
            f"text_config is missing and {flat[0]} stands at the top level (model_type "
            f"{_show(raw.get('model_type'))}): this is a flat, V4-style configuration; a "
            "DeepSeek-V4.1 config.json has model_type 'deepseek_v41' and nests the text model "
            "under text_config"
        )


def _special_tokens(top: "_Section", text: "_Section", *, image: bool) -> dict[str, int | None]:
    """Token ids stand at the top level; text_config may repeat them."""
    tokens: dict[str, int | None] = {}
    for key in SPECIAL_TOKENS:
        optional = key == "image_token_id" and not image
        tokens[key] = None if optional and not top.has(key) else top.integer(key)
        if text.has(key) and text.integer(key) != tokens[key]:
            text.refuse(key, f"{tokens[key]}, as {key} at the top level says")
    return tokens


def _text(
    text: "_Section", vision: VisionConfig | None, tokens: Mapping[str, int | None]
) -> ModelConfig:
    for key, right in TEXT_FIXED.items():
        text.fixed(key, right)
    text.optional_fixed(OPTIONAL_FIXED)
    rope = text.section("rope_scaling")
    rope.fixed("rope_type", "yarn")
    yarn = YarnConfig(
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        **{key: rope.number(key) for key in ("factor", "beta_fast", "beta_slow")},
    )
    rope.finish()
    fields = {
        **{key: text.integer(key) for key in TEXT_INTEGERS},
        **{key: text.number(key) for key in TEXT_NUMBERS},
        **{key: text.integers(key) for key in TEXT_LISTS},
        "gate_temp": text.number("gate_temp") if text.has("gate_temp") else 1.0,
    }
    engram, draft = _engram(text), _draft(text)
    text.finish()
    return ModelConfig(
        **fields, **tokens, rope_scaling=yarn, engram=engram, draft=draft, vision=vision
    )


def _engram(text: "_Section") -> EngramConfig | None:
    keys = [f"engram_{name}" for name in ("layer_ids", "num_embeddings", *ENGRAM_INTEGERS)]
    if not any(text.has(key) for key in keys) or text.is_empty_list(keys[0]):
        text.known(*keys)
        return None
    return EngramConfig(
        layer_ids=text.integers("engram_layer_ids"),
        num_embeddings=text.integers("engram_num_embeddings"),
        **{name: text.integer(f"engram_{name}") for name in ENGRAM_INTEGERS},
    )


def _draft(text: "_Section") -> DraftConfig | None:
    keys = [f"dspark_{name}" for name in ("target_layer_ids", *DRAFT_INTEGERS)]
    count = "num_nextn_predict_layers"
    text.known(count, *keys)
    absent = not any(text.has(key) for key in (count, *keys))
    num_layers = 0 if absent else text.integer(count)
    if num_layers < 0:
        text.refuse(count, "at least 0 (0: no draft)")
    if num_layers == 0:
        return None
    return DraftConfig(
        num_layers=num_layers,
        target_layer_ids=text.integers("dspark_target_layer_ids"),
        **{name: text.integer(f"dspark_{name}") for name in DRAFT_INTEGERS},
    )


def _vision(vision: "_Section") -> VisionConfig:
    vision.fixed("model_type", "deepseek_v41_vision")
    vision.optional_fixed(OPTIONAL_FIXED)
    ratio = vision.value("max_wh_ratio")
    config = VisionConfig(
        **{key: vision.integer(key) for key in VISION_INTEGERS},
        rope_theta=vision.number("rope_theta"),
        max_wh_ratio=None if ratio is None else vision.number("max_wh_ratio"),
    )
    vision.finish()
    return config


class _Section:
    """One JSON object; remembers which keys were asked for, so that the rest can be refused."""

    def __init__(self, raw: Mapping[str, Any], prefix: str) -> None:
        self._raw = raw
        self._prefix = prefix
        self._known: set[str] = set()

    def known(self, *keys: str) -> None:
        self._known.update(keys)

    def has(self, key: str) -> bool:
        self.known(key)
        return key in self._raw

    def is_empty_list(self, key: str) -> bool:
        return self.has(key) and self._raw[key] == []

    def value(self, key: str) -> Any:
        if not self.has(key):
            raise ConfigError(f"{self._prefix}{key} is missing")
        return self._raw[key]

    def refuse(self, key: str, right: str) -> NoReturn:
        raise ConfigError(
            f"{self._prefix}{key} is {_show(self._raw[key])}: it must be {right}"
        ) from None

    def section(self, key: str) -> "_Section":
        value = self.value(key)
        if not isinstance(value, Mapping):
            self.refuse(key, "a JSON object")
        return _Section(value, f"{self._prefix}{key}.")

    def integer(self, key: str) -> int:
        value = self.value(key)
        if not _is_integer(value):
            self.refuse(key, "an integer")
        return value

    def number(self, key: str) -> float:
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, "a number")
        try:
            number = float(value)
        except OverflowError:
            self.refuse(key, "a finite number")
        if not math.isfinite(number):
            self.refuse(key, "a finite number")
        return number

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.value(key)
        if not isinstance(value, list | tuple):
            self.refuse(key, "a list of integers")
        for item in value:
            if not _is_integer(item):
                raise ConfigError(
                    f"{self._prefix}{key} holds {_show(item)}: it must hold integers only"
                )
        return tuple(value)

    def fixed(self, key: str, right: Any) -> None:
        value = self.value(key)
        if value != right or isinstance(value, bool) is not isinstance(right, bool):
            self.refuse(key, f"{_show(right)}, the only value this model has")

    def optional_fixed(self, values: Mapping[str, Any]) -> None:
        for key, right in values.items():
            if self.has(key):
                self.fixed(key, right)

    def finish(self) -> None:
        """Refuses what nobody asked for."""
        for key in self._raw:
            if key in self._known or key in IGNORED:
                continue
            near = difflib.get_close_matches(str(key), sorted(self._known), n=1)
            hint = f"; the nearest known key is {self._prefix}{near[0]}" if near else ""
            raise ConfigError(f"{self._prefix}{key} is not a key of this model{hint}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _show(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ConfigError(f"{key} stands twice in one JSON object: {result[key]!r}, {value!r}")
        result[key] = value
    return result

"""From a `ModelConfig` back to a `config.json` in the released layout."""

import dataclasses
from typing import Any

from dsv41_jax.config import ModelConfig
from dsv41_jax.hf_config import QUANTIZATION_FIXED, SPECIAL_TOKENS, TEXT_FIXED

_NESTED = ("rope_scaling", "engram", "draft", "vision")


def _fields(part: Any, prefix: str = "") -> dict[str, Any]:
    values = {f"{prefix}{f.name}": getattr(part, f.name) for f in dataclasses.fields(part)}
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The JSON object that `hf_config.parse_config` turns into `config`."""
    text = _fields(config)
    for key in _NESTED:
        del text[key]
    tokens = {key: text.pop(key) for key in SPECIAL_TOKENS}
    text |= {"rope_scaling": {"rope_type": "yarn", **_fields(config.rope_scaling)}, **TEXT_FIXED}
    if config.engram is not None:
        text |= _fields(config.engram, "engram_")
    if config.draft is not None:
        draft = _fields(config.draft, "dspark_")
        text |= {"num_nextn_predict_layers": draft.pop("dspark_num_layers"), **draft}
    result = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        **{key: token for key, token in tokens.items() if token is not None},
        "quantization_config": dict(QUANTIZATION_FIXED),
        "text_config": text,
    }
    if config.vision is not None:
        vision = {"model_type": "deepseek_v41_vision", **_fields(config.vision)}
        result["vision_config"] = vision
    return result

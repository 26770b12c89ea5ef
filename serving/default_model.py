"""The tiny random model the server runs when it is given none, made once in a cache directory."""

import os
import pathlib
import shutil
import tempfile

from dsv41_jax.checkpoint.synthetic import make_checkpoint
from dsv41_jax.checkpoint.tiny_tokenizer import (
    BOS,
    EOS,
    IMAGE,
    PAD,
    VOCAB_SIZE,
    tiny_tokenizer,
    write_tiny_tokenizer,
)
from dsv41_jax.config import EngramConfig, ModelConfig, YarnConfig
from dsv41_jax.engram_hash import token_map_from_tokenizer

VERSION = 1  # part of the directory's name; a change to anything below must change it
SEED = 20260
CONTEXT = 8192


def default_config() -> ModelConfig:
    """Small sizes with every kind of layer: window, both ratios, every sharing, Engram."""
    tokenizer = tiny_tokenizer()
    compressed = int(token_map_from_tokenizer(tokenizer, VOCAB_SIZE).max()) + 1
    ids = {token: tokenizer.token_to_id(token) for token in (BOS, EOS, PAD, IMAGE)}
    return ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=64,
        sliding_window=32,
        compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1),
        kv_source_layer_ids=(2, 4),
        index_source_layer_ids=(2, 4, 6),
        candidate_source_layer_id=4,
        candidate_topk_blocks=8,
        candidate_block_size=8,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=32,
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        rope_scaling=YarnConfig(
            factor=16, original_max_position_embeddings=CONTEXT // 16, beta_fast=32, beta_slow=1
        ),
        max_position_embeddings=CONTEXT,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        gate_temp=1.0,
        rms_norm_eps=1e-20,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        bos_token_id=ids[BOS],
        eos_token_id=ids[EOS],
        pad_token_id=ids[PAD],
        image_token_id=ids[IMAGE],
        engram=EngramConfig(
            layer_ids=(1, 3),
            num_embeddings=(3144, 3424),
            max_ngram_size=4,
            n_heads=2,
            head_dim=32,
            vocab_size=500,
            pad_token_id=ids[PAD],
            compressed_vocab_size=compressed,
        ),
        draft=None,
        vision=None,
    )


def _write(directory: pathlib.Path) -> None:
    make_checkpoint(directory, default_config(), SEED)
    write_tiny_tokenizer(directory, CONTEXT)


def cache_directory() -> pathlib.Path:
    """Where the project keeps what it can make again."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(home) if home else pathlib.Path.home() / ".cache") / "dsv41-jax"


def default_model(cache_dir: str | pathlib.Path | None = None) -> pathlib.Path:
    """Directory of the tiny random model, in the released layout; made where it is missing.

    Processes that make it at the same time do not disturb each other.

    Args:
      cache_dir: where it is kept; `$XDG_CACHE_HOME/dsv41-jax` or `~/.cache/dsv41-jax` if None.

    Raises:
      OSError: the cache directory cannot be written.
    """
    cache = cache_directory() if cache_dir is None else pathlib.Path(cache_dir)
    target = cache / f"tiny-random-{VERSION}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    made = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache))
    try:
        _write(made)
        made.chmod(0o755)
        made.rename(target)
    except OSError:
        # Whoever renames first wins; the others' copies are the same and go away.
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target

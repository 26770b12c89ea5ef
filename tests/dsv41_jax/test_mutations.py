"""Deliberate bugs, each caught by a quantity of `verify` that has a name."""

import dataclasses
import pathlib
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick_compiler import compiled_anew

from dsv41_jax import engram_hash, model
from dsv41_jax.layers import block, cached_block, compressor, indexer, moe, rotary
from dsv41_jax.verify import engram as verify_engram
from dsv41_jax.verify import forward as verify_forward
from dsv41_jax.verify import ops as verify_ops
from dsv41_jax.verify import rope as verify_rope
from dsv41_jax.verify.engram import check_engram
from dsv41_jax.verify.forward import Forward
from dsv41_jax.verify.layers import check_layers
from dsv41_jax.verify.ops import check_ops
from dsv41_jax.verify.vectors import Directory
from pallas_kernels import (
    formats,
    grouped_matmul,
    hyper_connections,
    index_topk,
    kv_write,
    numerics,
    sparse_attention,
)
from pallas_kernels.packed_rows import pack_window, unpack_window
from pallas_kernels.rope import turn

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
# tiny_a: 0 window only, 1 with an Engram, 2 compresses by 2, 5 selects the candidates,
# 7 is masked by them, 8 comes last.
WINDOW, ENGRAM, PAIRS, CANDIDATES = range(0, 1), range(1, 2), range(2, 3), range(5, 6)
MASKED, LAST = range(5, 8), range(5, 9)


@pytest.fixture(autouse=True)
def quick_compiler():
    modules = (verify_ops, verify_rope, verify_forward)
    with apply(patches(*((module, "compiled", compiled_anew) for module in modules))):
        yield


@pytest.fixture(scope="module")
def directory():
    return Directory(GOLDEN / "tiny_a", progress=False)


def run_ops(directory, op):
    return list(check_ops(directory.config, directory.vectors("ops"), "xla", only=op))


def run_layers(directory, layers, config=None):
    forward = Forward(
        config or directory.config,
        directory.params,
        directory.engram,
        positions=48,
        implementation="xla",
        layers=layers,
    )
    return list(check_layers(forward, directory.vectors("layers"), "strict"))


def names_of_short(measures):
    """Pooled quantities that fall short, with their phase."""
    return {(m.phase, m.quantity) for m in measures if m.layer is None and not m.ok}


def patches(*pairs):
    return [mock.patch.object(target, name, new) for target, name, new in pairs]


def swapped_nibbles(original=formats.decode_e2m1):
    return patches((formats, "decode_e2m1", lambda byte: original(byte >> 4 | byte << 4)))


def rounded_down_scale():
    def scale(amax, largest):
        bits = jax.lax.bitcast_convert_type(amax * np.float32(1 / largest), jnp.uint32)
        return (bits >> 23).astype(jnp.uint8)

    return patches((formats, "_power_of_two_scale", scale))


def sink_changed(change, original=sparse_attention.sparse_attention_reference):
    def attend(q, kv, valid, sink, *, scale):
        return original(q, kv, valid, change(sink, scale), scale=scale)

    return patches((sparse_attention, "sparse_attention_reference", attend))


def one_pass_probabilities():
    return patches((sparse_attention, "KEY_BLOCK", 4096))


def unrounded_probabilities():
    unrounded = types.SimpleNamespace(divide=numerics.divide, round_bf16=lambda x: x)
    return patches((sparse_attention, "numerics", unrounded))


def no_clamp():
    return patches((grouped_matmul, "swiglu", lambda gate, up, limit: jax.nn.silu(gate) * up))


def weight_after_experts(original=grouped_matmul.expert_mlp):
    def mlp(x, experts, weights, *packed, **options):
        return original(x, experts, jnp.ones_like(weights), *packed, **options) * weights

    return patches((grouped_matmul, "expert_mlp", mlp))


def bias_in_weights(original=moe.route):
    def route(logits, bias, bias_vl, is_image, *, config):
        experts, _ = original(logits, bias, bias_vl, is_image, config=config)
        affinity = jnp.sqrt(jax.nn.softplus(logits)) + bias[None]
        weights = jnp.take_along_axis(affinity, experts, axis=-1)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        return experts, weights / total * config.routed_scaling_factor

    return patches((moe, "route", route))


def image_bias_unused(original=moe.route):
    def route(logits, bias, bias_vl, is_image, *, config):
        return original(logits, bias, bias, is_image, config=config)

    return patches((moe, "route", route))


def comb_over_new_copies(original=hyper_connections.expand):
    def expand(x, y, post, comb, **options):
        return original(x, y, post, jnp.swapaxes(comb, 1, 2), **options)

    return patches((hyper_connections, "expand", expand))


def sinkhorn_cut_short(original=hyper_connections.split_sinkhorn):
    def split(*arrays, sinkhorn_iters, **options):
        return original(*arrays, sinkhorn_iters=1, **options)

    return patches((hyper_connections, "split_sinkhorn", split))


def pooled_over_channels():
    swapped = types.SimpleNamespace(softmax=lambda x, axis: numerics.softmax(x, axis=-1))
    return patches((compressor, "numerics", swapped))


def block_of_newest_position_dropped(original=index_topk.select_candidate_blocks):
    def select(scores, newest, **options):
        return original(scores, jnp.full_like(newest, -1), **options)

    return patches((index_topk, "select_candidate_blocks", select))


OPS = [
    (swapped_nibbles, "fp4_gemm.a", "fp4_gemm.a.w_dequant"),
    (rounded_down_scale, "act_quant", "act_quant.scale_e8m0_bits"),
    (
        lambda: sink_changed(lambda s, _: s - jnp.inf),
        "sparse_attn.one",
        "sparse_attn.one_block.out",
    ),
    (
        lambda: sink_changed(lambda s, scale: s * scale),
        "sparse_attn.o",
        "sparse_attn.one_block.out",
    ),
    (one_pass_probabilities, "sparse_attn.three", "sparse_attn.three_blocks.out"),
    (unrounded_probabilities, "sparse_attn.one", "sparse_attn.one_block.out"),
    (no_clamp, "expert.fp4", "expert.fp4.y"),
    (no_clamp, "expert.fp8", "expert.fp8.y"),
    (weight_after_experts, "expert.fp4", "expert.fp4.y_weighted"),
    (bias_in_weights, "gate.sqrtsoftplus", "gate.sqrtsoftplus.top3.text.weights"),
    (image_bias_unused, "gate.sqrtsoftplus", "gate.sqrtsoftplus.top3.vl.ids"),
    (comb_over_new_copies, "hc_block", "hc_block.hc_post"),
    (sinkhorn_cut_short, "hc_split", "hc_split_sinkhorn.hc4.comb"),
    (pooled_over_channels, "compressor.r2", "compressor.r2.prefill11"),
    (block_of_newest_position_dropped, "select", "select_candidate_blocks.prefill.out"),
]


@pytest.mark.parametrize("bug, op, quantity", OPS, ids=[row[2] for row in OPS])
def test_bug_in_an_operation_is_caught_by(bug, op, quantity, directory):
    assert not names_of_short(run_ops(directory, op))
    with apply(bug()):
        found = names_of_short(run_ops(directory, op))
    assert (None, quantity) in found


class apply:
    """Several patches at once."""

    def __init__(self, parts):
        self.parts = parts

    def __enter__(self):
        for part in self.parts:
            part.start()

    def __exit__(self, *_):
        for part in reversed(self.parts):
            part.stop()


def other_frequencies(change):
    def frequencies(config, ratio):
        return rotary.layer_frequencies(config, change(ratio))

    return patches((block, "layer_frequencies", frequencies))


def per_head_norm(original=sparse_attention.sparse_attention_reference):
    def attend(q, kv, valid, sink, *, scale):
        wide = q.astype(jnp.float32)
        rms = jnp.sqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True))
        return original((wide / rms).astype(q.dtype), kv, valid, sink, scale=scale)

    return patches((sparse_attention, "sparse_attention_reference", attend))


def pre_of_the_same_sublayer(original=block.Block.write):
    def write(self, stream, positions, is_image, engram):
        written = original(self, stream, positions, is_image, engram)
        attn_in = self._collapse(written.x, written.attn[0], self.attn_norm)
        return dataclasses.replace(written, attn_in=attn_in)

    return patches((block.Block, "write", write))


def quantized_before_rope(original=kv_write.turn):
    def turn(x, cos, sin):
        return original(unpack_window(pack_window(x)).astype(jnp.bfloat16), cos, sin)

    return patches((kv_write, "turn", turn))


def window_without_the_token_itself(original=block.window_positions):
    def before(positions, earliest, window):
        seen = original(positions, earliest, window)
        return jnp.where(seen == positions[:, None], -1, seen)

    return patches((block, "window_positions", before))


def latent_at_its_last_token(original=block.Block.compress):
    def compress(self, kv, score, positions):
        return original(self, kv, score, positions + kv.shape[1] - 1)

    return patches((block.Block, "compress", compress))


def index_key_of_the_rotated_latent(original=block.Block.compress):
    def compress(self, kv, score, positions):
        latents, _, rotation = original(self, kv, score, positions)
        rotated = turn(self.attn.compressor.norm(latents), *rotation)
        return latents, self.attn.indexer.project(rotated), rotation

    return patches((block.Block, "compress", compress))


def invisible_positions_chosen(original=indexer.Indexer.select):
    def select(self, scores, candidates, positions):
        return original(self, jnp.where(scores == -jnp.inf, 1.0, scores), candidates, positions)

    return patches((indexer.Indexer, "select", select))


def source_masks_itself(original=indexer.Indexer.select):
    def select(self, scores, candidates, positions):
        _, selected, _ = original(self, scores, candidates, positions)
        topk, _, masked = original(self, scores, selected, positions)
        return topk, selected, masked

    return patches((indexer.Indexer, "select", select))


def mask_ignored(original=indexer.Indexer.select):
    def select(self, scores, candidates, positions):
        return original(self, scores, None, positions)

    return patches((indexer.Indexer, "select", select))


def unrounded_index_terms():
    return patches((index_topk, "numerics", types.SimpleNamespace(round_bf16=lambda x: x)))


def open_group_lost():
    def forget(rows, open_rows, batch, ratio):
        return jnp.zeros_like(open_rows)

    return patches((cached_block, "_keep_open", forget))


def gate_without_sign():
    return patches((jnp, "signbit", lambda x: jnp.zeros(x.shape, bool)))


def mean_of_the_copies():
    def mean(x, pre, weight, **options):
        equal = jnp.full_like(pre, 1 / pre.shape[1])
        return hyper_connections.collapse_norm(x, equal, weight, **options)

    return patches((model, "hyper_connections", types.SimpleNamespace(collapse_norm=mean)))


def unrotated_output():
    return patches((sparse_attention, "turn", lambda x, cos, sin: x))


LAYERS = [
    (lambda: other_frequencies(lambda ratio: 1), WINDOW, "prefill", "window_kv"),
    (per_head_norm, WINDOW, "prefill", "attn_out"),
    (unrotated_output, WINDOW, "prefill", "attn_out"),
    (pre_of_the_same_sublayer, WINDOW, "prefill", "attn_out"),
    (quantized_before_rope, WINDOW, "prefill", "window_kv"),
    (window_without_the_token_itself, WINDOW, "decode", "attn_out"),
    (gate_without_sign, ENGRAM, "prefill", "engram_out"),
    (lambda: other_frequencies(lambda ratio: 0), PAIRS, "prefill", "window_kv"),
    (latent_at_its_last_token, PAIRS, "prefill", "compress_kv"),
    (index_key_of_the_rotated_latent, PAIRS, "prefill", "index_k"),
    (invisible_positions_chosen, PAIRS, "prefill", "topk"),
    (unrounded_index_terms, PAIRS, "prefill", "index_score"),
    (open_group_lost, PAIRS, "end", "caches"),
    (source_masks_itself, CANDIDATES, "prefill", "topk"),
    (mask_ignored, MASKED, "prefill", "topk"),
    (mean_of_the_copies, LAST, "prefill", "final_h"),
]


@pytest.mark.parametrize("bug, layers, phase, quantity", LAYERS)
def test_bug_in_a_layer_is_caught_by(bug, layers, phase, quantity, directory):
    with apply(bug()):
        measures = run_layers(directory, layers)
    assert (phase, quantity) in names_of_short(measures)


@pytest.mark.parametrize("layers", [WINDOW, PAIRS], ids=str)
def test_layers_without_a_bug_fall_short_of_nothing(layers, directory):
    assert not names_of_short(run_layers(directory, layers))


def test_wrong_norm_epsilon_is_caught_by_attn_out(directory):
    config = dataclasses.replace(directory.config, rms_norm_eps=1e-6)
    short = names_of_short(run_layers(directory, WINDOW, config))
    assert ("prefill", "attn_out") in short


def look_back_over_images(original=engram_hash.EngramHasher.hash):
    def hash_all(self, token_ids, history):
        pad = self.config.pad_token_id
        return original(self, np.where(token_ids < 0, pad, token_ids), history)

    return patches((engram_hash.EngramHasher, "hash", hash_all))


def multipliers_of_another_layer(original=engram_hash.multipliers):
    def shifted(config):
        return original(config)[::-1]

    return patches((engram_hash, "multipliers", shifted), (verify_engram, "multipliers", shifted))


@pytest.mark.parametrize(
    "bug, quantity",
    [(look_back_over_images, "hash.ids"), (multipliers_of_another_layer, "multipliers")],
)
def test_bug_in_the_hash_is_caught_by(bug, quantity, directory):
    assert not names_of_short(check_engram(directory))
    with apply(bug()):
        assert (None, quantity) in names_of_short(check_engram(directory))

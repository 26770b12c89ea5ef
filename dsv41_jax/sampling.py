"""Choosing tokens from logits: a row's result depends on that row alone.

Letters: L logit rows, V vocabulary, N alternatives, B banned tokens.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np

from dsv41_jax.batch import ROW_TILE
from dsv41_jax.rowwise import map_rows

NUM_ALTERNATIVES = 20  # N: likeliest tokens returned for every row
MAX_BANNED = 16  # B: tokens one row may exclude


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingBatch:
    """How each logit row chooses its token; zeros and -1 in padding rows.

    Attributes:
      temperature: float32[L]; 0 takes the likeliest token, the lowest id among equals.
      top_p: float32[L] in (0, 1]; 1 is off.
      top_k: int32[L]; 0 is off.
      min_p: float32[L] in [0, 1]; 0 is off.
      seed: uint32[L], the request's random stream.
      step: int32[L], tokens the request has generated; names the draw within the stream.
      target: int32[L]; -1 samples, otherwise the token whose log-probability is wanted.
      banned: int32[L, B], tokens that are not sampled; -1 is none.
    """

    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    min_p: jax.Array
    seed: jax.Array
    step: jax.Array
    target: jax.Array
    banned: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """The tokens of the rows and their place in the raw distribution.

    Log-probabilities are natural, of the logits as they come: before bans, temperature and
    truncation. Where V is below N there are V alternatives.

    Attributes:
      tokens: int32[L], the sampled token, or the target.
      logprobs: float32[L], of `tokens`.
      ranks: int32[L], 1 for the likeliest token.
      top_ids: int32[L, N], likeliest first.
      top_logprobs: float32[L, N].
    """

    tokens: jax.Array
    logprobs: jax.Array
    ranks: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def sample(logits: jax.Array, sampling: SamplingBatch, num_logits: jax.Array) -> Sampled:
    """Samples, or looks up, one token per row.

    The draw of a row uses the key fold_in(key(seed), step), so it depends neither on the batch
    nor on how the request was cut into steps. Truncation is applied in the order min-p, top-k,
    top-p, each after temperature.

    Args:
      logits: float32[L, V], L a multiple of the row tile.
      sampling: see `SamplingBatch`.
      num_logits: int32[], rows that are real; they come first.
    """
    chex.assert_rank(logits, 2)
    chex.assert_type(logits, jnp.float32)
    chex.assert_shape(sampling.banned, (logits.shape[0], None))
    return map_rows(lambda rows: _sample_rows(*rows), (logits, sampling), num_logits)


def _sample_rows(logits: jax.Array, rows: SamplingBatch) -> Sampled:
    with jax.named_scope("sampling"):
        logprobs = jax.nn.log_softmax(logits)
        tokens = jnp.where(rows.target >= 0, rows.target, _choose(logits, rows))
        chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)
        top_logprobs, top_ids = jax.lax.top_k(logprobs, min(NUM_ALTERNATIVES, logits.shape[1]))
        return Sampled(
            tokens=tokens,
            logprobs=chosen[:, 0],
            ranks=1 + jnp.sum(logprobs > chosen, axis=1, dtype=jnp.int32),
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )


def _choose(logits: jax.Array, rows: SamplingBatch) -> jax.Array:
    """int32[rows]: the sampled tokens."""
    allowed = _ban(logits, rows.banned)
    greedy = jnp.argmax(allowed, axis=1).astype(jnp.int32)
    draws = (rows.temperature > 0) & (rows.target < 0)
    drawn = jax.lax.cond(jnp.any(draws), lambda: _draw(allowed, rows), lambda: greedy)
    return jnp.where(draws, drawn, greedy)


def _ban(logits: jax.Array, banned: jax.Array) -> jax.Array:
    vocabulary = logits.shape[1]
    columns = jnp.where(banned >= 0, banned, vocabulary)
    return jax.vmap(lambda row, ids: row.at[ids].set(-jnp.inf, mode="drop"))(logits, columns)


def _draw(logits: jax.Array, rows: SamplingBatch) -> jax.Array:
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    scaled = logits / temperature[:, None]
    likeliest = jnp.max(scaled, axis=1, keepdims=True)
    scaled = jnp.where(scaled < likeliest + jnp.log(rows.min_p)[:, None], -jnp.inf, scaled)
    truncates = (rows.top_k > 0) | (rows.top_p < 1)
    # Only a tile that truncates pays for the sort; either branch gives a row the same value.
    least = jax.lax.cond(
        jnp.any(truncates),
        lambda: jnp.where(truncates, _least_kept(scaled, rows), -jnp.inf),
        lambda: jnp.full(truncates.shape, -jnp.inf),
    )
    noise = jax.vmap(lambda seed, step: _gumbel(seed, step, logits.shape[1]))(rows.seed, rows.step)
    kept = jnp.where(scaled >= least[:, None], scaled + noise, -jnp.inf)
    return jnp.argmax(kept, axis=1).astype(jnp.int32)


def _gumbel(seed: jax.Array, step: jax.Array, size: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
    return jax.random.gumbel(key, (size,), jnp.float32)


def _least_kept(scaled: jax.Array, rows: SamplingBatch) -> jax.Array:
    """float32[rows]: the smallest scaled logit that top-k and top-p keep; equals stay together."""
    vocabulary = scaled.shape[1]
    falling = jnp.sort(scaled, axis=1)[:, ::-1]
    count = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocabulary), vocabulary)
    kth = jnp.take_along_axis(falling, count[:, None] - 1, axis=1)
    probabilities = jax.nn.softmax(jnp.where(falling >= kth, falling, -jnp.inf), axis=1)
    before = jnp.cumsum(probabilities, axis=1) - probabilities
    in_nucleus = (before < rows.top_p[:, None]) | (rows.top_p >= 1)[:, None]
    return jnp.min(jnp.where((falling >= kth) & in_nucleus, falling, jnp.inf), axis=1)


def single_request(temperature: float, seed: int, step: int) -> SamplingBatch:
    """Plain temperature sampling of one request in the first row of a tile."""

    def first(value: float, padding: float, dtype: type) -> np.ndarray:
        column = np.full(ROW_TILE, padding, dtype)
        column[0] = value
        return column

    return SamplingBatch(
        temperature=first(temperature, 0, np.float32),
        top_p=first(1, 1, np.float32),
        top_k=np.zeros(ROW_TILE, np.int32),
        min_p=np.zeros(ROW_TILE, np.float32),
        seed=first(seed % 2**32, 0, np.uint32),
        step=first(step, 0, np.int32),
        target=np.full(ROW_TILE, -1, np.int32),
        banned=np.full((ROW_TILE, MAX_BANNED), -1, np.int32),
    )

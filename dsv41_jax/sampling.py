"""Choosing tokens from logits: a row's result depends on that row alone.

Letters: L logit rows, V vocabulary, N alternatives, S rows whose logits may change, K tokens that
one of them changes, W words of a bit per token.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Implementation
from pallas_kernels.rowwise import ROW_TILE, map_rows

NUM_ALTERNATIVES = 20  # N: likeliest tokens returned for every row


def mask_words(vocab_size: int) -> int:
    """W: 32-bit words that hold one bit per token."""
    return -(-vocab_size // 32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogitChanges:
    """What penalties, biases and constraints do to logits before a token is chosen.

    A changed logit is divided by `divisor` if it is positive and multiplied by it if not, then
    `bias` is added; in the end tokens that are not allowed are out.

    Attributes:
      ids: int32[S, K], distinct tokens of a row; -1 is none.
      divisor: float32[S, K], above 0; 1 is neutral.
      bias: float32[S, K].
      allowed: uint32[S, W], bit i of word w for token 32 w + i; at least one token is allowed.
    """

    ids: jax.Array
    divisor: jax.Array
    bias: jax.Array
    allowed: jax.Array


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
      watched: int32[L, N], tokens whose log-probability is wanted besides; -1 is none.
      change_row: int32[L], row of `changes` that applies; -1 is none.
      changes: tables of changes, or None where no row has any.
    """

    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    min_p: jax.Array
    seed: jax.Array
    step: jax.Array
    target: jax.Array
    watched: jax.Array
    change_row: jax.Array
    changes: LogitChanges | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """The tokens of the rows and their place in the raw distribution.

    Log-probabilities are natural, of the logits as they come: before changes, temperature and
    truncation. Where V is below N there are V alternatives.

    Attributes:
      tokens: int32[L], the sampled token, or the target.
      logprobs: float32[L], of `tokens`.
      ranks: int32[L], 1 for the likeliest token.
      top_ids: int32[L, N], likeliest first.
      top_logprobs: float32[L, N].
      watched_logprobs: float32[L, N], of `SamplingBatch.watched`; meaningless where that is -1.
    """

    tokens: jax.Array
    logprobs: jax.Array
    ranks: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array
    watched_logprobs: jax.Array


def sample(
    logits: jax.Array,
    sampling: SamplingBatch,
    num_logits: jax.Array,
    *,
    implementation: Implementation,
) -> Sampled:
    """Samples, or looks up, one token per row.

    The draw of a row uses the key fold_in(key(seed), step), so it depends neither on the batch
    nor on how the request was cut into steps. Truncation is applied in the order min-p, top-k,
    top-p, each after temperature.

    Args:
      logits: float32[L, V], L a multiple of the row tile.
      sampling: see `SamplingBatch`.
      num_logits: int32[], rows that are real; they come first.
      implementation: of the model, whose row tiles rows follow.
    """
    chex.assert_rank(logits, 2)
    chex.assert_type(logits, jnp.float32)
    chex.assert_shape(sampling.watched, (logits.shape[0], NUM_ALTERNATIVES))
    changes = sampling.changes
    if changes is not None:
        chex.assert_shape(changes.allowed, (None, mask_words(logits.shape[1])))
    by_row = dataclasses.replace(sampling, changes=None)
    return map_rows(
        lambda rows: _sample_rows(*rows, changes),
        (logits, by_row),
        num_logits,
        implementation=implementation,
    )


def _sample_rows(logits: jax.Array, rows: SamplingBatch, changes: LogitChanges | None) -> Sampled:
    with jax.named_scope("sampling"):
        logprobs = jax.nn.log_softmax(logits)
        changed = logits if changes is None else _change(logits, rows.change_row, changes)
        tokens = jnp.where(rows.target >= 0, rows.target, _choose(changed, rows))
        chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)
        top_logprobs, top_ids = jax.lax.top_k(logprobs, min(NUM_ALTERNATIVES, logits.shape[1]))
        return Sampled(
            tokens=tokens,
            logprobs=chosen[:, 0],
            ranks=1 + jnp.sum(logprobs > chosen, axis=1, dtype=jnp.int32),
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            watched_logprobs=jnp.take_along_axis(logprobs, jnp.maximum(rows.watched, 0), axis=1),
        )


def _change(logits: jax.Array, change_row: jax.Array, changes: LogitChanges) -> jax.Array:
    """float32[rows, V]: the logits after their changes; only a tile that has some pays."""
    vocabulary = logits.shape[1]

    def apply() -> jax.Array:
        row = jax.tree.map(lambda table: table[jnp.maximum(change_row, 0)], changes)
        old = jnp.take_along_axis(logits, jnp.maximum(row.ids, 0), axis=1)
        new = jnp.where(old > 0, old / row.divisor, old * row.divisor) + row.bias
        columns = jnp.where(row.ids >= 0, row.ids, vocabulary)
        set_columns = jax.vmap(lambda x, at, value: x.at[at].set(value, mode="drop"))
        tokens = jnp.arange(vocabulary, dtype=jnp.uint32)
        allowed = (row.allowed[:, tokens // 32] >> (tokens % 32)[None]) & 1
        changed = jnp.where(allowed == 1, set_columns(logits, columns, new), -jnp.inf)
        return jnp.where(change_row[:, None] >= 0, changed, logits)

    return jax.lax.cond(jnp.any(change_row >= 0), apply, lambda: logits)


def _choose(logits: jax.Array, rows: SamplingBatch) -> jax.Array:
    """int32[rows]: the sampled tokens."""
    greedy = jnp.argmax(logits, axis=1).astype(jnp.int32)
    draws = (rows.temperature > 0) & (rows.target < 0)
    drawn = jax.lax.cond(jnp.any(draws), lambda: _draw(logits, rows), lambda: greedy)
    return jnp.where(draws, drawn, greedy)


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
        watched=np.full((ROW_TILE, NUM_ALTERNATIVES), -1, np.int32),
        change_row=np.full(ROW_TILE, -1, np.int32),
        changes=None,
    )

"""Scores and generates on one device: the shortest way from a checkpoint to numbers."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Sequence

import jax
import numpy as np

from dsv41_jax.batch import TokenBatch, page_size
from dsv41_jax.checkpoint import CheckpointError, load_params, open_checkpoint
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_hash import NO_TOKEN
from dsv41_jax.engram_table import EngramTables
from dsv41_jax.forward import forward, forward_and_sample
from dsv41_jax.hf_config import load_config
from dsv41_jax.host_batch import RequestRows, build_batch, round_rows
from dsv41_jax.model import Params, Stage
from dsv41_jax.sampling import Sampled, SamplingBatch, single_request
from dsv41_jax.state import StageState, init_state
from pallas_kernels.dispatch import Implementation, resolve

DEFAULT_CHUNK = 512  # tokens of a prefill step


@dataclasses.dataclass(frozen=True)
class Model:
    """A checkpoint ready to run.

    Attributes:
      config: what the checkpoint's config.json says.
      params: packed parameters on the device, named as in the checkpoint.
      engram: memory-mapped Engram tables, or None where the model has none.
      path: the checkpoint directory.
      implementation: of the operations.
    """

    config: ModelConfig
    params: Params
    engram: EngramTables | None
    path: pathlib.Path
    implementation: Implementation

    @property
    def stage(self) -> Stage:
        """The whole model as one stage."""
        layers = range(self.config.num_hidden_layers)
        return Stage(self.config, layers, implementation=self.implementation)


def load(
    path: str | os.PathLike,
    *,
    implementation: Implementation | None = None,
    progress: bool = True,
) -> Model:
    """Loads a checkpoint directory in the released layout.

    Args:
      path: directory with config.json, safetensors shards and tokenizer.json.
      implementation: "xla", "pallas" or "pallas_interpret"; if None, kernels on a GPU and
        XLA elsewhere.
      progress: whether to show a progress bar on stderr.

    Raises:
      ValueError: no such implementation.
      ConfigError: config.json does not describe a model this project runs.
      CheckpointError: the shards are incomplete, damaged or of another model.
    """
    implementation = resolve(implementation)
    directory = pathlib.Path(path)
    if not directory.is_dir():
        raise CheckpointError(
            str(directory), ["it is not a directory; load takes the directory of a checkpoint"]
        )
    config = load_config(directory)
    open_checkpoint(directory, config)  # faults of the shards first, before anything is read
    engram = EngramTables.open(directory, config) if config.engram else None
    params = load_params(directory, config, progress=progress)
    return Model(config, params, engram, directory, implementation)


def score(model: Model, token_ids: Sequence[int], chunk_size: int | None = None) -> np.ndarray:
    """Teacher-forced logits of every position.

    Args:
      model: see `load`.
      token_ids: S ids.
      chunk_size: tokens per step; the result does not depend on it.

    Returns:
      float32[S, V]; row i scores the token after `token_ids[i]`.

    Raises:
      ValueError: no tokens, an id outside the vocabulary, too many tokens, or a chunk size
        below 1.
    """
    chunk = check_request(model.config, token_ids, 0, chunk_size)
    state = _state(model.config, len(token_ids), chunk)
    rows = round_rows(chunk)
    logits = []
    for part in prompt_chunks(model.config, token_ids, chunk):
        part = dataclasses.replace(part, logits=len(part.token_ids))
        batch = _batch(model, part, len(token_ids), rows, rows)
        out, state = forward(model.stage, model.params, state, batch)
        logits.append(np.asarray(out[: part.logits]))
    return np.concatenate(logits)


def generate(
    model: Model,
    token_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    decoder_replay: bool = False,
) -> list[int]:
    """Continues a prompt, until the end-of-sequence token or the limit.

    Args:
      model: see `load`.
      token_ids: the prompt.
      max_new_tokens: tokens to generate at most.
      temperature: 0 takes the likeliest token.
      seed: of the random draws; the same seed gives the same tokens.
      decoder_replay: whether layers from the last KV source on see only the prompt's last
        window (see `replay_start`); faster on long prompts, and an approximation.

    Returns:
      The new ids, the end-of-sequence token included if it was reached.

    Raises:
      ValueError: as `score`, or a temperature or seed that is negative or not a number.
    """
    chunk = check_request(model.config, token_ids, max_new_tokens, None)
    total = len(token_ids) + max_new_tokens
    state = _state(model.config, total, chunk)
    rows = round_rows(chunk)

    def step(part: RequestRows, sampling: SamplingBatch) -> Sampled:
        nonlocal state
        batch = _batch(model, part, total, rows, round_rows(1))
        sampled, state = forward_and_sample(model.stage, model.params, state, batch, sampling)
        return sampled

    return decode_loop(
        model.config,
        token_ids,
        step,
        chunk=chunk,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        late_from=replay_start(model.config, len(token_ids)) if decoder_replay else 0,
    )


def replay_start(config: ModelConfig, prompt_tokens: int) -> int:
    """First position of a prompt that bounded replay computes in every layer.

    Compressed rows and index keys are written for all positions, so layers from the last KV
    source on lose nothing but window keys of earlier rows (spec: bounded replay).
    """
    return max(0, prompt_tokens - config.sliding_window)


def decode_loop(
    config: ModelConfig,
    token_ids: Sequence[int],
    step: Callable[[RequestRows, SamplingBatch], Sampled],
    *,
    chunk: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    late_from: int = 0,
) -> list[int]:
    """Drives one request through `step`: the prompt in chunks, then token by token."""
    if not (isinstance(temperature, int | float | np.floating) and 0 <= temperature < np.inf):
        raise ValueError(f"temperature is {temperature!r}; it must be 0 or a positive number")
    _check_whole("seed", seed, 0)
    ids = list(token_ids)
    for part in prompt_chunks(config, ids, chunk, late_from):
        sampled = step(part, single_request(temperature, seed, 0))
    new: list[int] = []
    while len(new) < max_new_tokens:
        new.append(int(jax.device_get(sampled.tokens)[0]))
        if new[-1] == config.eos_token_id or len(new) == max_new_tokens:
            break
        ids.append(new[-1])
        part = request_rows(config, ids, len(ids) - 1, len(ids), chunk, late_from)
        sampled = step(part, single_request(temperature, seed, len(new)))
    return new


def check_request(
    config: ModelConfig, token_ids: Sequence[int], new_tokens: int, chunk_size: int | None
) -> int:
    """The chunk size of a request, once its tokens are known to be acceptable.

    Raises:
      ValueError: see `score` and `generate`.
    """
    ids = _token_array(token_ids)
    outside = ids[(ids < 0) | (ids >= config.vocab_size)]
    if outside.size:
        raise ValueError(
            f"token id {outside[0]} is outside the vocabulary 0..{config.vocab_size - 1}"
        )
    _check_whole("max_new_tokens", new_tokens, 0)
    total, limit = len(ids) + new_tokens, config.max_position_embeddings
    if total > limit:
        raise ValueError(f"{total} tokens exceed the model's context of {limit}")
    if chunk_size is None:
        return min(len(ids), DEFAULT_CHUNK)
    _check_whole("chunk_size", chunk_size, 1)
    return min(chunk_size, len(ids))


def _token_array(token_ids: Sequence[int]) -> np.ndarray:
    wanted = "token_ids must be a sequence of whole numbers"
    if isinstance(token_ids, str) or not isinstance(token_ids, Sequence | np.ndarray):
        raise ValueError(f"{wanted}, not {type(token_ids).__name__}")
    if not len(token_ids):
        raise ValueError("token_ids is empty; give at least one token")
    try:
        ids = np.asarray(token_ids)
    except ValueError as error:
        raise ValueError(f"{wanted}; it is nested unevenly") from error
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{wanted}, not an array of {ids.dtype} with {ids.ndim} axes")
    return ids


def _check_whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")


def prompt_chunks(
    config: ModelConfig, token_ids: Sequence[int], chunk: int, late_from: int = 0
) -> list[RequestRows]:
    """A prompt cut into steps of `chunk` tokens; the last row wants logits."""
    starts = range(0, len(token_ids), chunk)
    return [
        request_rows(config, token_ids, start, min(start + chunk, len(token_ids)), chunk, late_from)
        for start in starts
    ]


def request_rows(
    config: ModelConfig,
    token_ids: Sequence[int],
    start: int,
    stop: int,
    chunk: int,
    late_from: int = 0,
) -> RequestRows:
    """Tokens start..stop-1 of a request that has the caches to itself.

    Global pages are numbered by table column; window pages go round a ring that holds the
    window and a chunk.
    """
    look_back = config.engram.max_ngram_size - 1 if config.engram else 0
    before = list(token_ids[max(0, start - look_back) : start])
    history = [NO_TOKEN] * (look_back - len(before)) + before
    page, ring = page_size(config), window_ring(config, chunk)
    columns = range(-(-stop // page))
    oldest = max(0, start - config.sliding_window + 1) // page
    return RequestRows(
        token_ids=np.asarray(token_ids[start:stop], np.int32),
        start=start,
        history=np.asarray(history, np.int64),
        window_pages=[c % ring if c >= oldest else -1 for c in columns],
        global_pages=columns,
        slot=0,
        logits=int(stop == len(token_ids)),
        late_from=late_from,
    )


def window_ring(config: ModelConfig, chunk: int) -> int:
    """Pages that hold a window and a chunk wherever their first position falls on a page."""
    return -(-(config.sliding_window + chunk) // page_size(config)) + 1


def columns_for(config: ModelConfig, tokens: int) -> int:
    """Block-table columns of a request of `tokens` positions."""
    return -(-tokens // page_size(config))


def _state(config: ModelConfig, tokens: int, chunk: int) -> StageState:
    return init_state(
        config,
        range(config.num_hidden_layers),
        window_pages=window_ring(config, chunk),
        global_pages=columns_for(config, tokens),
        slots=1,
    )


def _batch(model: Model, part: RequestRows, total: int, rows: int, logits: int) -> TokenBatch:
    return build_batch(
        model.config,
        [part],
        tokens=rows,
        requests=1,
        columns=columns_for(model.config, total),
        logit_rows=logits,
        engram=model.engram,
    )

"""The sizes an engine is built for; every compiled shape follows from them."""

import dataclasses

from dsv41_jax.batch import page_size
from dsv41_jax.config import ConfigError, ModelConfig
from pallas_kernels.rowwise import ROW_TILE

_PROMPT_LOGIT_ROWS = 64  # prompt log-probabilities computed per step, at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What one engine holds and does per step.

    Attributes:
      max_model_len: most tokens of one request, prompt and output together.
      max_num_seqs: most requests that run at once.
      max_num_batched_tokens: most tokens of one step.
      page_size: tokens per cache page.
      sliding_window: tokens a window layer reads, the newest included.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    sliding_window: int

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_model_len < 2:
            raise ConfigError("max_model_len is 1; it must hold a prompt token and a new one")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs "
                f"{self.max_num_seqs}; a step must hold one token of every running request"
            )

    @property
    def columns(self) -> int:
        """C: block-table columns of one request."""
        return -(-self.max_model_len // self.page_size)

    @property
    def prompt_logit_rows(self) -> int:
        """Prompt rows of one step that may ask for logits, beside those that sample."""
        return self.logit_rows - self.max_num_seqs

    @property
    def logit_rows(self) -> int:
        """L: logit rows of a step."""
        return round_up(self.max_num_seqs + _PROMPT_LOGIT_ROWS)


def engine_limits(
    config: ModelConfig, *, max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int
) -> EngineLimits:
    """The limits of an engine for `config`.

    Raises:
      ConfigError: a size is out of range, or beyond what the model was made for.
    """
    if max_model_len > config.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {max_model_len} is above the model's max_position_embeddings "
            f"{config.max_position_embeddings}"
        )
    return EngineLimits(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        page_size=page_size(config),
        sliding_window=config.sliding_window,
    )


def round_up(rows: int) -> int:
    """The smallest whole number of row tiles that holds `rows`."""
    return -(-rows // ROW_TILE) * ROW_TILE

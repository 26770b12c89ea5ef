"""Cache pages by group: how many a byte budget buys."""

import dataclasses

from dsv41_jax.config import ConfigError, ModelConfig
from dsv41_jax.layer_plan import layer_spec
from sharding.limits import EngineLimits


class CacheBudgetError(ConfigError):
    """Memory for caches that does not hold one request."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheBytes:
    """Bytes of one page of each group and of one request's open groups, over some layers."""

    window_page: int
    global_page: int
    slot: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """Pages of each group and request slots that are allocated."""

    window_pages: int
    global_pages: int
    slots: int

    def total_bytes(self, unit: CacheBytes) -> int:
        """Bytes of all pages and slots."""
        return (
            self.window_pages * unit.window_page
            + self.global_pages * unit.global_page
            + self.slots * unit.slot
        )


def cache_bytes(config: ModelConfig, layers: range, page_size: int) -> CacheBytes:
    """Sizes of what `dsv41_jax.state.init_state` allocates, per page and slot.

    Args:
      config: the model.
      layers: backbone layers whose caches are counted.
      page_size: tokens per page.
    """
    window = len(layers) * page_size * (config.head_dim + config.head_dim // 32)
    compressed = config.head_dim // 2 + config.head_dim // 16
    index_key = config.index_head_dim // 2 + config.index_head_dim // 32
    global_page, slot = 0, 0
    for spec in (layer_spec(config, layer) for layer in layers):
        if not spec.owns_kv:
            continue
        global_page += page_size // spec.ratio * (compressed + index_key)
        if spec.ratio > 1:
            slot += 2 * 4 * spec.ratio * config.head_dim  # float32 kv and score
    return CacheBytes(window_page=window, global_page=global_page, slot=slot)


def plan_cache(limits: EngineLimits, unit: CacheBytes, budget: int | None) -> CacheSizes:
    """How many pages of each group to allocate.

    Without a budget every running request can grow to max_model_len, and window pages last for
    the beginnings of as many continuations twice. With one, both groups shrink together, down
    to what a single request of that length needs.

    Args:
      limits: the engine's sizes.
      unit: bytes per page and slot.
      budget: bytes for all caches (option --kv-cache-memory-bytes), or None.

    Raises:
      CacheBudgetError: the budget does not hold one request of max_model_len.
    """
    seqs, chunk = limits.max_num_seqs, limits.max_num_batched_tokens
    request = _span(limits, 1) + 1 + 2 * _span(limits, 0)
    full = CacheSizes(
        window_pages=min(seqs * request + -(-chunk // limits.page_size), seqs * limits.columns),
        global_pages=seqs * limits.columns,
        slots=seqs,
    )
    if budget is None:
        return full
    least = CacheSizes(
        window_pages=_span(limits, chunk), global_pages=limits.columns, slots=limits.max_num_seqs
    )
    spare = budget - least.total_bytes(unit)
    if spare < 0:
        raise CacheBudgetError(
            f"kv_cache_memory_bytes {budget} is too small: one request of max_model_len "
            f"{limits.max_model_len} needs {least.total_bytes(unit)} bytes "
            f"({least.global_pages} global pages of {unit.global_page} bytes, "
            f"{least.window_pages} window pages of {unit.window_page} bytes and "
            f"{seqs} slots of {unit.slot} bytes). Raise it, or lower max_model_len"
        )
    share = min(1.0, spare / max(1, full.total_bytes(unit) - least.total_bytes(unit)))
    return CacheSizes(
        window_pages=_between(least.window_pages, full.window_pages, share),
        global_pages=_between(least.global_pages, full.global_pages, share),
        slots=seqs,
    )


def _between(least: int, full: int, share: float) -> int:
    return least + int(share * max(0, full - least))


def _span(limits: EngineLimits, rows: int) -> int:
    """Most window pages one request touches in a step of `rows` rows."""
    positions = limits.sliding_window - 1 + rows
    return min((positions + limits.page_size - 2) // limits.page_size + 1, limits.columns)

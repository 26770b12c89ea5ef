"""What source layers publish for later layers within one step."""

import dataclasses
from typing import Any

import jax

from dsv41_jax.layer_plan import Kind, SharingError

ROW_KINDS: tuple[Kind, ...] = ("index", "candidate")  # published per row of the batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedState:
    """An immutable map from kind and source layer to what that layer published.

    The keys are pytree structure, not data: a missing entry fails while tracing.
    """

    entries: dict[Kind, dict[int, Any]] = dataclasses.field(default_factory=dict)

    def publish(self, kind: Kind, source: int, value: Any) -> "SharedState":
        """Adds what `source` publishes; a second publication is an error."""
        published = self.entries.get(kind, {})
        if source in published:
            raise SharingError(f"layer {source} published its {kind} twice in one step")
        return SharedState({**self.entries, kind: {**published, source: value}})

    def read(self, kind: Kind, source: int, consumer: int) -> Any:
        """What `source` published, for layer `consumer`.

        Raises:
          SharingError: nobody in this stage published it.
        """
        published = self.entries.get(kind, {})
        if source not in published:
            raise SharingError(
                f"layer {consumer} reads the {kind} of source layer {source}, which was not "
                f"published to this stage; sources at hand: {sorted(published)}. Keep layers "
                f"{source} and {consumer} in one stage, or turn on the relay for {kind}"
            )
        return published[source]

    def take_rows(self, rows: jax.Array) -> "SharedState":
        """The same publications for int32[T] rows of the batch; whole caches stay as they are."""
        taken = {
            kind: jax.tree.map(lambda a: a[rows], published)
            for kind, published in self.entries.items()
            if kind in ROW_KINDS
        }
        return SharedState({**self.entries, **taken})

"""Operations on the hot paths, each defined by a reference in plain jax.numpy."""

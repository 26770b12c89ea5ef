"""The same roundings from a compiler that takes half the time."""

import jax

QUICK = {
    "xla_allow_excess_precision": False,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


def compiled_anew(fn, **options):
    """A function of its own, so that no trace from before a bug was planted is used."""
    return jax.jit(lambda *args: fn(*args), compiler_options=QUICK, **options)

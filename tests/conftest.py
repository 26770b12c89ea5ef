"""Settings of every test: strict types, eight virtual CPU devices, shared compilations."""

import os
import pathlib

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# One cache of compiled programs for the test processes and the commands that they start.
for name, value in {
    "jax_compilation_cache_dir": str(ROOT / ".pytest_cache" / "jax"),
    "jax_persistent_cache_min_compile_time_secs": 0.5,
}.items():
    jax.config.update(name, value)
    os.environ[name.upper()] = str(value)
# Two test processes may have to share a GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU run only where there is one."""
    if jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason="needs a GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session", params=["tiny_a", "tiny_b"])
def golden(request: pytest.FixtureRequest) -> pathlib.Path:
    """A checkpoint directory with vectors."""
    return GOLDEN / request.param

"""Settings of every test: strict types, eight virtual CPU devices, shared compilations."""

import pathlib

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".pytest_cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


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

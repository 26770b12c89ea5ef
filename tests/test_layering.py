"""Imports only point downwards: between the packages, and between the floors of the model."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = {
    "pallas_kernels": set(),
    "dsv41_jax": {"pallas_kernels"},
    "sharding": {"pallas_kernels", "dsv41_jax"},
    "serving": {"pallas_kernels", "dsv41_jax", "sharding"},
}
# Floors of dsv41_jax: a module imports its own floor and those below. A package counts as one
# room with everything in it.
FLOORS = {
    "axes": 0,
    "config": 0,
    "config_checks": 0,
    "layer_plan": 0,
    "hf_config": 1,
    "batch": 2,
    "engram_hash": 2,
    "state": 2,
    "shared_state": 2,
    "slots": 2,
    "layers": 3,
    "vision": 3,
    "expert_offload": 4,
    "model": 4,
    "draft": 4,
    "sampling": 4,
    "checkpoint": 5,
    "engram_table": 5,
    "engram_ahead": 5,
    "engram_device": 5,
    "embedding_table": 5,
    "host_batch": 5,
    "forward": 5,
    "inference": 5,
    "verify": 5,
    "verification": 5,
}
STANDARD_ONLY = 0  # this floor imports nothing but the standard library
TOP = 5  # modules of no listed room stand here
KERNEL_LIBRARIES = {"jax", "jaxlib", "numpy", "ml_dtypes", "chex"}
STANDARD = {
    *("abc", "argparse", "ast", "collections", "contextlib", "dataclasses", "difflib", "enum"),
    *("functools", "itertools", "json", "math", "operator", "pathlib", "re", "sys", "types"),
    *("typing", "warnings"),
}


def imports(path):
    """Full names of the modules a file imports, with what is taken from them."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)


def files(package):
    return sorted((ROOT / package).rglob("*.py"))


def room(name):
    """`dsv41_jax.layers.moe.gate` stands in room `layers`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def floor(name):
    return FLOORS.get(room(name), TOP)


def model_imports():
    for path in files("dsv41_jax"):
        if path == ROOT / "dsv41_jax" / "__init__.py":
            continue  # re-exports from every floor
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for imported in set(imports(path)):
            yield name, imported


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_downwards(package):
    assert files(package)
    bad = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files(package)
        for name in {imported.split(".")[0] for imported in imports(path)}
        if name in PACKAGES and name not in PACKAGES[package] | {package}
    ]
    assert not bad, bad


def test_floors_of_the_model_import_downwards():
    bad = [
        f"{name} (floor {floor(name)}) imports {imported} (floor {floor(imported)})"
        for name, imported in model_imports()
        if imported.startswith("dsv41_jax.") and floor(imported) > floor(name)
    ]
    assert not bad, bad


def test_model_modules_do_not_import_the_package_front():
    bad = [
        f"{name} imports {imported}"
        for name, imported in model_imports()
        if imported == "dsv41_jax"
        or (imported.count(".") == 1 and imported.startswith("dsv41_jax.") and not exists(imported))
    ]
    assert not bad, bad


def exists(name):
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def test_lowest_floor_uses_the_standard_library_only():
    bad = [
        f"{name} imports {imported}"
        for name, imported in model_imports()
        if floor(name) == STANDARD_ONLY and imported.split(".")[0] not in STANDARD | {"dsv41_jax"}
    ]
    assert not bad, bad


def test_kernels_know_arrays_only():
    allowed = STANDARD | KERNEL_LIBRARIES | {"pallas_kernels"}
    bad = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files("pallas_kernels")
        for name in imports(path)
        if name.split(".")[0] not in allowed
    ]
    assert not bad, bad


def test_every_module_has_a_floor():
    modules = {path.stem for path in (ROOT / "dsv41_jax").glob("*.py")}
    folders = {path.parent.name for path in (ROOT / "dsv41_jax").glob("*/__init__.py")}
    unlisted = (modules | folders) - set(FLOORS) - {"__init__", "__main__"}
    assert not unlisted, f"give these modules a floor: {sorted(unlisted)}"


def test_project_has_no_other_top_level_packages():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(PACKAGES)

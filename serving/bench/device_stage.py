"""A stage of full-size layers on one device: its decode step, timed and traced."""

import functools
import pathlib
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dsv41_jax.axes import Partition
from dsv41_jax.config import ModelConfig
from dsv41_jax.forward import COMPILER_OPTIONS
from dsv41_jax.layer_plan import layer_spec
from dsv41_jax.model import Stage
from serving.bench.device_arrays import Step, random_batch, random_caches, random_parameters
from serving.bench.device_layers import kind_of, layer_work, on_mesh, one_device_mesh
from serving.bench.device_ops import speed
from serving.bench.device_setting import Setting
from serving.bench.device_tasks import Facts, Measure, Task, median_seconds
from sharding.rules import abstract_parameters

PART = "stage"
TRACE = "trace"  # folder of the profile, beside the report
_STEPS = 10  # dispatched before one is waited for
_SPARE = 0.85  # of the device's memory, for parameters and caches
_LARGEST = 12  # kernels that the report lists
_PALLAS = re.compile(r'/(\w+)/pallas_call"')


def stage_task(
    config: ModelConfig,
    setting: Setting,
    step: Step,
    *,
    tensor: int,
    layers: int,
    out: pathlib.Path,
) -> Task:
    """The first layers of the model in one program.

    Args:
      config: the model.
      setting: the device.
      step: to time and trace.
      tensor: the shapes are those of one of so many devices.
      layers: at most so many, from the first on; fewer where the device has less memory.
      out: folder of the report.
    """
    return Task(
        part=PART,
        name=f"stage of up to {layers} layers, tp{tensor}, {step.name}",
        priority=2,
        prepare=functools.partial(_prepare, config, setting, step, tensor, layers, out),
        guess=75.0,
    )


def layers_that_fit(stage: Stage, setting: Setting, step: Step) -> int:
    """How many of a stage's layers the device's memory holds, with their caches.

    Raises:
      ValueError: not even one.
    """
    stats = setting.device.memory_stats() if setting.measures else None
    if stats is None or "bytes_limit" not in stats:
        return len(stage.layers)
    abstract = abstract_parameters(stage, one_device_mesh(setting.device))
    free, count = _SPARE * stats["bytes_limit"] - _nbytes(abstract.get("embed")), 0
    for layer in stage.layers:
        own = range(layer, layer + 1)
        make = functools.partial(
            random_caches, stage.config, own, step=step, seed=0, replicas=False
        )
        free -= _nbytes(abstract[f"layers_{layer}"]) + _nbytes(jax.eval_shape(make))
        if free < 0:
            break
        count += 1
    if not count:
        raise ValueError(
            f"a layer with its caches does not fit {stats['bytes_limit']} bytes of "
            f"{setting.device.device_kind}: choose a larger --tensor-parallel-size"
        )
    return count


def _nbytes(tree: Any) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def _prepare(
    config: ModelConfig,
    setting: Setting,
    step: Step,
    tensor: int,
    layers: int,
    out: pathlib.Path,
) -> Measure:
    mesh = one_device_mesh(setting.device)
    partition, how = Partition(tensor=tensor), setting.layer_implementation
    asked = Stage(config, range(layers), partition, how)
    stage = Stage(config, range(layers_that_fit(asked, setting, step)), partition, how)
    abstract = abstract_parameters(stage, mesh)

    def run(params: Any, state: Any, batch: Any) -> Any:
        result = stage(params, state, batch)
        return result.stream, result.state

    def caches() -> Any:
        return random_caches(config, stage.layers, step=step, seed=setting.seed, replicas=False)

    batch = jax.tree.map(jnp.asarray, random_batch(config, stage.layers, step, setting.seed))
    program = jax.jit(on_mesh(run, mesh), donate_argnums=1, compiler_options=COMPILER_OPTIONS)
    compiled = program.lower(abstract, jax.eval_shape(caches), batch).compile()
    kernels = set(_PALLAS.findall(compiled.as_text()))

    def measure() -> list[Facts]:
        params: dict[str, Any] = {
            name: random_parameters(shapes, setting.seed + number)
            for number, (name, shapes) in enumerate(abstract.items())
        }
        held = [caches()]

        def several(count: int) -> Any:
            for _ in range(count):
                stream, held[0] = compiled(params, held[0], batch)
            return stream

        stream = jax.block_until_ready(several(1))
        facts: Facts = {
            "layers": len(stage.layers),
            "kinds": [kind_of(layer_spec(config, layer)) for layer in stage.layers],
            "tensor": tensor,
            "step": step.name,
            "parameter_bytes": _nbytes(abstract),
            "ok": bool(jnp.all(jnp.isfinite(stream.x[: step.tokens].astype(jnp.float32)))),
        }
        if setting.measures:
            seconds = median_seconds(lambda: several(_STEPS)) / _STEPS
            facts |= speed(setting, seconds, *layer_work(config, stage, step, None))
        profile = save_profile(lambda: jax.block_until_ready(several(1)), out / TRACE)
        facts["trace"] = TRACE
        if setting.measures:
            facts |= kernel_share(profile.planes, kernels)
        return [facts]

    return measure


def save_profile(run: Callable[[], Any], folder: pathlib.Path) -> jax.profiler.ProfileData:
    """Profiles a call; the profile's files, one of them for Perfetto, go right into `folder`."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as nested:
        with jax.profiler.trace(nested):
            run()
        files = [file for file in pathlib.Path(nested).rglob("*") if file.is_file()]
        saved = [file.replace(folder / file.name) for file in files]
    profile = next(file for file in saved if file.name.endswith(".xplane.pb"))
    return jax.profiler.ProfileData.from_file(str(profile))


def kernel_share(planes: Iterable[Any], kernels: Sequence[str] | set[str]) -> Facts:
    """What the device did in a profile, by kernel.

    Args:
      planes: of `jax.profiler.ProfileData`.
      kernels: names of those written by hand; variants of one end in `__1`, `__2`.

    Returns:
      Seconds that the device was busy, the share of the handwritten kernels in them, and the
      largest kernels with seconds and launches.
    """
    seconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for plane in planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue  # what others derive from the streams
            for event in line.events:
                name = re.sub(r"__\d+$", "", event.name)
                seconds[name] += event.duration_ns / 1e9
                launches[name] += 1
    total = sum(seconds.values())
    own = sum(time for name, time in seconds.items() if name in kernels)
    return {
        "busy_seconds": total,
        "kernel_share": own / total if total else None,
        "launches": sum(launches.values()),
        "largest": [
            {
                "name": name,
                "seconds": time,
                "launches": launches[name],
                "pallas": name in kernels,
            }
            for name, time in seconds.most_common(_LARGEST)
        ],
    }

"""From options to an engine that is ready, or one clear reason why not."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax

from dsv41_jax.checkpoint import (
    CheckpointError,
    component_sizes,
    load_params,
    open_checkpoint,
)
from dsv41_jax.config import ConfigError, ModelConfig
from dsv41_jax.hf_config import RELEASED, load_config
from dsv41_jax.sampling import LogitChanges
from pallas_kernels.dispatch import KernelError
from serving.async_engine import AsyncEngine
from serving.config import DEFAULT_CONTEXT, EngineOptions
from serving.default_model import default_model
from serving.engine import Engine, StepRunner
from serving.hosts import Follower, Leader, LeaderRunner
from serving.logit_rules import empty_changes
from serving.pipeline_runner import PipelineRunner
from serving.runner import Runner, token_buckets
from serving.tokenizer import Tokenizer, TokenizerError
from sharding.cache_sizes import CacheBudgetError, CacheSizes
from sharding.distributed import PlanMismatchError, agree, plan_digest
from sharding.fit import FitError, Workload, check_devices, offload_news
from sharding.hosts import (
    check_processes,
    connect,
    on_one_process,
    own_devices,
    stage_devices,
)
from sharding.limits import EngineLimits, engine_limits
from sharding.memory import plan_stage_caches, stage_cache_bytes
from sharding.mesh import provide_cpu_devices, stage_meshes
from sharding.pipeline import build_pipeline
from sharding.stage_plan import PartitionError

RANDOM_NAME = "dsv41-tiny-random"
Say = Callable[[str], None]
_LEFT_ALONE = {"draft": "speculative decoding", "vision": "image input"}


class StartupError(Exception):
    """The server cannot start; the message is one line.

    Attributes:
      status: exit status of the process.
    """

    status = 3


class DoesNotFitError(StartupError):
    """The devices cannot hold the model and its caches."""

    status = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serving:
    """A model that is ready to serve."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    config: ModelConfig
    max_model_len: int
    cache_info: Mapping[str, int]
    name: str
    root: str


def _model_directory(model: Path | None, say: Say) -> Path:
    if model is None:
        try:
            path = default_model()
        except OSError as error:
            raise StartupError(f"the tiny random model cannot be written: {error}") from error
        say(f"no --model given: serving a tiny model with RANDOM weights from {path}")
        return path
    if str(model) == RELEASED and not model.exists():
        raise StartupError(
            f"--model {RELEASED} is the published configuration without weights; give the "
            "directory of a checkpoint"
        )
    if not model.exists():
        raise StartupError(f"--model {model} does not exist; give the directory of a checkpoint")
    if not model.is_dir():
        raise StartupError(f"--model {model} is not a directory; give that of a checkpoint")
    return model


def _say_what_is_left_alone(path: Path, config: ModelConfig, say: Say) -> None:
    sizes = component_sizes(open_checkpoint(path, config), config)
    for component, use in _LEFT_ALONE.items():
        if component in sizes:
            size = sizes[component]
            say(
                f"the checkpoint has {size.tensors} {component} tensors ({size.nbytes / 1e6:.1f} "
                f"MB), which are left alone: this server has no {use}"
            )


def _one_device(
    path: Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    options: EngineOptions,
    limits: EngineLimits,
    sizes: CacheSizes,
) -> Runner:
    placement = options.placement
    params = load_params(path, config, embedding=placement.embedding == "device")
    engram = None
    if config.engram is not None:
        (mesh,) = stage_meshes(1, 1)
        engram = placement.open_engram(path, config, mesh, tokenizer=tokenizer.backend)
    return Runner(
        config,
        params,
        engram,
        embedding=placement.open_embedding(path, config),
        limits=limits,
        cache_sizes=sizes,
        token_buckets=token_buckets(limits, jax.default_backend()),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loaded:
    """A model whose steps are compiled."""

    path: Path
    runner: StepRunner
    config: ModelConfig
    tokenizer: Tokenizer
    microbatches: int


def _load(path: Path, options: EngineOptions, say: Say, processes: int) -> _Loaded:
    config = load_config(path)
    plan = options.partition.stage_plan(config)
    tensor = options.partition.tensor_plan(config)
    if processes == 1:
        provide_cpu_devices(len(plan.stages) * tensor.devices)
    tokenizer = Tokenizer.open(path)
    _say_what_is_left_alone(path, config, say)
    max_model_len = options.max_model_len or min(config.max_position_embeddings, DEFAULT_CONTEXT)
    limits = engine_limits(
        config,
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
    sizes = plan_stage_caches(config, plan, limits, options.kv_cache_memory_bytes)
    stages = [stage_cache_bytes(config, stage, limits.page_size) for stage in plan.stages]
    say(
        f"caches: {sum(map(sizes.total_bytes, stages)) / 2**20:.1f} MiB for "
        f"{limits.max_num_seqs} requests of up to {limits.max_model_len} tokens"
    )
    workload = Workload(
        config=config,
        plan=plan,
        tensor=tensor,
        microbatches=options.partition.microbatches(plan),
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        placement=options.placement,
    )
    if processes > 1:
        _check_processes(workload, options, limits, processes)
    devices = own_devices(jax.devices()[: workload.devices])
    check_devices(workload, devices)
    for line in offload_news(workload, devices):
        say(line)
    if workload.devices == 1 and not options.placement.cpu_offload_bytes:
        runner = _one_device(path, config, tokenizer, options, limits, sizes)
    else:
        microbatches = workload.microbatches
        say(
            f"partition: stages of {','.join(map(str, plan.counts))} layers, {tensor.devices} "
            f"devices each, {microbatches} microbatches"
        )
        pipeline = build_pipeline(
            path,
            plan,
            tensor,
            microbatches=microbatches,
            devices=stage_devices(),
            placement=options.placement,
        )
        runner = PipelineRunner(
            pipeline,
            limits=limits,
            cache_sizes=sizes,
            token_buckets=token_buckets(limits, jax.default_backend()),
        )
    say(f"compiling steps of up to {limits.max_num_batched_tokens} tokens ...")
    began = time.monotonic()
    runner.compile_all()
    say(f"compiled in {time.monotonic() - began:.1f} s")
    return _Loaded(
        path=path,
        runner=runner,
        config=config,
        tokenizer=tokenizer,
        microbatches=workload.microbatches,
    )


def _check_processes(
    workload: Workload, options: EngineOptions, limits: EngineLimits, processes: int
) -> None:
    """Compares the processes' plans, and refuses what is not run on several of them."""
    sizes = dataclasses.asdict(limits) | {
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
        "microbatches": workload.microbatches,
        "embedding": options.placement.embedding,
        "cpu_offload_bytes": options.placement.cpu_offload_bytes,
    }
    agree(plan_digest(workload.config, workload.plan, workload.tensor, **sizes))
    devices = workload.tensor.devices
    meshes = stage_meshes(len(workload.plan.stages), devices, stage_devices())
    check_processes(meshes, workload.plan, processes)
    if options.placement.engram == "device" and not all(on_one_process([m]) for m in meshes):
        raise PartitionError(
            "--engram-placement device is not supported where a stage is on several processes; use "
            "mmap or ram"
        )
    connect(meshes)


def _serve(loaded: _Loaded, runner: StepRunner, options: EngineOptions) -> Serving:
    """The engine over a runner."""
    limits, sizes, tokenizer = runner.limits, runner.cache_sizes, loaded.tokenizer
    engine = Engine(
        runner,
        tokenizer.vocabulary,
        prefix_cache=options.prefix_cache,
        prefix_replay=options.prefix_replay,
        decoder_replay=options.decoder_replay,
        microbatches=loaded.microbatches,
    )
    return Serving(
        engine=AsyncEngine(engine),
        tokenizer=tokenizer,
        config=loaded.config,
        max_model_len=limits.max_model_len,
        cache_info={
            "block_size": limits.page_size,
            "num_gpu_blocks": sizes.global_pages,
            "num_window_blocks": sizes.window_pages,
            "enable_prefix_caching": int(options.prefix_cache),
        },
        name=loaded.path.name,
        root=str(loaded.path),
    )


def start(
    model: Path | None, options: EngineOptions, say: Say, leader: Leader | None = None
) -> Serving:
    """Load a model, compile every step and start its engine.

    Args:
      model: checkpoint directory; None for the tiny random model.
      options: the engine's sizes.
      say: takes one line of progress at a time.
      leader: this process, where the server has several.

    Raises:
      StartupError: one line that says what is wrong.
    """
    with _refusals():
        loaded = _load(_model_directory(model, say), options, say, _count(leader))
        runner = loaded.runner
        if leader is not None:
            runner = LeaderRunner(runner, leader.channel)
        serving = _serve(loaded, runner, options)
    return serving if model is not None else dataclasses.replace(serving, name=RANDOM_NAME)


def start_following(
    model: Path | None, options: EngineOptions, say: Say, follower: Follower
) -> tuple[StepRunner, LogitChanges]:
    """Load this process's share of a model and compile every step.

    Args:
      model, options, say: see `start`.
      follower: this process.

    Returns:
      The runner, and the tables of a step that changes no logits.

    Raises:
      StartupError: one line that says what is wrong.
    """
    with _refusals():
        runner = _load(_model_directory(model, say), options, say, _count(follower)).runner
        no_changes = jax.device_put(empty_changes(runner.limits, runner.vocab_size))
    return runner, no_changes


def _count(hosts: Leader | Follower | None) -> int:
    return 1 if hosts is None else hosts.processes.count


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Makes one clear line of whatever keeps the server from starting."""
    try:
        yield
    except (CacheBudgetError, FitError) as error:
        raise DoesNotFitError(str(error)) from error
    except jax.errors.JaxRuntimeError as error:
        line = str(error).splitlines()[0]
        if "RESOURCE_EXHAUSTED" not in line and "out of memory" not in line.lower():
            raise StartupError(f"the devices failed: {line}") from error
        raise DoesNotFitError(
            f"the device ran out of memory: {line}; lower --max-num-seqs, "
            "--max-num-batched-tokens, --max-model-len or --kv-cache-memory-bytes"
        ) from error
    except (
        *(ConfigError, PartitionError, PlanMismatchError),
        *(CheckpointError, TokenizerError, KernelError),
    ) as error:
        raise StartupError(" ".join(str(error).split())) from error
    except (OSError, MemoryError) as error:
        raise StartupError(f"the model cannot be served: {error}") from error

"""`python -m sharding.plan`: stages of a model, what they own, and whether they may be cut so.

Reads a configuration only: no weights, no accelerator, no device buffer. With `--compile` the
stages' programs are compiled for the devices, which need not be there. Exit status 0 when the
partition is fine, 2 for wrong usage, 3 when the partition or the configuration is refused, 4 when
it does not fit the devices.
"""

import argparse
import json
import pathlib
import signal
import sys
from collections.abc import Sequence

import jax

from dsv41_jax.config import ConfigError, ModelConfig
from dsv41_jax.hf_config import load_config
from pallas_kernels.dispatch import KernelError
from sharding.compile_report import compile_facts, compile_fit
from sharding.compiled import ALL_STEPS, SERVER_STEPS, StepKind, named_steps, server_steps
from sharding.deviceless import NoCompilerError, check_compiler
from sharding.fit import DEVICE_KINDS, DeviceKind, Workload, fit_facts, memory_facts, parse_devices
from sharding.memory import stage_offloads
from sharding.options import (
    PartitionOptions,
    add_partition_options,
    byte_size,
    partition_options,
    positive,
)
from sharding.picture import draw
from sharding.placement import add_placement_options, placement_options
from sharding.report import Facts, plan_facts, plan_text, refusal_facts
from sharding.roofline_report import roofline_facts
from sharding.stage_plan import PartitionError, StagePlan, lay_out, ranges_of
from sharding.tensor_plan import TensorPlan

FINE, REFUSED, TOO_LARGE = 0, 3, 4
_COMPILED_FOR = "h100-80"  # where no device is named


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status.

    Raises:
      SystemExit: with status 2 for wrong usage.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    options = partition_options(parser, args)
    if args.max_num_batched_tokens < args.max_num_seqs:
        parser.error(
            f"--max-num-batched-tokens {args.max_num_batched_tokens} is below --max-num-seqs "
            f"{args.max_num_seqs}: a step holds a token of every running request"
        )
    if args.compile is not None:
        if args.cpu_offload_bytes:
            parser.error(
                "--compile cannot be combined with --cpu-offload-gb: without a device the compiler "
                "knows no host memory and would count the experts as the device's"
            )
        try:
            check_compiler()
        except NoCompilerError as error:
            parser.error(f"--compile: {error}")
    try:
        config = load_config(args.model)
    except ConfigError as error:
        facts = {"model": args.model, "legal": False, "error": str(error)}
        return _finish(facts, as_json=args.json)
    plan, tensor, error = _plan(config, options)
    if plan is None:
        facts = refusal_facts(config, options, error or "")
        return _finish({"model": args.model, **facts}, as_json=args.json)
    offload_error = None if tensor is None else _offload_error(args, config, plan, tensor)
    error = "\n".join(filter(None, (error, offload_error))) or None
    facts = plan_facts(config, plan, options, tensor, error=error)
    workload, devices = None, None
    if tensor is not None and offload_error is None:
        workload = _workload(args, config, plan, tensor, options)
        devices = _devices(parser, args.devices, workload)
        facts |= _memory(workload, devices)
        facts["roofline"] = roofline_facts(config, plan, tensor, context=workload.max_model_len)
        if args.compile is not None and error is None and "memory" in facts:
            kinds = _steps(parser, args.compile, workload)
            try:
                facts |= _compiled(workload, kinds, devices, facts)
            except KernelError as problem:
                facts |= {"legal": False, "error": str(problem)}
    if args.picture is not None:
        stages = workload.stages() if workload is not None and "memory" in facts else ()
        picture = draw(config, plan, stages, devices[1].usable if devices else None)
        try:
            args.picture.write_text(picture, encoding="utf-8")
        except OSError as problem:
            parser.error(f"--picture {args.picture} cannot be written: {problem.strerror}")
    return _finish({"model": args.model, **facts}, as_json=args.json)


def _offload_error(
    args: argparse.Namespace, config: ModelConfig, plan: StagePlan, tensor: TensorPlan
) -> str | None:
    """Why the experts cannot be offloaded as asked, or None."""
    try:
        stage_offloads(config, plan, tensor, placement_options(args))
    except PartitionError as error:
        return str(error)
    return None


def _workload(
    args: argparse.Namespace,
    config: ModelConfig,
    plan: StagePlan,
    tensor: TensorPlan,
    options: PartitionOptions,
) -> Workload:
    return Workload(
        config=config,
        plan=plan,
        tensor=tensor,
        microbatches=options.microbatches(plan),
        max_model_len=min(args.max_model_len, config.max_position_embeddings),
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        placement=placement_options(args),
    )


def _devices(
    parser: argparse.ArgumentParser, text: str | None, workload: Workload
) -> tuple[int, DeviceKind] | None:
    try:
        return None if text is None else parse_devices(text, workload.devices)
    except ValueError as error:
        parser.error(f"--devices {error}")


def _memory(workload: Workload, devices: tuple[int, DeviceKind] | None) -> Facts:
    """The facts of memory and fit; a budget that holds no request does not fit."""
    try:
        memory = memory_facts(workload)
    except ConfigError as error:
        return {"fit": {"fits": False, "error": str(error)}}
    if devices is None:
        return {"memory": memory}
    count, kind = devices
    return {"memory": memory, "fit": fit_facts(workload, kind, count)}


def _steps(parser: argparse.ArgumentParser, names: str, workload: Workload) -> list[StepKind]:
    """The steps that `--compile` asks for."""
    if names == SERVER_STEPS:
        return server_steps(workload)
    try:
        return named_steps(workload, ALL_STEPS if names == "all" else names.split(","))
    except ValueError as error:
        parser.error(f"--compile {error}")


def _compiled(
    workload: Workload,
    kinds: Sequence[StepKind],
    devices: tuple[int, DeviceKind] | None,
    facts: Facts,
) -> Facts:
    """The facts of compiled programs; they decide about the fit where devices are named."""
    jax.config.update("jax_platforms", "cpu")  # nothing runs on the devices
    kind = None if devices is None else devices[1]
    compiled = compile_facts(
        workload,
        kinds,
        device=_COMPILED_FOR if kind is None else kind.name,
        implementation="pallas",
        progress=True,
    )
    if kind is None:
        return {"compiled": compiled}
    reason = compile_fit(workload, compiled, kind)
    if reason is None and workload.devices > facts["fit"]["devices"]:
        reason = facts["fit"]["error"]
    return {"compiled": compiled, "fit": facts["fit"] | {"fits": not reason, "error": reason}}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sharding.plan",
        description="Shows the pipeline stages of a model and checks them before anything is built",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR|released",
        help="checkpoint directory, or 'released' for the published configuration",
    )
    add_partition_options(parser)
    sizes = parser.add_argument_group("memory")
    sizes.add_argument(
        "--devices",
        metavar="4xh100-80",
        help=f"whether it fits them; kinds: {', '.join(DEVICE_KINDS)}",
    )
    sizes.add_argument(
        "--kv-cache-memory-bytes",
        type=byte_size,
        metavar="N",
        help="for the caches of a device, such as 4G; what the sizes below need if left out",
    )
    add_placement_options(sizes)
    for name, default, what in (
        ("--max-model-len", 4096, "tokens of a request"),
        ("--max-num-seqs", 16, "requests that run at once"),
        ("--max-num-batched-tokens", 256, "tokens of a step"),
    ):
        sizes.add_argument(
            name, type=positive, default=default, metavar="N", help=f"{what}; %(default)s"
        )
    parser.add_argument(
        "--compile",
        nargs="?",
        const=SERVER_STEPS,
        metavar="STEPS",
        help="compile the stages' programs, no GPU needed (extra cuda12): those of a server, or "
        f"named ones such as decode-4,prefill-512; 'all' is {', '.join(ALL_STEPS)}",
    )
    parser.add_argument(
        "--picture", type=pathlib.Path, metavar="FILE.svg", help="draw layers, stages and sharing"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _plan(
    config: ModelConfig, options: PartitionOptions
) -> tuple[StagePlan | None, TensorPlan | None, str | None]:
    """The plan as far as it can be laid out, and the reason if it is refused."""
    plan, tensor, reasons = None, None, []
    try:
        plan = options.stage_plan(config)
    except PartitionError as error:
        reasons.append(str(error))
        plan = _refused_plan(config, options)
    try:
        tensor = options.tensor_plan(config)
    except PartitionError as error:
        reasons.append(str(error))
    return plan, tensor, "\n".join(reasons) or None


def _refused_plan(config: ModelConfig, options: PartitionOptions) -> StagePlan | None:
    """A partition that is refused, laid out to show why; None where it is no partition."""
    try:
        ranges = ranges_of(options.pipeline_stages or ())
        return lay_out(config, ranges, relay=options.pipeline_relay)
    except PartitionError:
        return None


def _finish(facts: Facts, *, as_json: bool) -> int:
    """Prints the facts; the reason of a refusal goes to the error stream."""
    if as_json:
        print(json.dumps(facts, indent=1))
    elif "stages" in facts:
        print(plan_text(facts))
    if facts["legal"] and facts.get("fit", {"fits": True})["fits"]:
        return FINE
    if facts["legal"]:
        if not as_json:
            print(f"does not fit: {facts['fit']['error']}", file=sys.stderr)
        return TOO_LARGE
    if not as_json:
        print(f"refused: {facts['error']}", file=sys.stderr)
    return REFUSED


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the command quietly
    sys.exit(main())

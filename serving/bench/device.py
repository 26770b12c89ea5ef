"""`python -m serving.bench.device`: parity and times of kernels and layers on one device.

Takes under ten minutes on a GPU and writes a JSON file, a Markdown file and a profile. Where
there is no GPU everything runs at tiny sizes, interpreted, and shows parity alone.
"""

import argparse
import functools
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax

from dsv41_jax.config import ModelConfig
from dsv41_jax.config_checks import ConfigError
from dsv41_jax.hf_config import RELEASED, load_config
from serving.bench import device_layers, device_ops, device_stage
from serving.bench.device_report import as_markdown, show
from serving.bench.device_setting import Setting, describe_setting, find_setting
from serving.bench.device_tasks import Budget, Outcome, Task, run_tasks
from serving.default_model import default_config
from sharding.fit import allow_memory
from sharding.stage_plan import PartitionError
from sharding.tensor_plan import plan_tensor_parallel

NAME = "device_check"  # of the files
_TINY_CONTEXT = 40
_TINY_PREFILL = 20


def say(line: str) -> None:
    """One line of progress."""
    print(line, file=sys.stderr, flush=True)


def _whole(text: str, least: int = 0) -> int:
    value = int(text) if text.isdecimal() and len(text) < 10 else -1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return value


_positive = functools.partial(_whole, least=1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m serving.bench.device",
        description="Checks every kernel against its reference on JAX's first device and times "
        "kernels and full-size layers with random weights. Without a GPU: tiny sizes, "
        "interpreted, parity alone. Exit status: 0 fine, 1 a check failed, 2 wrong usage, "
        "3 refused.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("device-check"),
        metavar="DIR",
        help=f"gets {NAME}.json, {NAME}.md and the profile; %(default)s",
    )
    parser.add_argument(
        "--seconds",
        type=_positive,
        default=540,
        metavar="N",
        help="budget; the least important checks are dropped, and named; %(default)s",
    )
    parser.add_argument(
        "--layers",
        type=_positive,
        metavar="N",
        help="most layers of the stage; half of the model's, as many as fit",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=_positive,
        nargs="+",
        default=[2, 1],
        metavar="N",
        help="shapes of one of N devices, the most important N first; 2 1",
    )
    parser.add_argument(
        "--context",
        type=_positive,
        default=32768,
        metavar="N",
        help="tokens in the caches of each decoding request; %(default)s",
    )
    parser.add_argument(
        "--seed", type=_whole, default=42, metavar="N", help="of all values; %(default)s"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="decode 4 and prefill 512 of the first tensor parallel size alone",
    )
    return parser


class NoDeviceError(RuntimeError):
    """JAX offers no device."""


def _setting(options: argparse.Namespace) -> Setting:
    try:
        return find_setting(options.seed, quick=options.quick)
    except (RuntimeError, AssertionError) as error:  # the latter where a platform has no plugin
        reason = str(error) or "the platform asked for is not there"
        raise NoDeviceError(f"JAX offers no device: {reason}") from None


def _model(setting: Setting) -> ModelConfig:
    return load_config(RELEASED) if setting.measures else default_config()


def _tasks(options: argparse.Namespace, setting: Setting, config: ModelConfig) -> list[Task]:
    tensor = options.tensor_parallel_size[:1] if options.quick else options.tensor_parallel_size
    kinds = list(device_layers.kinds(config))
    if setting.measures:
        steps = device_layers.steps_of(
            context=options.context,
            decode=device_ops.FIRST_ROWS[:1] if options.quick else device_layers.DECODE_ROWS,
            prefill=device_layers.PREFILL_TOKENS,
        )
        layers = min(options.layers or config.num_hidden_layers // 2, config.num_hidden_layers)
    else:
        steps = device_layers.steps_of(context=_TINY_CONTEXT, decode=(4,), prefill=_TINY_PREFILL)
        steps, kinds = (steps[:1], kinds[:1]) if options.quick else (steps, kinds)
        layers = min(options.layers or 1, config.num_hidden_layers)
    decode = next(step for step in steps if step.tokens == device_ops.FIRST_ROWS[0])
    return [
        *device_ops.operation_tasks(setting, tensor=tensor, quick=options.quick),
        *device_layers.layer_tasks(config, setting, steps, tensor=tensor, chosen=kinds),
        device_stage.stage_task(
            config, setting, decode, tensor=tensor[0], layers=layers, out=options.out
        ),
    ]


def make_report(
    options: argparse.Namespace,
    described: dict[str, Any],
    config: ModelConfig,
    outcome: Outcome,
    seconds: float,
) -> dict[str, Any]:
    """Everything that was found, as JSON values."""
    layers = outcome.facts.get(device_layers.PART, [])
    on_gpu = described["platform"] == "gpu"
    return {
        "measurement": on_gpu,
        "device": described,
        "budget": options.seconds,
        "seconds": seconds,
        "context": options.context if on_gpu else _TINY_CONTEXT,
        "operations": outcome.facts.get(device_ops.PART, []),
        "layers": layers,
        "stage": outcome.facts.get(device_stage.PART, []),
        "extrapolated": device_layers.extrapolate(config, layers, stages=2),
        "failed": [{"name": name, "error": error} for name, error in outcome.failed],
        "dropped": outcome.dropped,
    }


def failures(report: dict[str, Any]) -> list[str]:
    """What is wrong, one sentence each."""
    found = [
        f"{facts['operation']} {facts['shape']}: {parity['figure']} is {show(parity['value'])}, "
        f"at most {show(parity['limit'])} is right"
        for facts in report["operations"]
        for parity in facts["parity"]
        if not parity["ok"]
    ]
    found += [
        f"{facts['operation']} {facts['shape']}: the reference fails, {facts['reference_error']}"
        for facts in report["operations"]
        if "reference_error" in facts
    ]
    for part in ("layers", "stage"):
        found += [
            f"{part}, {facts.get('kind', facts['step'])}, {facts['step']}: results are not finite"
            for facts in report[part]
            if not facts["ok"]
        ]
    if report["dropped"] and not any(
        report[p] for p in ("operations", "layers", "stage", "failed")
    ):
        found.append("nothing was checked, as no check fits --seconds: give more")
    return found + [f"{one['name']}: {one['error']}" for one in report["failed"]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the check; returns 0, 1 if something is wrong on the device, or 3 if it cannot run."""
    options = _parser().parse_args(arguments)
    budget = Budget(options.seconds)
    allow_memory()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        setting = _setting(options)
        config, described = _model(setting), describe_setting(setting)
        for size in options.tensor_parallel_size:
            plan_tensor_parallel(config, size)

        def save(outcome: Outcome) -> dict[str, Any]:
            report = make_report(options, described, config, outcome, budget.spent)
            for ending, text in (
                (".json", json.dumps(report, indent=1)),
                (".md", as_markdown(report)),
            ):
                (options.out / f"{NAME}{ending}").write_text(text, encoding="utf-8")
            return report

        save(Outcome(facts={}, failed=[], dropped=[]))
        say(f"{setting.device.device_kind}, {setting.implementation}, {options.seconds} s at most")
        # Kept along the way, so that a check that is cut off leaves what it has found.
        report = save(
            run_tasks(
                _tasks(options, setting, config),
                budget,
                workers=max(1, min(8, (os.cpu_count() or 2) // 2)),
                say=say,
                keep=save,
            )
        )
    except OSError as error:
        name = error.filename or options.out
        print(f"serving.bench.device: {name}: {error.strerror}", file=sys.stderr)
        return 3
    except (ConfigError, PartitionError, NoDeviceError) as error:
        print(f"serving.bench.device: {error}", file=sys.stderr)
        return 3
    print(f"saved {options.out / NAME}.json and .md")
    wrong = failures(report)
    for sentence in wrong:
        print(f"wrong: {sentence}")
    print(
        f"{len(report['operations'])} operations, {len(report['layers'])} layer steps, "
        f"{len(wrong)} wrong, {len(report['dropped'])} dropped, jax {jax.__version__}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

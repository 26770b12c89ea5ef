"""The rooflines of a plan's steps, as plain facts and as a table."""

from typing import Any

from dsv41_jax.config import ModelConfig
from sharding.roofline import CHIPS, Row, active_experts, roofline, step_seconds
from sharding.stage_plan import StagePlan
from sharding.tensor_plan import TensorPlan

Facts = dict[str, Any]

DECODE_REQUESTS = (1, 4, 16, 64)
PREFILL_TOKENS = (512, 2048, 8192)


def roofline_facts(
    config: ModelConfig, plan: StagePlan, tensor: TensorPlan, *, context: int
) -> Facts:
    """The least times of decode and prefill steps, as JSON values.

    Args:
      config: the model.
      plan: its stages.
      tensor: how a stage divides over its devices.
      context: tokens that each decoding request has in the caches; a prefill starts with none.
    """
    steps = [("decode", requests, requests, context) for requests in DECODE_REQUESTS]
    steps += [("prefill", tokens, 1, 0) for tokens in PREFILL_TOKENS]
    return {
        "devices": [vars(chip) for chip in CHIPS],
        "steps": [
            {
                "phase": phase,
                "tokens": tokens,
                "requests": requests,
                "context": before,
                "active_experts": active_experts(config, tokens),
                "stages": [
                    stage_facts(rows)
                    for rows in plan_rooflines(
                        config, plan, tensor, tokens=tokens, requests=requests, context=before
                    )
                ],
            }
            for phase, tokens, requests, before in steps
        ],
    }


def plan_rooflines(
    config: ModelConfig,
    plan: StagePlan,
    tensor: TensorPlan,
    *,
    tokens: int,
    requests: int,
    context: int,
    active: float | None = None,
) -> tuple[tuple[Row, ...], ...]:
    """`roofline` of every stage of a plan; arguments are its."""
    return tuple(
        roofline(
            config,
            stage,
            tensor,
            tokens=tokens,
            requests=requests,
            context=context,
            active=active,
            boundary=boundary,
        )
        for stage, boundary in zip(plan.stages, (*plan.boundaries, None), strict=True)
    )


def stage_facts(rows: tuple[Row, ...]) -> Facts:
    """One stage's step: its totals, and every operation."""
    return {
        "bytes": sum(row.bytes for row in rows),
        "flops": sum(row.flops for row in rows),
        "sent": sum(row.sent for row in rows),
        "seconds": {chip.name: step_seconds(rows, chip) for chip in CHIPS},
        "operations": [
            {
                **vars(row),
                "bytes": row.bytes,
                "seconds": {chip.name: row.seconds(chip) for chip in CHIPS},
                "bound": {chip.name: row.bound(chip) for chip in CHIPS},
            }
            for row in rows
        ],
    }


def roofline_text(facts: Facts) -> list[str]:
    """The facts of `roofline_facts` as lines: a step's stages, and what takes most of each."""
    names = [chip["name"] for chip in facts["devices"]]
    heading = "".join(f"{f'{name} ms':>10}" for name in names)
    context = facts["steps"][0]["context"]
    lines = [
        "Least time of a step by stage and device: what must move and be computed "
        f"(decode after {context} tokens each, prefill of one prompt)",
        f"  step          experts  stage       GB   TFLOP  MB sent{heading}  most of it",
    ]
    for step in facts["steps"]:
        label = f"{step['phase']} {step['tokens']}"
        for number, stage in enumerate(step["stages"]):
            times = "".join(f"{1e3 * stage['seconds'][name]:>10.3f}" for name in names)
            lines.append(
                f"  {label:<13} {step['active_experts']:>7.1f}  {number:>5} "
                f"{stage['bytes'] / 1e9:>8.3f} {stage['flops'] / 1e12:>7.3f} "
                f"{stage['sent'] / 1e6:>8.2f}{times}  {_largest(stage, names[0])}"
            )
    return lines


def _largest(stage: Facts, name: str) -> str:
    """The operations that take most of a stage's time, with their shares of it."""
    ranked = sorted(stage["operations"], key=lambda row: row["seconds"][name], reverse=True)
    total = stage["seconds"][name]
    return ", ".join(f"{row['op']} {row['seconds'][name] / total:.0%}" for row in ranked[:2])

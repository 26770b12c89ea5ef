"""Full-size programs of the released model: what they take, keep, and never make."""

import dataclasses
import functools

import jax
import pytest
from full_size import BUDGET, reference

from sharding.compile_report import compile_fit, compile_text, program_facts
from sharding.compiled import compile_programs, named_steps
from sharding.fit import DEVICE_KINDS, GIB
from sharding.hlo_text import parse
from sharding.kernel_report import SHARED_LIMIT
from sharding.mesh import stage_meshes
from sharding.pipeline import stage_steps
from sharding.program_facts import large_arrays, memory_use
from sharding.rules import abstract_parameters
from sharding.temporaries import step_temporaries

KIND = DEVICE_KINDS["h100-80"]
MOST_TEMPORARIES = {"decode-4": 0.3 * GIB, "prefill-512": 2.2 * GIB}


@functools.cache
def compiled(stage, name):
    """A stage of the reference partition, with the facts that the plan prints."""
    case = reference()
    kinds = named_steps(case, [name])
    (program,) = compile_programs(
        case, kinds, device=KIND.name, implementation="pallas", stages=[stage]
    )
    text = parse(program.compiled.as_text())
    return case, program, text, program_facts(case, program)


FULL_SIZE = [
    pytest.param(1, "decode-4", marks=pytest.mark.cuda12),
    *(
        pytest.param(stage, name, marks=[pytest.mark.cuda12, pytest.mark.full])
        for stage, name in ((0, "decode-4"), (0, "prefill-512"), (1, "prefill-512"))
    ),
]
each_program = pytest.mark.parametrize(("stage", "name"), FULL_SIZE)


@each_program
def test_bytes_are_those_of_the_plan_and_fit_with_the_whole_budget(stage, name):
    case, program, _, _ = compiled(stage, name)
    memory, planned = memory_use(program.compiled), case.stages()[stage]
    assert memory.aliased == planned.caches
    assert memory.arguments == pytest.approx(planned.parameters + planned.caches, rel=0.03)
    assert memory.temporaries < MOST_TEMPORARIES[name]
    assert memory.total == pytest.approx(planned.total, rel=0.03)
    assert memory.total - memory.aliased + BUDGET < KIND.usable


@each_program
def test_temporaries_are_about_those_that_the_plan_estimates(stage, name):
    case, program, _, _ = compiled(stage, name)
    estimate = step_temporaries(
        case.config,
        case.plan.stages[stage],
        case.tensor,
        tokens=program.kind.bucket.tokens,
        positions=case.max_model_len,
        logit_rows=program.kind.bucket.logit_rows,
    )
    assert memory_use(program.compiled).temporaries == pytest.approx(estimate, rel=0.15)


@each_program
def test_no_weight_is_unpacked_to_memory_and_no_token_meets_all_experts(stage, name):
    case, program, text, _ = compiled(stage, name)
    config, tokens = case.config, program.kind.bucket.tokens
    weights = packed_weights(case, stage)
    for made in large_arrays(text, 2**20).values():
        assert tuple(made.shape[-2:]) not in weights or made.shape[0] == tokens, made
        wide = {config.hidden_size, config.moe_intermediate_size, case.tensor.expert_intermediate}
        assert not (config.n_routed_experts in made.shape and wide & set(made.shape)), made
        assert made.bytes < 2**30, made


def packed_weights(case, stage):
    """[outputs, inputs] of the quantized weights of a device."""
    step = stage_steps(case.config, case.plan, case.tensor, "pallas")[stage]
    mesh = stage_meshes(1, 2, jax.devices())[0]
    found = set()
    for path, leaf in jax.tree.leaves_with_path(abstract_parameters(step.stage, mesh)):
        if leaf.dtype.itemsize == 1 and path[-1].key == "weight":
            *_, outputs, inputs = leaf.sharding.shard_shape(leaf.shape)
            found.add((outputs, inputs * (2 if leaf.dtype == "uint8" else 1)))
    return found


@each_program
def test_kernels_keep_registers_and_float32(stage, name):
    _, program, text, facts = compiled(stage, name)
    assert facts["faults"] == []
    names = {kernel.name.split("__")[0] for kernel in program.kernels if kernel.pallas}
    assert {"scaled_matmul", "sparse_attention", "expert_gate_up", "expert_down"} <= names
    assert all(kernel.tf32 == 0 for kernel in program.kernels)
    assert all(kernel.shared_bytes <= SHARED_LIMIT for kernel in program.kernels)
    targets = [i for _, i in text.walk() if i.opcode == "custom-call"]
    assert all(call.kernel for call in targets), {call.attributes[:80] for call in targets}


@each_program
def test_roundings_to_bf16_survive(stage, name):
    # Excess precision removes a rounding between two float32 operations; every layer has some.
    case, _, text, _ = compiled(stage, name)
    kept = 0
    for computation in text.computations.values():
        for instruction in computation.instructions.values():
            chain = [instruction]
            while chain[-1].opcode in ("convert", "bitcast", "broadcast", "slice", "reshape"):
                operand = computation.instructions.get(chain[-1].operands[0])
                if operand is None:
                    break
                chain.append(operand)
            widths = [part.arrays[0].dtype for part in chain[:-1] if part.opcode == "convert"]
            kept += widths[:2] == ["f32", "bf16"] and chain[-1].arrays[0].dtype == "f32"
    assert kept >= len(case.plan.stages[stage].layers)


@each_program
def test_a_step_moves_little_more_than_it_must(stage, name):
    _, program, _, facts = compiled(stage, name)
    moved = facts["moved"]
    if program.kind.decodes:
        assert moved["bytes"] <= 1.25 * moved["least"], moved["operations"][:8]
    assert moved["bytes"] >= moved["least"] * 0.9


@each_program
def test_the_text_names_programs_kernels_and_what_fits(stage, name):
    case, _, _, facts = compiled(stage, name)
    whole = {"device": "H100", "jax": jax.__version__, "implementation": "pallas"}
    whole["programs"] = [facts]
    assert compile_fit(case, whole, KIND) is None
    text = "\n".join(compile_text(whole, KIND.usable))
    assert "fits" in text and "NOT FIT" not in text and "expert_gate_up" in text
    small = dataclasses.replace(KIND, usable=60 * GIB)
    reason = compile_fit(case, whole, small)
    assert f"{name} on stage {stage} needs" in reason
    assert "The largest: routed experts 63.28 GiB" in reason
    assert "No prefill fits" in reason

"""Full-size programs of the released model: what they take, keep, and never make."""

import dataclasses
import functools

import jax
import pytest
from tiny_pipeline import CROSSING, tiny_config

from dsv41_jax.hf_config import load_config
from serving.batch_builder import empty_sampling
from sharding.compile_report import compile_fit, compile_text, program_facts
from sharding.compiled import (
    abstract_arguments,
    compile_programs,
    named_steps,
    server_steps,
)
from sharding.fit import DEVICE_KINDS, GIB, Workload
from sharding.hlo_text import parse
from sharding.kernel_report import SHARED_LIMIT
from sharding.memory import plan_stage_caches
from sharding.mesh import stage_meshes
from sharding.pipeline import stage_steps
from sharding.program_facts import large_arrays, memory_use
from sharding.rules import abstract_parameters, parameter_specs
from sharding.stage_plan import build_stage_plan
from sharding.stage_runner import stage_program
from sharding.tensor_plan import plan_tensor_parallel

KIND = DEVICE_KINDS["h100-80"]
BUDGET = 4 * GIB
MOST_TEMPORARIES = {"decode-4": 0.3 * GIB, "prefill-512": 2.2 * GIB}


def workload(config, stages, *, tensor=1, relay=False, **sizes):
    chosen = {
        "microbatches": len(stages),
        "max_model_len": 4096,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
    }
    return Workload(
        config=config,
        plan=build_stage_plan(config, stages=stages, relay=relay),
        tensor=plan_tensor_parallel(config, tensor),
        **{**chosen, **sizes},
    )


def reference():
    return workload(load_config("released"), (20, 20), tensor=2, kv_cache_memory_bytes=BUDGET)


def test_a_server_compiles_decode_rows_and_the_largest_microbatch():
    case = reference()
    decode, prefill = server_steps(case)
    assert (decode.name, decode.rows, decode.bucket.tokens) == ("decode-4", 4, 16)
    assert (prefill.name, prefill.rows, prefill.bucket.tokens) == ("prefill-256", 256, 256)
    assert prefill.bucket.requests == 4 and prefill.bucket.columns == 256
    small = dataclasses.replace(case, max_num_batched_tokens=16)
    assert [step.name for step in server_steps(small)] == ["decode-4"]


def test_named_steps_are_whole():
    decode, prefill = named_steps(reference(), ["decode-64", "prefill-512"])
    assert (decode.rows, decode.bucket.tokens, decode.bucket.requests) == (64, 64, 64)
    assert (prefill.rows, prefill.bucket.tokens, prefill.bucket.requests) == (512, 512, 4)
    for name in ("decode", "prefill-0", "verify-4", "decode-4 "):
        with pytest.raises(ValueError, match="is no step: name steps such as decode-4"):
            named_steps(reference(), [name])


def shapes(tree):
    return jax.tree.map(lambda a: (tuple(a.shape), str(a.dtype)), tree)


def test_abstract_arguments_are_what_stages_hand_on_and_a_server_passes():
    config = tiny_config()
    sizes = {"max_model_len": 48, "max_num_batched_tokens": 16}
    case = workload(config, CROSSING, relay=True, **sizes)
    caches = plan_stage_caches(config, case.plan, case.limits(), None)
    (kind,) = named_steps(case, ["prefill-16"])
    steps = stage_steps(config, case.plan, case.tensor, "xla")
    sent = None
    for step, mesh in zip(steps, stage_meshes(len(steps), 1, jax.devices()), strict=True):
        stage = step.contents.stage
        arguments = abstract_arguments(
            step,
            mesh,
            kind.bucket,
            sizes=caches,
            before=case.plan.boundaries[stage - 1] if stage else None,
            max_model_len=case.max_model_len,
        )
        assert shapes(arguments[2]) == shapes(sent)
        program = stage_program(step, mesh, parameter_specs(step.stage))
        traced = program.trace(abstract_parameters(step.stage, mesh), *arguments)
        sent, state = traced.out_info
        assert shapes(state) == shapes(arguments[0])
    limits = dataclasses.replace(case.limits(), max_num_batched_tokens=16)
    served = empty_sampling(limits, config.vocab_size)
    rows = kind.bucket.logit_rows
    served = jax.tree.map(lambda a: a[:rows], dataclasses.replace(served, changes=None))
    assert shapes(dataclasses.replace(arguments[3], changes=None)) == shapes(served)
    changes = empty_sampling(limits, config.vocab_size).changes
    assert shapes(arguments[3].changes) == shapes(changes)


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

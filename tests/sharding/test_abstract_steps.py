"""What stages' programs are compiled for: steps, and arguments without arrays."""

import dataclasses

import jax
import pytest
from full_size import reference, workload
from tiny_pipeline import CROSSING, tiny_config

from serving.batch_builder import empty_sampling
from sharding.compiled import abstract_arguments, named_steps, server_steps
from sharding.memory import plan_stage_caches
from sharding.mesh import stage_meshes
from sharding.pipeline import stage_steps
from sharding.rules import abstract_parameters, parameter_specs
from sharding.stage_runner import stage_program


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

"""Bytes, collectives and loops read from a program's text."""

import textwrap

import jax
import jax.numpy as jnp
import pytest

from sharding.hlo_text import Array, parse
from sharding.program_facts import (
    Collective,
    Moved,
    Sizes,
    collectives,
    executed,
    large_arrays,
    memory_use,
    moved_bytes,
)

LAUNCH = 'custom_call_target="__gpu$xla.gpu.triton", backend_config='
SIZES = Sizes(experts=8, active=2, requests=4)
PROGRAM = textwrap.dedent(
    """\
    HloModule jit_step, is_scheduled=true

    %picked (param_0: bf16[1000,64], param_1: s32[16]) -> bf16[16,64] {
      %param_0 = bf16[1000,64]{1,0} parameter(0)
      %param_1 = s32[16]{0} parameter(1)
      %bitcast.1 = s32[16,1]{1,0} bitcast(%param_1)
      ROOT %gather.1 = bf16[16,64]{1,0} gather(%param_0, %bitcast.1), offset_dims={1}
    }

    %stored (param_0: u8[1000,64], param_1: u8[16,64], param_2: s32[16]) -> u8[1000,64] {
      %param_0.1 = u8[1000,64]{1,0} parameter(0)
      %param_1.1 = u8[16,64]{1,0} parameter(1)
      %param_2.1 = s32[16]{0} parameter(2)
      ROOT %scatter.1 = u8[1000,64]{1,0} scatter(%param_0.1, %param_2.1, %param_1.1), to_apply=%w
    }

    %body (arg: (s32[], bf16[16,64])) -> (s32[], bf16[16,64]) {
      %arg = (s32[], bf16[16,64]{1,0}) parameter(0)
      %i = s32[] get-tuple-element(%arg), index=0
      %x = bf16[16,64]{1,0} get-tuple-element(%arg), index=1
      %negate.1 = bf16[16,64]{1,0} negate(%x), metadata={op_name="jit(f)/layer_1/attn/neg"}
      ROOT %tuple.1 = (s32[], bf16[16,64]{1,0}) tuple(%i, %negate.1)
    }

    ENTRY %main (p0: bf16[1000,64], p1: s32[16], p2: u8[1000,64], p3: u8[8,32,64]) -> (f32[32,4]) {
      %p0 = bf16[1000,64]{1,0} parameter(0)
      %p1 = s32[16]{0} parameter(1)
      %p2 = u8[1000,64]{1,0} parameter(2), metadata={op_name="state.window[3]"}
      %p3 = u8[8,32,64]{2,1,0} parameter(3)
      %fusion.1 = bf16[16,64]{1,0} fusion(%p0, %p1), kind=kLoop, calls=%picked
      %rows = u8[16,64]{1,0} custom-call(%fusion.1, %p3, %p1), \
        LAUNCH{ir = "ML name = (x) {", name = "expert_down", num_warps = 4 : i32}
      %fusion.2 = u8[1000,64]{1,0} fusion(%p2, %rows, %p1), kind=kInput, calls=%stored
      %write = (u8[1000,64]{1,0}, u8[1000,2]{1,0}) custom-call(%fusion.2, %p2, %p1, %rows), \
        LAUNCH{name = "write_window"}
      %zero = s32[] constant(0)
      %tuple.2 = (s32[], bf16[16,64]{1,0}) tuple(%zero, %fusion.1)
      %while.1 = (s32[], bf16[16,64]{1,0}) while(%tuple.2), body=%body, \
        backend_config={"known_trip_count":{"n":"5"}}
      %all-gather-start = ((f32[16,4]{1,0}, s32[16]{0}), (f32[32,4]{1,0}, s32[32]{0})) \
        all-gather-start(%pre, /*index=1*/%p1)
      %all-gather-done = (f32[32,4]{1,0}, s32[32]{0}) all-gather-done(%all-gather-start)
      %pre = f32[16,4]{1,0} constant({...})
      ROOT %out = (f32[32,4]{1,0}) tuple(%all-gather-done)
    }
    """
).replace("LAUNCH", LAUNCH)
ROWS = 16 * 64  # elements of the rows that operations pick or write


@pytest.fixture(scope="module")
def program():
    return parse(PROGRAM)


def test_instructions_have_their_shapes_operands_and_kernel(program):
    main = program.computations["main"]
    assert main.root == "out"
    rows = main.instructions["rows"]
    assert rows.arrays == (Array("u8", (16, 64)),)
    assert rows.operands == ("fusion.1", "p3", "p1")
    assert rows.kernel == "expert_down"
    assert main.instructions["fusion.1"].kernel is None
    assert main.instructions["all-gather-start"].operands == ("pre", "p1")
    assert main.instructions["while.1"].trips == 5


def test_loops_run_as_often_as_the_compiler_knows(program):
    times = {instruction.name: times for _, instruction, times in executed(program)}
    assert times["negate.1"] == 5 and times["fusion.1"] == 1
    assert "while.1" not in times


def test_only_what_operations_touch_is_counted(program):
    found = {part.name: part for part in moved_bytes(program, SIZES)}
    scatter_and_gather = 2 * 2 * ROWS + 4 * 16 + 2 * ROWS + 4 * 16
    assert found["fusion"] == Moved(name="fusion", count=2, bytes=scatter_and_gather)
    experts = 8 * 32 * 64 * 2 // 8
    assert found["expert_down"].bytes == ROWS + 2 * ROWS + experts + 4 * 16
    assert found["write_window"].bytes == 16 * (64 + 2) + 4 * 16 + ROWS
    assert found["negate attn/neg"] == Moved(name="negate attn/neg", count=5, bytes=5 * 4 * ROWS)


def test_collectives_count_what_a_device_receives(program):
    received = 32 * 4 * 4 + 32 * 4
    assert collectives(program) == (Collective(kind="all-gather", count=1, bytes=received),)


def test_large_arrays_leave_out_what_is_updated_in_place(program):
    assert large_arrays(program, 1000) == {
        "rows": Array("u8", (16, 64)),
        "fusion.1": Array("bf16", (16, 64)),
        "negate.1": Array("bf16", (16, 64)),
        "write": Array("u8", (1000, 2)),
    }


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="has no ENTRY computation"):
        parse("HloModule nothing")


def test_a_compiled_program_is_read_and_its_donated_argument_aliased():
    def step(state, x):
        return state.at[3].set(x), x * 2

    arguments = (jnp.zeros((128, 64)), jnp.ones(64))
    compiled = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
    memory = memory_use(compiled)
    assert memory.aliased == 4 * 128 * 64
    assert memory.arguments == memory.aliased + 4 * 64
    assert memory.total >= memory.arguments + 4 * 64
    program = parse(compiled.as_text())
    assert 4 * 64 <= sum(part.bytes for part in moved_bytes(program, SIZES)) < memory.aliased

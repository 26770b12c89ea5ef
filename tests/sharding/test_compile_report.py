"""`python -m sharding.plan --compile`: what it asks for, prints, and how it ends."""

import json
from importlib import metadata

import pytest

from pallas_kernels.dispatch import KernelError
from sharding import plan
from sharding.fit import GIB

REFERENCE = (
    *("--model", "released", "--pipeline-stages", "20,20", "--tensor-parallel-size", "2"),
    *("--max-num-seqs", "4", "--kv-cache-memory-bytes", "4G"),
)


def program(stage, kind, temporaries):
    """Facts of a program of the reference partition, as if it were compiled."""
    arguments = 70 * GIB
    return {
        "stage": stage,
        "step": kind.name,
        "rows": kind.rows,
        "bucket": vars(kind.bucket),
        "compile_seconds": 40.0,
        "memory": {
            "arguments": arguments,
            "aliased": GIB,
            "results": GIB,
            "temporaries": temporaries,
            "peak": arguments + temporaries,
            "tables": 0,
            "total": arguments + temporaries,
        },
        "collectives": [{"kind": "all-reduce", "count": 40, "bytes": 13107200}],
        "kernels": [
            {
                "name": f"expert_down__{stage}",
                "pallas": True,
                "launches": 20,
                "registers": 90 + stage,
                "spill_bytes": 0,
                "shared_bytes": 1024,
            }
        ],
        "faults": [],
        "moved": {
            "active_experts": 23.44,
            "bytes": 8 * 10**9,
            "least": 7 * 10**9,
            "operations": [{"name": "expert_down", "count": 20, "bytes": 10**9}],
        },
    }


@pytest.fixture
def compiler(monkeypatch):
    """Takes the compiler's place: 4 MiB of temporaries per token; notes what is asked."""
    asked = {}

    def compile_facts(workload, kinds, **options):
        asked.update(options, kinds=[kind.name for kind in kinds])
        return {
            "device": "a device",
            "implementation": options["implementation"],
            "jax": "0",
            "programs": [
                program(stage, kind, kind.bucket.tokens * 4 * 2**20)
                for stage in range(len(workload.plan.stages))
                for kind in kinds
            ],
        }

    monkeypatch.setattr(plan, "check_compiler", lambda: None)
    monkeypatch.setattr(plan, "compile_facts", compile_facts)
    return asked


def run(capsys, *options):
    status = plan.main([*REFERENCE, *options])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_without_steps_those_of_a_server_are_compiled(capsys, compiler):
    status, out, err = run(capsys, "--compile", "--devices", "4xh100-80")
    assert (status, err) == (0, "")
    assert compiler["kinds"] == ["decode-4", "prefill-128"]
    assert (compiler["device"], compiler["implementation"]) == ("h100-80", "pallas")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "0 decode-4 70.000 1.000 0.062 70.062 70.062 40.0 fits" in lines
    assert "stage 1, prefill-128: 40 all-reduce of 13.11 MB together" in lines
    assert any(line.startswith("stage 0, decode-4: 8000.0 MB with 23.44 active") for line in lines)
    assert "expert_down 80 91 0 1024" in lines


def test_what_does_not_fit_exits_with_four_and_says_what_would(capsys, compiler):
    options = ("--compile", "prefill-512,prefill-8192", "--devices", "4xh100-80")
    status, out, err = run(capsys, *options)
    assert status == 4
    assert "DOES NOT FIT" in out
    assert err.startswith(
        "does not fit: prefill-8192 on stage 0 needs 102.00 GiB on each device, but a h100-80 has "
        "77.60 GiB for arrays: 24.40 GiB short. The largest: routed experts 63.28 GiB, "
        "temporaries 32.00 GiB, expert scales 3.96 GiB"
    )
    assert "The largest prefill that fits is about 1936 tokens in a microbatch" in err
    assert "; prefill-512 is compiled and fits" in err
    status, out, _ = run(capsys, *options, "--json")
    facts = json.loads(out)
    assert status == 4 and facts["fit"]["fits"] is False
    assert [p["step"] for p in facts["compiled"]["programs"]] == ["prefill-512", "prefill-8192"] * 2


def test_devices_that_are_too_few_do_not_fit(capsys, compiler):
    status, _, err = run(capsys, "--compile", "decode-4", "--devices", "2xh100-80")
    assert status == 4 and "needs 4 devices, but 2 are given" in err


def test_all_is_every_step(capsys, compiler):
    status, _, _ = run(capsys, "--compile", "all")
    assert status == 0
    assert compiler["kinds"] == [
        *("decode-1", "decode-4", "decode-16", "decode-64"),
        *("prefill-512", "prefill-2048", "prefill-8192"),
    ]


def test_a_refused_partition_is_not_compiled(capsys, compiler):
    status = plan.main(["--model", "released", "--pipeline-stages", "10,30", "--compile"])
    assert status == 3 and not compiler


def test_wrong_steps_are_wrong_usage(capsys, compiler):
    with pytest.raises(SystemExit) as caught:
        run(capsys, "--compile", "decode-x")
    assert caught.value.code == 2
    assert "--compile 'decode-x' is no step" in capsys.readouterr().err


def test_without_the_compiler_the_command_says_how_to_get_it(capsys, monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(SystemExit) as caught:
        run(capsys, "--compile")
    assert caught.value.code == 2
    assert "needs the cuda12 extra, which is not installed" in capsys.readouterr().err


def test_a_size_that_kernels_cannot_take_is_refused_in_a_sentence(capsys, compiler, monkeypatch):
    def compile_facts(*_, **options):
        raise KernelError("the stream has 3 copies; the kernels take a power of two")

    monkeypatch.setattr(plan, "compile_facts", compile_facts)
    status, _, err = run(capsys, "--compile", "--devices", "4xh100-80")
    assert status == 3
    assert err == "refused: the stream has 3 copies; the kernels take a power of two\n"

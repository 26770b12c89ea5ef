"""Two processes on one host: the same plan, each its own half; another plan is refused."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

from dsv41_jax.hf_config import load_config
from sharding.distributed import main, plan_digest
from sharding.stage_plan import build_stage_plan
from sharding.tensor_plan import plan_tensor_parallel

ROOT = pathlib.Path(__file__).parents[2]
TINY = ROOT / "tests" / "golden" / "tiny_a"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_two(*options):
    """Exit status and output of both processes; `options` are each one's partition."""
    address = f"127.0.0.1:{free_port()}"
    started = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "sharding.distributed", str(TINY)),
                *("--coordinator", address, "--processes", "2", "--process", str(i)),
                *partition,
            ],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, partition in enumerate(options)
    ]
    results = [process.communicate(timeout=240) for process in started]
    return [(p.returncode, *result) for p, result in zip(started, results, strict=True)]


def loaded(result):
    status, out, err = result
    assert status == 0, err
    return int(out.split()[-2])


def test_two_processes_load_a_half_each():
    halves = ("--tensor-parallel-size", "2")
    first, second = map(loaded, run_two(halves, halves))
    whole = ("--pipeline-stages", "5,4")
    before, after = map(loaded, run_two(whole, whole))
    assert first == second
    assert before + after > first > (before + after) / 2  # some parameters are on both


def test_another_plan_is_refused_with_both_digests():
    config = load_config(TINY)
    tensor = plan_tensor_parallel(config, 1)
    digests = [
        plan_digest(config, build_stage_plan(config, stages=stages), tensor)[:16]
        for stages in ((5, 4), (4, 5))
    ]
    for status, _, err in run_two(("--pipeline-stages", "5,4"), ("--pipeline-stages", "4,5")):
        assert status == 3
        assert f"process 1 has plan {digests[1]}, but process 0 has {digests[0]}" in err


def test_options_belong_together(capsys):
    with pytest.raises(SystemExit) as caught:
        main([str(TINY), "--process", "1"])
    assert caught.value.code == 2
    assert "belong together" in capsys.readouterr().err

"""One server of two processes that share every layer, used by the openai client."""

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import queue
import re
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import openai
import pytest

from dsv41_jax.checkpoint.synthetic import make_checkpoint
from dsv41_jax.checkpoint.tiny_tokenizer import write_tiny_tokenizer
from dsv41_jax.hf_config import load_config
from serving.default_model import default_config
from serving.main import main
from sharding.hosts import check_processes
from sharding.pipeline import build_pipeline
from sharding.stage_plan import PartitionError, build_stage_plan
from sharding.tensor_plan import plan_tensor_parallel

ROOT = pathlib.Path(__file__).parents[2]
PROMPT = list(range(5, 45))
SIZES = ("--max-model-len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "32")
HALVES = ("--tensor-parallel-size", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two layers: a window with an Engram, and a source of ratio 1."""
    directory = tmp_path_factory.mktemp("model")
    config = default_config()
    config = dataclasses.replace(
        config,
        num_hidden_layers=2,
        hidden_size=64,
        sliding_window=8,
        compress_ratios=(0, 1),
        kv_source_layer_ids=(1,),
        index_source_layer_ids=(1,),
        candidate_source_layer_id=-1,
        candidate_topk_blocks=0,
        index_topk=6,
        hc_mult=2,
        hc_sinkhorn_iters=2,
        engram=dataclasses.replace(config.engram, layer_ids=(1,), num_embeddings=(3144,)),
    )
    make_checkpoint(directory, config, seed=3)
    write_tiny_tokenizer(directory, 8192)
    return directory


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def started(model, *options, devices=1):
    """Both processes, each with its options and a number of devices."""
    address = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "serving.main", "--model", str(model), "--port", "0"),
                *("--served-model-name", "tiny", *SIZES),
                *("--coordinator", address, "--processes", "2", "--process", str(index), *own),
            ],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index, own in enumerate(options)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ends(processes):
    """Exit status and last line of errors, of both."""
    results = [process.communicate(timeout=240) for process in processes]
    return [
        (process.returncode, err.strip().splitlines()[-1])
        for process, (_, err) in zip(processes, results, strict=True)
    ]


@contextlib.contextmanager
def served(model, *partition, devices):
    """Both processes, and a client once they serve."""
    with started(model, partition, partition, devices=devices) as processes:
        lines = queue.SimpleQueue()

        def read():
            for line in processes[0].stdout:
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        while not (line := lines.get(timeout=500)).startswith("ready"):
            assert line, processes[0].stderr.read()
        url = re.match(r"ready: (\S+) ", line)[1]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            yield processes, client


def complete(client, prompt, tokens, *, extra=None, **options):
    answer = client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=tokens,
        temperature=options.pop("temperature", 0),
        logprobs=1,
        extra_body={"ignore_eos": True, "return_tokens_as_token_ids": True, **(extra or {})},
        **options,
    )
    return [int(t.removeprefix("token_id:")) for t in answer.choices[0].logprobs.tokens]


def check_tokens(client, model, stages, tensor):
    """The server's tokens are those of the same partition in one process."""
    config = load_config(model)
    pipeline = build_pipeline(
        model,
        build_stage_plan(config, stages=stages),
        plan_tensor_parallel(config, tensor),
        progress=False,
    )
    expected = pipeline.generate(PROMPT, max_new_tokens=12)
    drawn = pipeline.generate(PROMPT[:3], max_new_tokens=8, temperature=1.0, seed=5)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        greedy = pool.submit(complete, client, PROMPT, 12)
        sampled = pool.submit(complete, client, PROMPT[:3], 8, temperature=1.0, seed=5)
        assert greedy.result() == expected and sampled.result() == drawn


def test_one_stage_on_two_processes_that_one_leaves(model):
    with served(model, *HALVES, devices=1) as ((leader, follower), client):
        check_tokens(client, model, (2,), 2)
        # Changes of logits reach all processes.
        assert complete(client, PROMPT[:3], 4, logit_bias={"17": 100}) == [17] * 4
        chosen = {"structured_outputs": {"choice": ["hello world"]}}
        answer = client.completions.create(
            model="tiny", prompt="x", max_tokens=20, extra_body=chosen
        )
        assert answer.choices[0].text == "hello world"

        stream = client.completions.create(
            model="tiny", prompt="x", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        follower.send_signal(signal.SIGKILL)
        with pytest.raises(openai.APIError):
            for _ in stream:
                pass
        assert leader.wait(60) == 1
        assert "process 1 has failed: its connection is lost" in leader.stderr.read()


@pytest.mark.full
def test_two_stages_on_a_process_each_that_end_together(model):
    partition = ("--pipeline-stages", "1,1", *HALVES)
    with served(model, *partition, devices=2) as ((leader, follower), client):
        check_tokens(client, model, (1, 1), 2)
        follower.send_signal(signal.SIGTERM)  # asks process 0 to end the server
        assert leader.wait(60) == 0 and follower.wait(60) == 0


def test_processes_with_other_sizes_are_refused_with_both_digests(model):
    with started(model, HALVES, (*HALVES, "--max-num-seqs", "3")) as processes:
        results = ends(processes)
    assert [status for status, _ in results] == [3, 3]
    assert all(re.search("process 1 has plan [0-9a-f]+, but process 0", e) for _, e in results)


def test_what_a_follower_lacks_is_named_by_both(model, tmp_path):
    with started(model, HALVES, (*HALVES, "--model", str(tmp_path / "gone"))) as processes:
        results = ends(processes)
    assert [status for status, _ in results] == [3, 3]
    assert results[0][1].startswith("serving.main: process 1 has failed: --model ")
    assert "does not exist" in results[0][1] and "does not exist" in results[1][1]


@dataclasses.dataclass
class Device:
    process_index: int


class Devices:
    """As much of a mesh as is asked for."""

    def __init__(self, *processes):
        self.devices = np.array([Device(index) for index in processes])
        self.size = len(processes)


def test_every_process_must_have_a_device_of_the_partition():
    plan = build_stage_plan(default_config())
    check_processes([Devices(0, 1)], plan, 2)
    with pytest.raises(PartitionError, match="has 2 devices, and none of process 1's"):
        check_processes([Devices(0, 0)], plan, 2)


def test_no_relay_between_processes():
    config = default_config()
    meshes = [Devices(1, 1), Devices(0, 0)]
    check_processes(meshes, build_stage_plan(config, stages=(4, 4)), 2)
    relay = build_stage_plan(config, stages=(5, 3), relay=True)
    with pytest.raises(PartitionError, match=r"stage 0 to 1 would pass from processes \[1\] to"):
        check_processes(meshes, relay, 2)
    check_processes([Devices(0), Devices(0)], relay, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--process", "1"], "--coordinator is missing"),
        (["--coordinator", "h:1", "--processes", "2", "--process", "2"], "--process=2 must be"),
    ],
)
def test_wrong_options_are_named(options, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(options)
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_a_launcher_that_says_too_little_is_named(monkeypatch, capsys):
    monkeypatch.setenv("LWS_WORKER_INDEX", "1")
    assert main(["--distributed"]) == 3
    assert "LWS_WORKER_INDEX is set but LWS_GROUP_SIZE is not" in capsys.readouterr().err

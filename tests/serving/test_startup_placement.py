"""What the server checks and places before it loads: device memory and Engram tables."""

import os
import pathlib

import pytest

import serving.main
from pallas_kernels.dispatch import KernelError
from serving import startup
from serving.config import parse_options
from serving.hosts import HostsError
from serving.main import main
from sharding.fit import FitError
from sharding.placement import TablePlacement

TINY = pathlib.Path(__file__).parents[1] / "golden" / "tiny_a"


def test_model_that_does_not_fit_ends_with_four_before_it_is_loaded(monkeypatch, capsys):
    def refuse(workload, devices):
        assert workload.config.num_hidden_layers == 9 and len(devices) == 1
        raise FitError("stage 0 needs 9 GiB on each device")

    monkeypatch.setattr(startup, "check_devices", refuse)
    monkeypatch.setattr(startup, "load_params", None)
    assert main(["--model", str(TINY), "--port", "0"]) == 4
    assert "serving.main: stage 0 needs 9 GiB on each device\n" in capsys.readouterr().err


def test_the_check_before_loading_counts_tables_that_go_to_the_devices(monkeypatch, capsys):
    def refuse(workload, devices):
        (stage,) = workload.stages()
        assert stage.engram == sum(workload.config.engram.num_embeddings) * 33
        raise FitError("stage 0 needs 9 GiB on each device. The largest: Engram tables 8 GiB")

    monkeypatch.setattr(startup, "check_devices", refuse)
    monkeypatch.setattr(startup, "load_params", None)
    arguments = ["--model", str(TINY), "--port", "0", "--engram-placement", "device"]
    assert main(arguments) == 4
    assert "The largest: Engram tables 8 GiB" in capsys.readouterr().err


def test_a_size_that_kernels_cannot_take_ends_with_three_in_a_sentence(monkeypatch, capsys):
    def load(*_, **options):
        raise KernelError("the stream has 3 copies; the kernels take a power of two")

    monkeypatch.setattr(startup, "load_params", load)
    assert main(["--model", str(TINY), "--port", "0"]) == 3
    assert "serving.main: the stream has 3 copies" in capsys.readouterr().err


def test_pinned_memory_is_allowed_before_processes_join(monkeypatch):
    name, seen = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", []

    def join(*_, **options):
        seen.append(os.environ.get(name))
        raise HostsError("no")

    monkeypatch.setenv(name, "1")
    monkeypatch.delenv(name)
    monkeypatch.setattr(serving.main, "join", join)
    processes = ["--coordinator", "localhost:1", "--processes", "2", "--process", "0"]
    sizes = ["--tensor-parallel-size", "2", "--pipeline-stages", "2,7"]
    for options in ([], ["--cpu-offload-gb", "100", *sizes]):
        assert main(["--model", str(TINY), *processes, *options]) == 3
    assert seen == [None, "464"]


def test_memory_of_the_devices_is_allowed_before_processes_join(monkeypatch):
    name, seen = "XLA_PYTHON_CLIENT_MEM_FRACTION", []

    def join(*_, **options):
        seen.append(os.environ.get(name))
        raise HostsError("no")

    monkeypatch.setattr(serving.main, "join", join)
    arguments = ["--coordinator", "localhost:1", "--processes", "2", "--process", "0"]
    monkeypatch.setenv(name, "0.5")
    assert main(["--model", str(TINY), *arguments]) == 3
    monkeypatch.delenv(name)
    assert main(["--model", str(TINY), *arguments]) == 3
    assert seen == ["0.5", "0.95"]


def test_engram_options_are_read():
    options = parse_options(["--engram-placement", "ram", "--engram-prefault"]).engine
    assert options.placement == TablePlacement(engram="ram", engram_prefault=True)
    options = parse_options(["--engram-placement", "device", "--embedding-placement", "host"])
    assert options.engine.placement == TablePlacement(engram="device", embedding="host")
    with pytest.raises(SystemExit):
        parse_options(["--engram-placement", "disk"])


def test_host_memory_for_experts_is_given_in_gib_per_device():
    assert parse_options([]).engine.placement.cpu_offload_bytes == 0
    options = parse_options(["--cpu-offload-gb", "1.5"]).engine
    assert options.placement == TablePlacement(cpu_offload_bytes=3 * 2**29)
    with pytest.raises(SystemExit):
        parse_options(["--cpu-offload-gb", "much"])


def test_host_memory_that_saves_nothing_ends_with_three_before_anything_is_loaded(
    monkeypatch, capsys
):
    monkeypatch.setattr(startup, "build_pipeline", None)
    arguments = ["--model", str(TINY), "--port", "0", "--cpu-offload-gb", "0.00001"]
    assert main(arguments) == 3
    assert "serving.main: --cpu-offload-gb 1e-05 holds no layer's" in capsys.readouterr().err

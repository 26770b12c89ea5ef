import dataclasses
import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul, rms_norm, scaled_matmul
from pallas_kernels.packed_rows import PackedRows
from serving.bench import device, device_layers, device_ops, device_setting, device_stage
from serving.bench.device_parity import compare
from serving.bench.device_report import as_markdown
from serving.bench.device_tasks import Budget, Task, repeat, run_tasks
from serving.default_model import default_config
from sharding.roofline import CHIPS

OPERATIONS = {
    *("scaled_matmul", "grouped_matmul", "sparse_attention", "kv_write"),
    *("index_topk.scores", "index_topk.topk", "index_topk.candidates"),
    *("hyper_connections.mixes", "hyper_connections.collapse_norm", "hyper_connections.expand"),
    *("dense_matmul", "rms_norm"),
}
BUDGET = 1000
SPEED = {
    **{"seconds": 2e-6, "bytes": 4.8e6, "flops": 1e3, "bytes_per_second": 2.4e12},
    **{"bound_seconds": 1e-6, "bandwidth_share": 0.5, "bound_share": 0.5},
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """A quick check of the processor at hand: exit status, folder and report."""
    folder = tmp_path_factory.mktemp("device")
    status = device.main(["--quick", "--out", str(folder), "--seconds", str(BUDGET)])
    return status, folder, json.loads((folder / "device_check.json").read_text())


def test_every_operation_agrees_with_its_reference(checked):
    status, _, report = checked
    assert status == 0
    assert {facts["operation"] for facts in report["operations"]} == OPERATIONS
    assert all(facts["ok"] and facts["parity"] for facts in report["operations"])
    assert report["failed"] == report["dropped"] == []


def test_without_a_gpu_no_time_is_reported(checked):
    _, folder, report = checked
    assert report["measurement"] is False
    text = (folder / "device_check.md").read_text()
    assert "Not a measurement" in text
    assert "GB/s" not in text
    measured = [*report["operations"], *report["layers"], *report["stage"]]
    assert not [facts for facts in measured if "seconds" in facts]
    assert report["extrapolated"] == []


def test_report_says_where_it_comes_from(checked):
    _, folder, report = checked
    found = report["device"]
    assert found["jax"] == jax.__version__
    assert found["platform"] == "cpu"
    assert found["bandwidth"] is None
    assert f"jax {jax.__version__}" in (folder / "device_check.md").read_text()


def test_a_budget_that_holds_no_check_is_a_failure(tmp_path, capsys):
    assert device.main(["--quick", "--out", str(tmp_path), "--seconds", "1"]) == 1
    assert "wrong: nothing was checked, as no check fits --seconds" in capsys.readouterr().out


def test_layers_and_a_traced_stage_run(checked):
    _, folder, report = checked
    assert [facts["kind"] for facts in report["layers"]] == ["window"]
    assert all(facts["ok"] for facts in [*report["layers"], *report["stage"]])
    assert list((folder / report["stage"][0]["trace"]).glob("*.xplane.pb"))


def task(name, prepare, priority=0, guess=1.0):
    return Task(part="p", name=name, priority=priority, prepare=prepare, guess=guess)


def test_what_fails_is_named_and_the_rest_goes_on():
    kept = []

    def fails_to_compile():
        raise ValueError("no such\n  instruction")

    def fails_to_run():
        raise RuntimeError("illegal address")

    tasks = [
        task("last", lambda: lambda: [{"x": 1}], priority=2),
        task("a", fails_to_compile),
        task("b", lambda: fails_to_run),
    ]
    outcome = run_tasks(tasks, Budget(60), workers=2, say=str, keep=kept.append)
    assert outcome.facts == {"p": [{"x": 1}]}
    assert kept == [outcome, outcome]  # after each priority
    assert outcome.failed == [
        ("a", "ValueError: no such instruction"),
        ("b", "RuntimeError: illegal address"),
    ]


def test_what_the_budget_does_not_hold_is_named_least_important_first_to_go():
    done = lambda: lambda: [{}]  # noqa: E731
    tasks = [task("long", done, priority=1, guess=100.0), task("short", done)]
    outcome = run_tasks(tasks, Budget(50), workers=1, say=str, keep=str)
    assert len(outcome.facts["p"]) == 2  # the first one taught what they cost
    assert run_tasks(tasks[:1], Budget(50), workers=1, say=str, keep=str).dropped == ["long"]


def test_a_loop_of_calls_has_the_results_of_one():
    def call(given):
        x, y = given
        return x * y

    sets = [(jnp.arange(3.0), jnp.full(3, 2.0)), (jnp.ones(3), jnp.ones(3))]
    first, second = jax.jit(lambda sets: repeat(call, sets, 5))(sets)
    np.testing.assert_array_equal(first, [0, 2, 4])
    np.testing.assert_array_equal(second, [1, 1, 1])


def test_wrong_results_are_found():
    wanted = np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)
    off = wanted.copy()
    off[1, 2] += 0.1
    for name in ("scaled_matmul", "dense_matmul", "rms_norm", "grouped_matmul", "sparse_attention"):
        assert all(d.ok for d in compare(name, wanted, wanted, None))
        assert not all(d.ok for d in compare(name, off, wanted, None))
        nothing = compare(name, np.full_like(wanted, np.nan), wanted, None)
        assert not all(d.ok for d in nothing)
        assert json.loads(json.dumps(nothing[0].json()))["value"] is None
    assert not compare("index_topk.topk", wanted > 0, wanted > 0.5, None)[0].ok


def test_a_written_row_in_the_wrong_place_is_found():
    cache = PackedRows(np.zeros((8, 4), np.uint8), np.zeros((8, 2), np.uint8))
    moved = PackedRows(cache.codes.copy(), cache.scales)
    moved.codes[5] = 7
    arguments = (cache, np.array([1, 2]))
    found = {d.figure: d.ok for d in compare("kv_write", moved, cache, arguments)}
    assert found == {"unequal bytes of written rows": True, "unequal bytes of other rows": False}


def setting(quick=False):
    found = device_setting.find_setting(0, quick=quick)
    return dataclasses.replace(found, chip=CHIPS[1])


def test_devices_are_known_by_their_names():
    found = {
        kind: device_setting.find_chip(kind)
        for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA B200")
    }
    assert [chip and chip.name for chip in found.values()] == ["H100", "H200", None, "B200"]
    assert device_setting.find_chip("NVIDIA H100 PCIe") is None


def test_large_weights_are_made_of_repeated_blocks():
    shape = next(s for s in scaled_matmul.SHAPES if s.name == "decode 4 wo_a tp2")
    case = device_ops.Case(module=scaled_matmul, shape=shape, references=False)
    like = scaled_matmul.abstract_arguments(shape)
    made = device_ops.make_arguments(case, 0)
    assert [(a.shape, a.dtype) for a in made] == [(a.shape, a.dtype) for a in like]


def test_experts_that_are_held_elsewhere_move_nothing():
    shape = next(s for s in grouped_matmul.SHAPES if s.name == "decode 64 ep8")
    shape = dataclasses.replace(shape, intermediate=32, hidden=64)
    case = device_ops.Case(module=grouped_matmul, shape=shape, references=False)
    made = device_ops.make_arguments(case, 0)
    experts = np.asarray(made[1])
    assert experts.min() == -1
    assert experts.max() < 48
    active = len(np.unique(experts[experts >= 0]))
    assert device_ops.moved_bytes(case, made) == grouped_matmul.bytes(shape, active)


def test_released_shapes_come_by_importance():
    found = {case.name: rank for rank, case in device_ops._released_cases((2, 1), False)}
    assert found["grouped_matmul decode 4 tp2"] == found["rms_norm prefill 512 hidden"] == 0
    assert found["grouped_matmul decode 64 tp2"] == 3
    assert found["grouped_matmul decode 4 tp1"] == 5
    assert not [name for name in found if "tp4" in name or "2048" in name or "ep" in name.split()]


def test_speeds_are_held_against_the_device():
    found = device_ops.speed(setting(), seconds=2e-3, moved=4.8e9, flops=1.0)
    assert found["bandwidth_share"] == pytest.approx(0.5)
    assert found["bound_share"] == pytest.approx(0.5)
    unknown = dataclasses.replace(setting(), chip=None)
    found = device_ops.speed(unknown, seconds=2e-3, moved=4.8e9, flops=1.0)
    assert found["bound_share"] is found["bandwidth_share"] is None
    assert found["bytes_per_second"] == pytest.approx(2.4e12)


def test_whole_steps_are_sums_over_the_kinds():
    config = default_config()
    kinds = device_layers.kinds(config)
    facts = [
        {"kind": kind, "step": "decode 4", "tensor": 2, "seconds": 10.0**place}
        for place, kind in enumerate(kinds)
    ]
    (found,) = device_layers.extrapolate(config, facts, stages=2)
    expected = sum(10.0**place * len(layers) for place, layers in enumerate(kinds.values()))
    assert found["seconds"] == pytest.approx(expected)
    assert sum(found["stage_seconds"]) == pytest.approx(expected)
    assert device_layers.extrapolate(config, facts[1:], stages=2) == []


def test_kernels_share_of_a_profile():
    def line(name, *events):
        named = [types.SimpleNamespace(name=n, duration_ns=t) for n, t in events]
        return types.SimpleNamespace(name=name, events=named)

    lines = [
        line("Stream #1", ("gate_up", 2000.0), ("gate_up__2", 1000.0), ("loop_fusion", 1000.0)),
        line("XLA Ops", ("gate_up", 9000.0)),
    ]
    planes = [
        types.SimpleNamespace(name="/host:CPU", lines=[line("Stream", ("gate_up", 1.0))]),
        types.SimpleNamespace(name="/device:GPU:0", lines=lines),
    ]
    found = device_stage.kernel_share(planes, {"gate_up"})
    assert found["busy_seconds"] == pytest.approx(4e-6)
    assert found["kernel_share"] == pytest.approx(0.75)
    assert found["launches"] == 3
    assert found["largest"][0]["name"] == "gate_up"


@pytest.fixture
def measured(checked):
    """The report of a made-up GPU."""
    report = json.loads(json.dumps(checked[2]))
    report["measurement"] = True
    report["device"] |= {"kind": "NVIDIA H200", "limits_of": "H200"}
    report["device"] |= {"bandwidth": 4.8e12, "bf16_flops": 989e12, "memory_bytes": 2**37}
    for facts in report["operations"]:
        facts |= {**SPEED, "cached": True, "launches": 9, "reference_seconds": 4e-6}
    for facts in (*report["layers"], *report["stage"]):
        facts |= SPEED
    kernel = {"name": "gate_up", "seconds": 1e-3, "launches": 2, "pallas": True}
    report["stage"][0] |= {"busy_seconds": 2e-3, "launches": 7, "kernel_share": 0.5}
    report["stage"][0]["largest"] = [kernel]
    report["extrapolated"] = [
        {"step": "decode 4", "tensor": 2, "stage_seconds": [2e-3, 3e-3], "seconds": 5e-3}
    ]
    report["failed"] = [{"name": "topk", "error": "RuntimeError: no"}]
    report["dropped"] = ["mixes"]
    return report


def test_measured_report_shows_times_and_what_is_missing(measured):
    text = as_markdown(measured)
    assert "Not a measurement" not in text
    assert "| 2.0 | 2400 | 50% * | 50% | 2.0x |" in text
    assert "| decode 4 | 2 | 2.00 + 3.00 | 5.00 |" in text
    assert "not measured" in text
    assert "Alone its layers take 0.002 ms together." in text
    assert "50% of it in the handwritten kernels" in text
    assert "- topk: failed, RuntimeError: no" in text
    assert "- mixes: dropped" in text


def test_unknown_device_is_said_to_be_unknown(measured):
    measured["device"] |= {"limits_of": None, "bandwidth": None}
    for facts in (*measured["operations"], *measured["layers"], *measured["stage"]):
        facts |= {"bandwidth_share": None, "bound_share": None}
    assert "is not known here: times alone" in as_markdown(measured)


def test_a_failed_parity_is_wrong(checked):
    report = json.loads(json.dumps(checked[2]))
    assert device.failures(report) == []
    report["operations"][0]["parity"][0] |= {"ok": False, "value": 0.5}
    (sentence,) = device.failures(report)
    assert "is 0.5, at most 1e-05 is right" in sentence
    report["operations"][0]["ok"] = False
    report["operations"][0]["parity"][0]["value"] = None
    assert "is not a number" in device.failures(report)[0]
    assert "**FAILED** | difference over largest not a number" in as_markdown(report)


def test_a_reference_that_fails_is_named_and_leaves_the_times(measured):
    measured["operations"][0] |= {"parity": [], "ok": False, "reference_error": "X: no memory"}
    (sentence,) = [line for line in device.failures(measured) if "X: no memory" in line]
    assert sentence.startswith("scaled_matmul tiny")
    text = as_markdown(measured)
    assert "| **NOT CHECKED** | the reference fails | - | 2.0 |" in text
    assert f"- {sentence}" in text


def test_a_failed_parity_ends_with_status_1(tmp_path, monkeypatch):
    shape = rms_norm.Shape(name="tiny", rows=4, channels=32)
    case = device_ops.Case(module=rms_norm, shape=shape, references=False)
    wrong = lambda *_: [dataclasses.replace(compare("rms_norm", *_[1:])[0], value=9.0)]  # noqa: E731
    monkeypatch.setattr(device_ops, "compare", wrong)
    tasks = [task("x", lambda: device_ops.prepare(case, setting(quick=True)))]
    tasks = [dataclasses.replace(tasks[0], part=device_ops.PART)]
    monkeypatch.setattr(device, "_tasks", lambda *_: tasks)
    assert device.main(["--out", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    "arguments",
    [["--seconds", "0"], ["--layers", "x"], ["--context", "-1"], ["--seed", "-1"], ["--qui"]],
)
def test_wrong_usage_ends_with_status_2(arguments):
    with pytest.raises(SystemExit) as ended:
        device.main(arguments)
    assert ended.value.code == 2


def test_no_device_is_a_sentence_and_status_3(tmp_path, monkeypatch, capsys):
    def refuse():
        raise AssertionError

    monkeypatch.setattr(jax, "devices", refuse)
    assert device.main(["--out", str(tmp_path)]) == 3
    expected = "JAX offers no device: the platform asked for is not there"
    assert expected in capsys.readouterr().err


def test_refusals_are_a_sentence_and_status_3(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert device.main(["--out", str(tmp_path / "file" / "x")]) == 3
    assert "Not a directory" in capsys.readouterr().err
    (tmp_path / "taken" / "device_check.json").mkdir(parents=True)
    assert device.main(["--out", str(tmp_path / "taken")]) == 3
    assert "device_check.json: Is a directory" in capsys.readouterr().err
    assert device.main(["--out", str(tmp_path), "--tensor-parallel-size", "3"]) == 3
    assert "do not divide by the tensor parallel size 3" in capsys.readouterr().err


@pytest.mark.cuda12
def test_loops_launch_the_kernel_on_every_set_of_arguments_and_copy_none():
    from sharding.deviceless import h100_devices, target_of

    shape = next(s for s in scaled_matmul.SHAPES if s.name == "decode 4 wo_b tp2")
    case = device_ops.Case(module=scaled_matmul, shape=shape, references=False)
    here = jax.sharding.SingleDeviceSharding(h100_devices(1)[0])
    given = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here),
        [scaled_matmul.abstract_arguments(shape)] * 3,
    )
    program = jax.jit(device_ops._program(case, "pallas", rounds=50))
    with target_of("h100-80"):
        text = program.trace(given).lower().compile().as_text()
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 3
    assert " while(" in text
    assert not re.findall(r"= f8e4m3fn\S* copy\(", text)

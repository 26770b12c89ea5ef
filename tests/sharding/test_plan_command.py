"""`python -m sharding.plan`: exit statuses, text, JSON and the picture."""

import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from sharding import plan

ROOT = pathlib.Path(__file__).parent.parent.parent
GOLDEN = ROOT / "tests" / "golden"
SVG = "{http://www.w3.org/2000/svg}"


def run(capsys, *options, model="released"):
    status = plan.main(["--model", str(model), *options])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_json(capsys, *options, model="released"):
    status, out, err = run(capsys, *options, "--json", model=model)
    assert err == ""
    return status, json.loads(out)


def usage_error(capsys, *options):
    with pytest.raises(SystemExit) as caught:
        plan.main(["--model", "released", *options])
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_text_shows_stages_what_they_own_and_every_dependency(capsys):
    status, out, err = run(capsys, "--pipeline-parallel-size", "4")
    assert (status, err) == (0, "")
    assert "40 layers in 4 stages: 8,6,6,20 on 4 devices, 4 microbatches, relay off" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "0 layers 0-7 (8) embedding; vision; KV sources 2; index sources 2; Engram 1" in lines
    assert "2 layers 14-19 (6) KV sources 14; index sources 14; Engram 14" in lines
    assert (
        "3 layers 20-39 (20) KV sources 20; index sources 20,24,28,32,36; candidate source 20; "
        "draft; head"
    ) in lines
    for line in (
        "kv 2 -> 3-7",
        "kv 20 -> 21-39",
        "index_k 20 -> 24, 28, 32, 36",
        "index 36 -> 37-39",
        "candidate 20 -> 24, 28, 32, 36",
        "Crossings: none",
        "stage 2 -> 3: stream 40976",
    ):
        assert line in lines
    assert "Stage 3 sets the pace" in out
    assert "Least time of a step by stage and device" in out
    assert "the imbalance costs 54%" in out


def test_refused_partition_shows_crossings_reason_and_nearest(capsys):
    status, out, err = run(capsys, "--pipeline-stages", "10,10,10,10")
    assert status == 3
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "Crossings: 24" in lines
    assert "kv layer 8 (stage 0) -> layer 10 (stage 1)" in lines
    assert "index layer 28 (stage 2) -> layer 30 (stage 3)" in lines
    assert "candidate layer 20 (stage 2) -> layer 32 (stage 3)" in lines
    assert "Legal cuts: before layer 1,2,8,14,20" in lines
    assert "8,6,6,20 (18 layers moved)" in lines
    assert err.startswith("refused: partition 10,10,10,10 cuts through what layers share: kv of")
    assert "Traceback" not in err


def test_json_has_the_same_facts(capsys):
    status, facts = run_json(capsys, "--pipeline-stages", "20,20", "--tensor-parallel-size", "2")
    assert status == 0
    assert facts["legal"] is True and facts["error"] is None
    assert (facts["pipeline_stages"], facts["devices"]) == ([20, 20], 4)
    first, second = facts["stages"]
    assert (first["first_layer"], first["last_layer"], first["num_layers"]) == (0, 19, 20)
    assert first["kv_sources"] == [2, 8, 14] and first["engram_layers"] == [1, 14]
    assert (first["vision"], first["draft"]) == (True, False)
    assert (second["vision"], second["draft"]) == (False, True)
    assert second["candidate_source"] == 20
    assert first["compressed_bytes_per_token"] + second["compressed_bytes_per_token"] == 890
    assert first["window_row_bytes"] == 20 * 528
    assert facts["crossings"] == []
    assert {
        "kind": "candidate",
        "source": 20,
        "consumer": 36,
        "source_stage": 1,
        "consumer_stage": 1,
    } in facts["dependencies"]
    assert facts["tensor"]["heads"] == 32
    assert facts["pipeline_microbatches"] == 2
    assert [device["name"] for device in facts["roofline"]["devices"]] == ["H100", "H200", "B200"]
    assert all(len(step["stages"]) == 2 for step in facts["roofline"]["steps"])


def test_json_of_a_refusal_names_crossings_and_nearest(capsys):
    status, facts = run_json(capsys, "--pipeline-stages", "10,10,10,10")
    assert status == 3
    assert facts["legal"] is False
    assert "kv of layer 8 (stage 0) is read by layer 10 (stage 1)" in facts["error"]
    assert len(facts["crossings"]) == 24
    assert facts["legal_cuts"] == [1, 2, 8, 14, 20]
    assert facts["nearest_legal"][0] == {"pipeline_stages": [8, 6, 6, 20], "layers_moved": 18}


@pytest.mark.parametrize("stages", ["20,19", "20,0,20", "41", "40,1"])
def test_stages_that_are_no_partition_are_refused(capsys, stages):
    status, facts = run_json(capsys, "--pipeline-stages", stages)
    assert status == 3
    assert "stages must partition all layers 0 to 39 in order" in facts["error"]
    assert facts["nearest_legal"]


def test_too_many_stages_are_refused(capsys):
    status, out, err = run(capsys, "--pipeline-parallel-size", "8")
    assert (status, out) == (3, "")
    assert "no partition into 8 stages is legal: the finest legal partition has 6" in err


def test_relay_makes_a_refused_partition_fine_and_prints_its_bytes(capsys):
    options = ("--pipeline-stages", "10,10,10,10", "--pipeline-relay")
    status, out, err = run(capsys, *options)
    assert (status, err) == (0, "")
    assert "stage 0 -> 1: stream 40976, relay 2336 (kv of layer 8 288, index of layer 8" in out
    assert "replicas kv of 20,index_k of 20" in out
    status, facts = run_json(capsys, *options)
    assert [b["relay_bytes_per_token"] for b in facts["boundaries"]] == [2336, 0, 10596]
    assert facts["relay"] == {"enabled": True, "max_bytes_per_token": None}


def test_relay_beyond_its_budget_is_refused(capsys):
    options = ("--pipeline-stages", "10,10,10,10", "--pipeline-relay")
    status, facts = run_json(capsys, *options, "--pipeline-relay-max-bytes", "4096")
    assert status == 3
    assert "10596 bytes per token from stage 2 to stage 3" in facts["error"]
    status, _ = run_json(capsys, *options, "--pipeline-relay-max-bytes", "10596")
    assert status == 0


def test_devices_that_do_not_divide_are_refused(capsys):
    status, facts = run_json(capsys, "--tensor-parallel-size", "3")
    assert status == 3
    assert "attn.wq_b.weight and attn.attn_sink has 64 heads" in facts["error"]
    assert facts["nearest_legal"] == []


def test_microbatches_can_be_chosen(capsys):
    _, facts = run_json(capsys, "--pipeline-parallel-size", "2", "--pipeline-microbatches", "3")
    assert facts["pipeline_microbatches"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pipeline-stages", "20,x"], "'20,x' must be layer counts with commas between"),
        (["--pipeline-stages", ""], "'' must be layer counts with commas between"),
        (["--pipeline-parallel-size", "0"], "'0' must be an integer of at least 1"),
        (["--pipeline-microbatches", "two"], "'two' must be an integer of at least 1"),
        (["--tensor-parallel-size", "-1"], "'-1' must be an integer of at least 1"),
        (
            ["--pipeline-parallel-size", "3", "--pipeline-stages", "20,20"],
            "--pipeline-parallel-size 3 contradicts --pipeline-stages 20,20, which has 2 stages",
        ),
        (["--pipeline-relay-max-bytes", "9"], "--pipeline-relay-max-bytes needs --pipeline-relay"),
        (["--pipeline-size", "2"], "unrecognized arguments: --pipeline-size 2"),
        (["--picture", "/dev/null/x.svg"], "--picture /dev/null/x.svg cannot be written"),
    ],
    ids=str,
)
def test_wrong_usage_exits_with_two(capsys, options, message):
    assert message in usage_error(capsys, *options)


def test_refused_configuration_exits_with_three(capsys, tmp_path):
    status, out, err = run(capsys, model=tmp_path)
    assert (status, out) == (3, "")
    assert err == (
        f"refused: {tmp_path} has no config.json: give a checkpoint directory, its config.json, "
        "or 'released' for the published configuration\n"
    )
    raw = json.loads((GOLDEN / "tiny_a" / "config.json").read_text())
    raw["text_config"]["kv_source_layer_ids"] = [4, 2]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    status, facts = run_json(capsys, model=tmp_path)
    assert status == 3
    assert "kv_source_layer_ids [4, 2] names layer 2 after layer 4" in facts["error"]


def test_only_the_configuration_is_read(capsys, tmp_path):
    shutil.copy(GOLDEN / "tiny_a" / "config.json", tmp_path)
    (tmp_path / "model-00001-of-00001.safetensors").mkdir()
    status, facts = run_json(capsys, "--pipeline-stages", "5,4", model=tmp_path)
    assert status == 0
    assert [stage["engram_layers"] for stage in facts["stages"]] == [[1, 4], []]
    status, facts = run_json(capsys, "--pipeline-stages", "6,3", model=tmp_path)
    assert status == 3


def test_picture_draws_every_layer_and_red_crossings(capsys, tmp_path):
    path = tmp_path / "plan.svg"
    for stages, red in (("10,10,10,10", True), ("20,20", False)):
        run(capsys, "--pipeline-stages", stages, "--picture", str(path))
        root = ET.parse(path).getroot()
        assert root.tag == f"{SVG}svg"
        texts = [node.text for node in root.iter(f"{SVG}text")]
        assert {str(layer) for layer in range(40)} <= set(texts)
        assert {f"stage {stage}" for stage in range(stages.count(",") + 1)} <= set(texts)
        arrows = [node.get("marker-end") for node in root.iter(f"{SVG}path")]
        in_legend = 1
        assert arrows.count("url(#crossing)") - in_legend == (24 if red else 0)
        assert any("24 crossings" in text for text in texts if text) == red


def test_command_is_quick_and_touches_no_device():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-m", "sharding.plan", "--model", "released", "--pipeline-stages=20,20"],
        cwd=ROOT,
        # with no such platform, anything that starts a backend fails
        env=os.environ | {"JAX_PLATFORMS": "no_such_platform"},
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    assert "40 layers in 2 stages: 20,20" in result.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5

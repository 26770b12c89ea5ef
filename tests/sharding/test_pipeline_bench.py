"""`python -m sharding.bench`: traffic and overlap of a pipeline's step."""

import json

import pytest

from sharding.bench import main


@pytest.mark.full
def test_traffic_is_the_plans_and_every_microbatch_is_dispatched_first(tiny, capsys):
    arguments = ["--pipeline-stages", "2,2,1,1", "--pipeline-relay", "--tensor-parallel-size", "2"]
    assert main([str(tiny), *arguments, "--tokens", "1024", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["planned_microbatch_bytes"] == facts["carried_microbatch_bytes"]
    assert facts["first_stage_all_reduces"] == 2 * facts["first_stage_layers"]
    assert facts["unfinished_when_all_are_dispatched"] == 4


def test_a_refused_partition_ends_with_status_3(tiny, capsys):
    assert main([str(tiny), "--pipeline-stages", "2,4"]) == 3
    assert "kv of layer 1 (stage 0) is read by layer 2 (stage 1)" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--tokens", "0"], ["--pipeline-stages", ""]])
def test_wrong_usage_ends_with_status_2(tiny, arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(tiny), *arguments])
    assert ended.value.code == 2

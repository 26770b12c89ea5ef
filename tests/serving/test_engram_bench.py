"""The Engram benchmark runs steps in turn with and without lookup ahead, and reports both."""

import json
import types

import pytest

from serving.bench import engram
from serving.bench.lookup_ahead import CHUNKS, StepTiming, measure_steps
from serving.default_model import default_config
from sharding.limits import engine_limits

TIMING = StepTiming(
    tokens=16, dispatch_waiting=4.0, dispatch_ahead=1.0, step_waiting=10.0, step_ahead=8.0
)


class NotedRunner:
    def __init__(self, config):
        self.limits = engine_limits(
            config, max_model_len=128, max_num_seqs=1, max_num_batched_tokens=16
        )
        self.vocab_size = config.vocab_size
        self.calls = []

    def submit(self, rows, sampling):
        self.calls.append(("submit", rows[0].start))
        return types.SimpleNamespace(result=lambda: self.calls.append(("wait", rows[0].start)))

    def expect(self, rows):
        self.calls.append(("expect", rows[0].start))


def test_a_chunk_is_expected_while_the_one_before_runs_or_not_at_all():
    config = default_config()
    runner = NotedRunner(config)
    timing = measure_steps(runner, config, tokens=16, pairs=1, seed=0)
    assert timing.step_ratio > 0 and timing.dispatch_waiting <= timing.step_waiting
    starts = [16 * chunk for chunk in range(CHUNKS)]
    waiting = [(kind, start) for start in starts for kind in ("submit", "wait")]
    ahead = [
        call
        for start in starts
        for call in (("submit", start), ("expect", start + 16), ("wait", start))
        if call != ("expect", starts[-1] + 16)
    ]
    assert runner.calls == [*ahead, *waiting, *waiting, *ahead]


@pytest.fixture
def _quick(monkeypatch):
    timing = engram.Timing(step="decode 1 x 1", median=2.0, fastest=1.0)
    monkeypatch.setattr(engram, "measure", lambda *arguments: timing)
    closed = types.SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(engram, "build_runner", lambda *arguments: closed)
    monkeypatch.setattr(engram, "measure_steps", lambda *arguments, **sizes: TIMING)


@pytest.mark.usefixtures("_quick")
def test_the_table_has_both_times_and_their_ratio(capsys):
    assert engram.main(["--rows", "1000", "--pairs", "1"]) == 0
    *_, dispatch, whole = capsys.readouterr().out.splitlines()
    assert dispatch.split()[-3:] == ["4.00", "1.00", "0.250"]
    assert whole.split()[-3:] == ["10.00", "8.00", "0.800"]


@pytest.mark.usefixtures("_quick")
def test_json_has_them_too(capsys):
    assert engram.main(["--rows", "1000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["milliseconds"]
    assert (found["step_waiting"], found["step_ahead"], found["step_ratio"]) == (10.0, 8.0, 0.8)

"""The overhead benchmark: every kind of request runs, and the exit status tells of slow ones."""

import pathlib
import sys

import pytest

from serving.bench import overhead

TINY = pathlib.Path(__file__).parents[1] / "golden" / "tiny_b"


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(overhead, "PROMPT", 20)
    monkeypatch.setattr(overhead, "STEPS", 8)
    monkeypatch.setattr(sys, "argv", ["overhead", str(TINY)])


@pytest.mark.parametrize("kind", overhead.KINDS)
def test_every_kind_of_request_is_measured(kind):
    assert 0 < overhead.measure(TINY, 3, overhead.KINDS[kind]) < 1000


@pytest.mark.parametrize(("most", "status"), [(1e9, 0), (1e-9, 1)])
def test_the_exit_status_says_whether_a_step_takes_too_long(monkeypatch, capsys, most, status):
    monkeypatch.setattr(overhead, "ALLOWED", {2: most})
    assert overhead.main() == status
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 + len(overhead.KINDS)

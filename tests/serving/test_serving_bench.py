import json
import math
import socket
import sys
import threading
import time

import fake_engine
import pytest
import uvicorn
from fake_engine import FakeEngine, client_of

from serving.bench import http_share
from serving.bench.__main__ import main
from serving.bench.client import BenchError, Server, Timing
from serving.bench.compare import bootstrap_ratio, compare_saved, interleaved, paired_ratio
from serving.bench.own_server import own_server
from serving.bench.protocol import Protocol, Run, run_protocol
from serving.bench.report import Setting, as_markdown, as_text, figures, rows, save

SMALL = Protocol(input_tokens=7, output_tokens=5, concurrency=2, warmups=2, requests=6)
SETTING = Setting(url="http://x", model="m", server={"jax": "1"}, client="c", date="2026-01-01")


@pytest.fixture(scope="module")
def served():
    """A scripted engine behind a real socket: its address and itself."""
    tokenizer = fake_engine.make_tokenizer()
    engine = FakeEngine(tokenizer, lambda request: [70] * 200, pause=0.002)
    with client_of(engine, max_model_len=4096) as client, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(client.app, log_config=None, access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", engine
        finally:
            server.should_exit = True
            thread.join()


def test_a_stream_is_timed_chunk_by_chunk(served):
    url, _ = served
    timing = Server(url).complete("fake", [5, 6, 7], max_tokens=8)
    assert timing.error is None
    assert (timing.prompt_tokens, timing.completion_tokens) == (3, 8)
    assert len(timing.gaps) == 7
    assert timing.first + sum(timing.gaps) == pytest.approx(timing.last)
    assert 0 < timing.first < timing.last <= timing.end_to_end
    assert timing.per_token == pytest.approx(sum(timing.gaps) / 7)


def test_failures_are_kept_and_do_not_end_a_run(served):
    url, engine = served
    assert "status 404" in Server(url).complete("other", [5], max_tokens=8).error
    engine.failure = "error"
    try:
        assert "status 500" in Server(url).complete("fake", [5], max_tokens=8).error
    finally:
        engine.failure = None
    assert (
        "ConnectionRefused" in Server("http://127.0.0.1:9").complete("f", [5], max_tokens=8).error
    )


def test_the_protocol_warms_up_resets_and_sends_fresh_random_prompts(served):
    url, engine = served
    engine.requests.clear()
    resets = engine.resets
    run = run_protocol(Server(url), "fake", SMALL, vocab_size=500)
    assert run.cache_reset and engine.resets == resets + 1
    assert len(run.timings) == len(run.done) == 6
    assert len(engine.requests) == 8
    prompts = [request.prompt_token_ids for request in engine.requests]
    assert len(set(prompts)) == 8 and {len(prompt) for prompt in prompts} == {7}
    assert all(3 <= token < 500 for prompt in prompts for token in prompt)
    sampling = engine.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.ignore_eos) == (5, 0.0, True)


def test_prompts_follow_the_seed_and_the_round():
    assert SMALL.prompts(500) == SMALL.prompts(500)
    assert SMALL.prompts(500) != SMALL.prompts(500, round_number=1)


def run_of(*seconds, errors=0):
    """A run whose requests took so long, 11 tokens each, the first after a tenth."""
    timings = [
        Timing(
            prompt_tokens=7,
            completion_tokens=11,
            first=s / 10,
            last=s,
            gaps=(s * 0.09,) * 10,
            end_to_end=s,
        )
        for s in seconds
    ]
    timings += [Timing(error="x")] * errors
    return Run(protocol=SMALL, seconds=2.0, timings=tuple(timings), cache_reset=True)


def test_figures_are_throughputs_and_quantiles_in_milliseconds():
    table = figures(run_of(1.0, 2.0, 3.0, errors=2))
    assert table["output_throughput"] == pytest.approx(33 / 2)
    assert table["total_throughput"] == pytest.approx((33 + 21) / 2)
    assert table["failures"] == 2
    assert table["ttft_p50"] == pytest.approx(200)
    assert table["tpot_p50"] == pytest.approx(180)
    assert table["e2e_p10"] == pytest.approx(1200) and table["e2e_p90"] == pytest.approx(2800)


def test_a_run_of_failures_has_no_times():
    table = figures(run_of(errors=3))
    assert table["ttft_p50"] is None and table["output_throughput"] == 0
    assert "3 of 3" in as_text(rows([run_of(errors=3)]))


def test_runs_are_saved_and_compared(tmp_path):
    a, b = [1.0, 1.1, 0.9, 1.0], [2.0, 2.2, 1.8, 2.0]
    json_a, markdown = save(tmp_path / "deep" / "a", SETTING, [run_of(*a)])
    json_b, _ = save(tmp_path / "b", SETTING, [run_of(*b)])
    assert "| 7 |" in markdown.read_text() and "jax 1" in as_markdown(SETTING, [run_of(*a)])
    assert json.loads(json_a.read_text())["runs"][0]["figures"]["failures"] == 0
    ratios = {ratio.name: ratio for ratio in compare_saved(json_a, json_b)[7]}
    assert ratios["e2e"].value == pytest.approx(2)
    low, high = ratios["e2e"].interval
    assert 1 < low <= 2 <= high
    assert "differs" in ratios["e2e"].line()
    with pytest.raises(BenchError, match="cannot be read"):
        compare_saved(json_a, tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(BenchError, match="holds no saved runs"):
        compare_saved(json_a, tmp_path / "bad.json")


def test_servers_take_turns():
    order = []
    pairs = interleaved(
        lambda number: order.append(f"A{number}"), lambda number: order.append(f"B{number}"),
        repeats=2,
    )  # fmt: skip
    assert order == ["A0", "B0", "A1", "B1"] and len(pairs) == 2


def test_a_ratios_interval_is_students_on_the_logarithms():
    ratio = paired_ratio("x", [1.0, 1.0], [math.exp(0.1), math.exp(0.3)])
    assert ratio.value == pytest.approx(math.exp(0.2))
    half = 12.706 * math.sqrt(0.02) / math.sqrt(2)
    assert ratio.interval == pytest.approx((math.exp(0.2 - half), math.exp(0.2 + half)))
    assert "no difference shown" in ratio.line()
    assert paired_ratio("x", [1.0], [2.0]).interval is None


def test_equal_samples_show_no_difference():
    values = [1.0, 1.2, 0.8, 1.1, 0.9] * 4
    low, high = bootstrap_ratio("x", values, values).interval
    assert low <= 1 <= high


def test_the_command_prints_saves_and_draws(served, tmp_path, capsys):
    url, _ = served
    arguments = ["--base-url", url, "--input-len", "5", "9", "--num-prompts", "4"]
    arguments += ["--output-len", "4", "--num-warmups", "1"]
    files = ["--save", str(tmp_path / "run"), "--plot", str(tmp_path / "run.png")]
    assert main([*arguments, *files]) == 0
    out = capsys.readouterr().out
    assert "TTFT p10/p50/p90 ms" in out and "0 of 4" in out
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "run.md").exists()
    saved = str(tmp_path / "run.json")
    assert main(["--compare-saved", saved, saved]) == 0
    assert "no difference shown" in capsys.readouterr().out
    assert main([*arguments, "--compare", url, "--repeats", "2"]) == 0
    out = capsys.readouterr().out
    assert "B over A, 95 % interval" in out and "output_throughput" in out


def test_failed_requests_make_status_1(served, capsys):
    url, engine = served
    engine.check = lambda request: (_ for _ in ()).throw(RuntimeError("broken"))
    arguments = ["--base-url", url, "--input-len", "5", "--num-prompts", "2"]
    try:
        assert main([*arguments, "--num-warmups", "1"]) == 3
        assert "fails the warm-up requests" in capsys.readouterr().err
    finally:
        del engine.check
    short = ["--output-len", "4", "--num-warmups", "1", "--model", "fake"]
    before = len(engine.requests)
    original = engine.check
    engine.check = lambda request: (
        (_ for _ in ()).throw(RuntimeError("broken"))
        if len(engine.requests) > before + 1
        else original(request)
    )
    try:
        assert main([*arguments, *short]) == 1
    finally:
        del engine.check
    assert "failed: status 500" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base-url", "ftp://x"], "is not an address such as"),
        (["--base-url", "http://127.0.0.1:9"], "does not answer GET /v1/models"),
    ],
)
def test_what_cannot_run_is_one_line_and_status_3(capsys, arguments, message):
    assert main(arguments) == 3
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_picture_without_matplotlib_says_how_to_get_it(served, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = ["--base-url", served[0], "--input-len", "5", "--num-prompts", "1"]
    arguments += ["--output-len", "2", "--num-warmups", "1", "--plot", str(tmp_path / "x.png")]
    assert main(arguments) == 3
    assert "pip install dsv41-jax[plot]" in capsys.readouterr().err


def test_a_server_that_does_not_start_says_why():
    with pytest.raises(BenchError, match=r"status 3 .* does not exist"):
        with own_server(["--model", "/no/such/model"], lambda line: None):
            pass


def test_http_share_asks_a_second_process(served):
    tokens = http_share.over_http(served[0], SMALL, seed=1)
    assert tokens > 0
    with pytest.raises(BenchError, match="the client failed"):
        http_share.over_http("http://127.0.0.1:9", SMALL, seed=1)

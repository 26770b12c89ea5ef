"""Reuse of cached pages: which beginnings hit, and that results never tell."""

import random

import pytest
from test_engine import make_engine, merged, serve
from toy_runner import LETTERS, ToyRunner, run_all, tokens_of, toy_limits, toy_request

from serving.engine import Engine
from sharding.cache_sizes import CacheSizes

PAGE, WINDOW = 4, 8


def serve_on(engine, prompt, **options):
    """Tokens of one request, and how many prompt tokens it found cached."""
    outputs = run_all(engine, [toy_request("r", prompt, **options)])["r"]
    (cached,) = {output.num_cached_tokens for output in outputs}
    cold = serve(toy_request("r", prompt, **options), max_model_len=256)
    if "logprobs" in options:
        assert merged(outputs) == merged(cold)
    assert tokens_of(outputs) == tokens_of(cold)
    return tokens_of(outputs), cached


def full_pages(tokens):
    return tokens // PAGE * PAGE


def test_a_chat_reuses_all_of_the_turns_before():
    engine = make_engine(max_model_len=256)
    history = list(range(3, 16))
    reused = 0
    for turn in range(3):
        answer, cached = serve_on(engine, history, max_tokens=11, logprobs=1)
        assert cached == reused
        history += answer
        reused = full_pages(len(history) - 1)  # the last token sampled is not computed
        history += [40 + turn, 50, 60]
    stats = engine.stats()
    assert (stats.prefix_cache_queries, stats.kv_cache_usage) == (13 + 27 + 41, 0)
    assert stats.prefix_cache_hits == 0 + 20 + 36


def test_a_turn_whose_answer_was_dropped_reuses_the_prompt():
    engine = make_engine(max_model_len=256)
    prompt = list(range(3, 40))
    serve_on(engine, prompt, max_tokens=60)
    _, cached = serve_on(engine, [*prompt[:-1], 90, 91, 92])
    assert cached == full_pages(len(prompt) - 1)


def test_at_least_one_token_is_computed():
    engine = make_engine()
    prompt = list(range(3, 3 + 4 * PAGE))
    serve_on(engine, prompt)
    assert serve_on(engine, prompt)[1] == 3 * PAGE
    assert serve_on(engine, [*prompt, 5])[1] == 4 * PAGE


def test_where_requests_part_the_window_is_kept_from_the_second_on():
    limits = toy_limits(max_model_len=160, max_num_seqs=1)
    sizes = CacheSizes(window_pages=20, global_pages=200, slots=1)
    engine = Engine(ToyRunner(limits, sizes), LETTERS)
    shared = list(range(3, 3 + 40))
    cached = []
    for index in range(4):
        cached.append(serve_on(engine, [*shared, *[60 + index] * 70])[1])
    assert cached == [0, 0, 40, 40]


def test_without_the_window_a_shorter_prefix_is_found():
    limits = toy_limits(max_num_seqs=1)
    sizes = CacheSizes(window_pages=7, global_pages=64, slots=1)
    engine = Engine(ToyRunner(limits, sizes), LETTERS)
    first = list(range(3, 33))
    serve_on(engine, first, max_tokens=1)
    assert serve_on(engine, first)[1] == 28
    serve_on(engine, range(50, 90), max_tokens=1)
    assert serve_on(engine, first)[1] == 0
    assert serve_on(engine, first)[1] == 28


def test_another_salt_shares_nothing():
    engine = make_engine()
    requests = [
        toy_request("a", range(3, 20)),
        toy_request("b", range(3, 20), cache_salt="x"),
        toy_request("c", range(3, 20), cache_salt="x"),
        toy_request("d", range(3, 20), cache_salt="y"),
        toy_request("e", range(3, 20)),
    ]
    cached = [run_all(engine, [r])[r.request_id][0].num_cached_tokens for r in requests]
    assert cached == [0, 0, 16, 0, 16]


def test_prompt_logprobs_are_computed_for_every_row():
    engine = make_engine()
    serve_on(engine, range(3, 20))
    assert serve_on(engine, range(3, 20), prompt_logprobs=1, logprobs=1)[1] == 0
    assert serve_on(engine, range(3, 20))[1] == 16


def test_a_reset_forgets_everything_and_disturbs_nobody():
    engine = make_engine()
    serve_on(engine, range(3, 20))
    engine.add_request(toy_request("a", range(3, 20), max_tokens=30))
    outputs = [output for _ in range(6) for output in engine.step()]
    engine.reset_prefix_cache()
    while engine.has_work:
        outputs += engine.step()
    assert tokens_of(outputs) == tokens_of(serve(toy_request("a", range(3, 20), max_tokens=30)))
    assert outputs[0].num_cached_tokens == 16
    engine.reset_prefix_cache()
    assert serve_on(engine, range(3, 20))[1] == 0
    assert serve_on(engine, range(3, 20))[1] == 16


def test_it_can_be_turned_off():
    engine = Engine(ToyRunner(toy_limits()), LETTERS, prefix_cache=False)
    for _ in range(2):
        assert serve_on(engine, range(3, 20))[1] == 0
    assert engine.stats().prefix_cache_queries == 0


def test_bounded_replay_computes_all_rows_that_late_layers_read():
    engine = Engine(ToyRunner(toy_limits()), LETTERS, decoder_replay=True)
    starts = []
    submit = engine._runner.submit
    engine._runner.submit = lambda rows, sampling: starts.append(rows) or submit(rows, sampling)
    assert serve_on(engine, range(3, 33))[1] == 0
    assert {row.late_from for step in starts for row in step} == {30 - WINDOW}
    assert serve_on(engine, range(3, 33))[1] == full_pages(30 - WINDOW)
    assert serve_on(engine, range(3, 20))[1] == full_pages(17 - WINDOW)
    assert serve_on(engine, range(3, 3 + WINDOW))[1] == 0
    starts.clear()
    assert serve_on(engine, range(3, 33), prompt_logprobs=0)[1] == 0
    assert {row.late_from for step in starts for row in step} == {0}


@pytest.mark.parametrize("pages", [16, 24, 40, None])
@pytest.mark.parametrize("tokens", [4, 16, 64])
def test_warm_equals_cold_under_any_pressure(pages, tokens):
    generator = random.Random(tokens)
    roots = [[generator.randrange(2, 97) for _ in range(40)] for _ in range(3)]
    requests = []
    for index in range(60):
        root = generator.choice(roots)[: generator.randint(1, 40)]
        prompt = [*root, *(generator.randrange(2, 97) for _ in range(generator.randint(0, 8)))]
        options = {"max_tokens": generator.randint(1, 12), "logprobs": 1, "seed": index}
        if index % 7 == 0:
            options["prompt_logprobs"] = 0
        requests.append(toy_request(str(index), prompt, **options))
    engine = make_engine(pages, max_num_batched_tokens=tokens)
    outputs = run_all(engine, requests)
    for request in requests:
        assert merged(outputs[request.request_id]) == merged(serve(request))
    stats = engine.stats()
    assert stats.kv_cache_usage == 0
    assert 0 < stats.prefix_cache_hits < stats.prefix_cache_queries
    assert stats.prefix_cache_hits == sum(o[0].num_cached_tokens for o in outputs.values())
    again = run_all(engine, requests)
    assert {k: merged(v) for k, v in again.items()} == {k: merged(v) for k, v in outputs.items()}

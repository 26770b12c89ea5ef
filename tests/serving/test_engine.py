"""The engine around a toy runner: results do not depend on company, chunks or preemption."""

import random

import numpy as np
import pytest
from toy_runner import (
    EOS,
    LETTERS,
    ToyRunner,
    run_all,
    text_of,
    tokens_of,
    toy_limits,
    toy_request,
)

from serving.engine import Engine
from serving.request import RequestError, SamplingParams
from sharding.cache_sizes import CacheSizes


def make_engine(pages=None, *, eos=EOS, microbatches=1, **changes):
    limits = toy_limits(**changes)
    sizes = pages and CacheSizes(window_pages=pages, global_pages=pages, slots=limits.max_num_seqs)
    return Engine(ToyRunner(limits, sizes, eos=eos), LETTERS, microbatches=microbatches)


def serve(request, **changes):
    return run_all(make_engine(**changes), [request])[request.request_id]


def random_requests(seed, count, **sampling):
    generator = random.Random(seed)
    return [
        toy_request(
            str(index),
            [generator.randrange(2, 97) for _ in range(generator.randint(1, 40))],
            max_tokens=generator.randint(1, 24),
            temperature=generator.choice([0.0, 1.0]),
            seed=index,
            logprobs=2,
            prompt_logprobs=generator.choice([None, 1]),
            **sampling,
        )
        for index in range(count)
    ]


def merged(outputs):
    """What a request got in all, however it was cut."""
    return (
        tokens_of(outputs),
        text_of(outputs),
        [entry for output in outputs for entry in output.logprobs],
        [output.prompt_logprobs for output in outputs if output.prompt_logprobs],
        outputs[-1].finish_reason,
        outputs[-1].stop_reason,
    )


@pytest.mark.parametrize("pages", [None, 16, 24])
@pytest.mark.parametrize("tokens", [4, 16, 64])
def test_together_equals_alone_with_any_chunks_and_preemption(pages, tokens):
    requests = random_requests(5, 24)
    together = make_engine(pages, max_num_batched_tokens=tokens)
    outputs = run_all(together, requests)
    for request in requests:
        alone = serve(request, max_num_batched_tokens=64, max_num_seqs=1)
        assert merged(outputs[request.request_id]) == merged(alone)
    stats = together.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)
    assert stats.num_finished == {"length": 24}
    assert stats.num_prompt_tokens == sum(len(r.prompt_token_ids) for r in requests)
    assert stats.num_generation_tokens == sum(r.sampling.max_tokens for r in requests)
    if pages == 16:
        assert stats.num_preemptions > 0


@pytest.mark.parametrize("pages", [None, 16, 24])
@pytest.mark.parametrize("microbatches", [2, 3, 4])
def test_answers_do_not_depend_on_the_steps_in_flight(pages, microbatches):
    requests = random_requests(6, 24)
    one = run_all(make_engine(pages), requests)
    several = make_engine(pages, microbatches=microbatches)
    outputs = run_all(several, requests)
    for request_id, outputs_of_one in one.items():
        assert merged(outputs[request_id]) == merged(outputs_of_one)
    stats = several.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)


def test_requests_take_turns_so_that_as_many_steps_are_in_flight_as_asked_for():
    engine = make_engine(microbatches=2)
    for index in range(4):
        engine.add_request(toy_request(str(index), [5, 6], max_tokens=8))
    for _ in range(6):
        engine.step()
    steps = [{row.slot for row in rows} for rows in engine._runner.steps]
    assert all(len(slots) == 2 for slots in steps)
    assert all(not before & after for before, after in zip(steps, steps[1:], strict=False))
    assert len(engine._in_flight) == 2


def test_aborted_requests_free_what_they_hold_and_change_no_other():
    requests = random_requests(6, 20)
    engine = make_engine(24)
    outputs = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    for step in range(10000):
        if not engine.has_work:
            break
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.abort(str(2 * step + 1))
    assert engine.stats().kv_cache_usage == 0
    assert engine.stats().num_finished["abort"] > 0
    for request in requests[::2]:
        assert merged(outputs[request.request_id]) == merged(serve(request))


def test_a_request_id_can_be_used_again_after_an_abort():
    engine = make_engine()
    first, second = toy_request("a", [5, 6]), toy_request("a", [7, 8, 9])
    engine.add_request(first)
    engine.step()
    engine.abort("a")
    assert merged_tokens(run_all(engine, [second])) == merged_tokens({"a": serve(second)})


def merged_tokens(outputs):
    return {request_id: tokens_of(parts) for request_id, parts in outputs.items()}


def test_the_text_joins_to_the_tokens():
    outputs = serve(toy_request("a", [5, 6, 7]))
    assert text_of(outputs) == b"".join(map(LETTERS.bytes_of, tokens_of(outputs))).decode()
    assert [len(output.token_ids) for output in outputs] == [1] * 8


def test_eos_ends_a_request_and_is_left_out_of_the_text():
    plain = tokens_of(serve(toy_request("a", [5, 6, 7])))
    eos = plain[3]
    first = plain.index(eos)
    outputs = serve(toy_request("a", [5, 6, 7], ignore_eos=False), eos=eos)
    assert tokens_of(outputs) == plain[: first + 1]
    assert text_of(outputs) == b"".join(map(LETTERS.bytes_of, plain[:first])).decode()
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", None)
    ignored = serve(toy_request("a", [5, 6, 7]), eos=eos)
    assert tokens_of(ignored) == plain


@pytest.mark.parametrize("include", [True, False])
def test_a_stop_token_ends_a_request_and_is_named(include):
    plain = tokens_of(serve(toy_request("a", [5, 6, 7])))
    stop = plain[2]
    first = plain.index(stop)
    request = toy_request(
        "a", [5, 6, 7], stop_token_ids=(90, stop), include_stop_str_in_output=include
    )
    outputs = serve(request)
    assert tokens_of(outputs) == plain[: first + 1]
    expected = plain[: first + include]
    assert text_of(outputs) == b"".join(map(LETTERS.bytes_of, expected)).decode()
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)


@pytest.mark.parametrize("include", [True, False])
def test_a_stop_string_across_tokens_ends_a_request(include):
    text = text_of(serve(toy_request("a", [5, 6, 7])))
    stop = text[2:5]
    request = toy_request("a", [5, 6, 7], stop=(stop,), include_stop_str_in_output=include)
    outputs = serve(request)
    place = text.index(stop)
    assert text_of(outputs) == text[: place + len(stop) * include]
    assert len(tokens_of(outputs)) == place + len(stop)
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", stop)


def test_a_stop_string_completed_by_the_last_token_counts_as_a_stop():
    text = text_of(serve(toy_request("a", [5, 6, 7])))
    outputs = serve(toy_request("a", [5, 6, 7], stop=(text[-2:],)))
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == ("stop", text[-2:])
    assert text_of(outputs) == text[: text.index(text[-2:])]


def test_what_was_held_back_comes_with_the_last_token():
    text = text_of(serve(toy_request("a", [5, 6, 7])))
    outputs = serve(toy_request("a", [5, 6, 7], stop=(text[-1] + " never",)))
    assert text_of(outputs) == text
    assert outputs[-1].finish_reason == "length"


def test_requests_that_end_by_stop_strings_leave_nothing_and_change_no_other():
    requests = random_requests(8, 16, stop=("a", "b", "Q", "9"))
    engine = make_engine(24)
    outputs = run_all(engine, requests)
    reasons = {parts[-1].finish_reason for parts in outputs.values()}
    assert reasons == {"stop", "length"} and engine.stats().kv_cache_usage == 0
    for request in requests:
        assert merged(outputs[request.request_id]) == merged(serve(request))


def test_no_stop_token_is_sampled_before_min_tokens():
    plain = tokens_of(serve(toy_request("a", [5, 6, 7])))
    early = tuple(dict.fromkeys(plain[:3]))
    request = toy_request("a", [5, 6, 7], stop_token_ids=early, min_tokens=6)
    tokens = tokens_of(serve(request))
    assert not set(tokens[:6]) & set(early)
    assert len(tokens) >= 6


def test_generation_ends_at_max_model_len():
    outputs = serve(toy_request("a", range(3, 63), max_tokens=50))
    assert len(tokens_of(outputs)) == 4
    assert outputs[-1].finish_reason == "length"


def test_max_tokens_zero_scores_the_prompt_and_generates_nothing():
    prompt = list(range(10, 40))
    (output,) = serve(toy_request("a", prompt, max_tokens=0, prompt_logprobs=3))
    assert (output.token_ids, output.text, output.finish_reason) == ((), "", "length")
    assert output.prompt_logprobs[0] is None
    scored = output.prompt_logprobs[1:]
    assert [entry.token_id for entry in scored] == prompt[1:]
    assert all(len(entry.top) == 3 for entry in scored)


def test_logprobs_come_with_as_many_alternatives_as_asked():
    outputs = serve(toy_request("a", [5, 6, 7], logprobs=4))
    for output in outputs:
        (entry,) = output.logprobs
        assert entry.token_id == output.token_ids[0] and entry.rank == 1
        assert entry.top[0] == (entry.token_id, pytest.approx(entry.logprob))
        assert len(entry.top) == 4
    assert serve(toy_request("a", [5, 6, 7]))[0].logprobs is None


def test_requests_without_a_seed_draw_different_streams():
    requests = [toy_request(str(i), [5], temperature=2.0, max_tokens=12) for i in range(4)]
    outputs = run_all(make_engine(), requests)
    assert len({tuple(tokens_of(parts)) for parts in outputs.values()}) > 1


def test_a_negative_seed_is_a_seed():
    first = serve(toy_request("a", [5], temperature=2.0, seed=-3))
    assert tokens_of(first) == tokens_of(serve(toy_request("b", [5], temperature=2.0, seed=-3)))


@pytest.mark.parametrize(
    ("prompt", "sampling", "message", "param"),
    [
        ([], {}, "the prompt is empty", "prompt"),
        (
            [5] * 64,
            {},
            "maximum context length is 64 tokens. However, the prompt has 64 tokens",
            "prompt",
        ),
        ([5, 97], {}, "prompt has token id 97; ids of this model are 0 to 96", "prompt"),
        ([-1], {}, "prompt has token id -1", "prompt"),
        ([5], {"stop_token_ids": (200,)}, "stop_token_ids has token id 200", "stop_token_ids"),
        ([5], {"logit_bias": ((97, 1.0),)}, "logit_bias has token id 97", "logit_bias"),
        ([5], {"allowed_token_ids": (5, -2)}, "allowed_token_ids has token id -2", None),
        ([5], {"bad_words": ((5, 6), (400,))}, "bad_words has token id 400", "bad_words"),
        ([5], {"logprob_token_ids": (97,)}, "logprob_token_ids has token id 97", None),
    ],
)
def test_requests_that_can_never_be_served_are_refused(prompt, sampling, message, param):
    engine = make_engine()
    with pytest.raises(RequestError, match=message) as caught:
        engine.add_request(toy_request("a", prompt, **sampling))
    assert caught.value.param == (param or next(iter(sampling)))
    assert not engine.has_work


def test_an_id_that_is_in_use_is_refused():
    engine = make_engine()
    engine.add_request(toy_request("a", [5]))
    with pytest.raises(RequestError, match="request id 'a' is in use"):
        engine.add_request(toy_request("a", [5]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": -1}, "max_tokens is -1; it must be at least 0"),
        ({"min_tokens": -2}, "min_tokens is -2"),
        ({"temperature": -0.5}, "temperature is -0.5; it must be 0 or more"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 1.5}, "min_p is 1.5; it must be from 0 to 1"),
        ({"stop": ("",)}, "stop is an empty string"),
        ({"logprobs": 21}, "logprobs is 21; it must be from 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5; it must be from -2 to 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be above 0"),
        ({"logit_bias": ((5, 101.0),)}, "logit_bias is 101.0 for 5; it must be from -100 to 100"),
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "it must be one bias per token"),
        (
            {"logit_bias": tuple((i, 1.0) for i in range(1025))},
            "logit_bias is 1025 tokens; it must be at most 1024",
        ),
        ({"allowed_token_ids": ()}, "allowed_token_ids is empty"),
        ({"bad_words": ((5,), ())}, "bad_words is an empty word"),
        ({"bad_words": ((5,),), "allowed_token_ids": (5,)}, "all of allowed_token_ids"),
        ({"logprob_token_ids": tuple(range(21))}, "logprob_token_ids is 21 tokens"),
    ],
)
def test_sampling_options_out_of_range_are_refused(options, message):
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**options)
    assert caught.value.param in options


def test_every_step_is_dispatched_before_the_texts_of_the_last_are_returned():
    engine = make_engine()
    engine.add_request(toy_request("a", [5, 6], max_tokens=3))
    assert engine.step() == []
    counts = []
    while engine.has_work:
        outputs = engine.step()
        counts.append((len(outputs), len(engine._runner.steps)))
    assert counts == [(1, 2), (1, 3), (1, 3)]


def test_the_next_part_of_a_prompt_is_dispatched_before_the_last_is_collected():
    engine = make_engine()
    waiting = []

    class Step:
        def __init__(self, step):
            self.step = step
            waiting.append(self)

        def result(self):
            waiting.remove(self)
            return self.step.result()

    submit = engine._runner.submit
    engine._runner.submit = lambda rows, sampling: Step(submit(rows, sampling))
    engine.add_request(toy_request("a", range(3, 63), max_tokens=3, prompt_logprobs=0))
    counts, outputs = [], []
    while engine.has_work:
        outputs += engine.step()
        counts.append(len(waiting))
    assert counts == [1, 2, 2, 2, 1, 1, 0]
    alone = serve(toy_request("a", range(3, 63), max_tokens=3, prompt_logprobs=0))
    assert outputs == alone


def test_an_abort_with_two_parts_of_a_prompt_under_way_ends_cleanly():
    engine = make_engine()
    engine.add_request(toy_request("a", range(3, 63)))
    engine.step()
    engine.step()
    engine.abort("a")
    assert engine.step() == [] and engine.step() == []
    assert not engine.has_work and engine.stats().kv_cache_usage == 0


def test_steps_in_one_array_hold_prefill_and_decode_rows():
    engine = make_engine()
    run_all(engine, [toy_request("a", [5]), toy_request("b", range(3, 43), max_tokens=2)])
    sizes = [[len(rows.token_ids) for rows in step] for step in engine._runner.steps]
    assert sizes[:3] == [[1, 15], [1, 15], [1, 10]]
    assert np.sum(sizes[0]) == 16

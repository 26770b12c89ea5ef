"""Penalties, biases and bans of a request, as its tokens come."""

import numpy as np
import pytest
from test_engine import make_engine, merged, serve
from toy_runner import VOCAB_SIZE, run_all, tokens_of, toy_limits, toy_request

from serving import bitmask
from serving.logit_rules import LogitRules, empty_changes
from serving.request import SamplingParams


def rules_of(prompt=(5, 6, 5), **sampling):
    return LogitRules(
        SamplingParams(**sampling), prompt, vocab_size=VOCAB_SIZE, eos_token_id=1, grammar=None
    )


def changes_of(rules):
    """What the next token's logits get: {token: (divisor, bias)} and the tokens left out."""
    table = empty_changes(toy_limits(), VOCAB_SIZE)
    changed = rules.write(table, 2)
    used = table.ids[2] >= 0
    of_token = zip(table.ids[2], table.divisor[2], table.bias[2], strict=True)
    changes = {int(t): (float(d), round(float(b), 4)) for t, d, b in of_token if t >= 0}
    assert len(changes) == used.sum()
    bits = np.unpackbits(table.allowed[2].view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    banned = set(np.flatnonzero(bits == 0).tolist())
    assert changed == bool(changes or banned)
    untouched = empty_changes(toy_limits(), VOCAB_SIZE)
    np.testing.assert_array_equal(table.ids[[0, 1, 3]], untouched.ids[[0, 1, 3]])
    return changes, banned


def test_penalties_follow_the_counts_of_generated_tokens():
    rules = rules_of(presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((7, 2.0), (8, -1.0)))
    assert changes_of(rules) == ({7: (1, 2.0), 8: (1, -1.0)}, set())
    for token in (9, 7, 9):
        rules.push(token)
    expected = {7: (1, 1.25), 8: (1, -1.0), 9: (1, -1.0)}
    assert changes_of(rules) == (expected, set())


def test_the_repetition_penalty_counts_the_prompt():
    rules = rules_of(repetition_penalty=1.5)
    rules.push(9)
    assert changes_of(rules) == ({5: (1.5, 0), 6: (1.5, 0), 9: (1.5, 0)}, set())


def test_many_tokens_are_counted():
    rules = rules_of(frequency_penalty=1.0)
    for token in range(60):
        rules.push(token)
    assert changes_of(rules)[0] == {token: (1, -1.0) for token in range(60)}


def test_a_long_prompt_is_counted():
    changes, _ = changes_of(rules_of(prompt=tuple(range(3, 80)), repetition_penalty=1.5))
    assert changes == {token: (1.5, 0) for token in range(3, 80)}


def test_a_bad_word_is_banned_where_it_would_be_completed():
    rules = rules_of(bad_words=((30,), (40, 41, 42), (41, 43)))
    assert changes_of(rules)[1] == {30}
    rules.push(40)
    assert changes_of(rules)[1] == {30}
    rules.push(41)
    assert changes_of(rules)[1] == {30, 42, 43}
    rules.push(50)
    assert changes_of(rules)[1] == {30}


def test_end_tokens_are_banned_before_min_tokens():
    rules = rules_of(min_tokens=2, stop_token_ids=(20, 21))
    assert changes_of(rules)[1] == {1, 20, 21}
    rules.push(9)
    rules.push(9)
    assert changes_of(rules) == ({}, set())
    assert changes_of(rules_of(min_tokens=2, ignore_eos=True, stop_token_ids=(20,)))[1] == {20}


def test_a_ban_that_would_leave_nothing_gives_way():
    rules = rules_of(allowed_token_ids=(1, 40), bad_words=((40,),), min_tokens=5)
    assert changes_of(rules)[1] == set(range(VOCAB_SIZE)) - {1}


@pytest.mark.parametrize("vocab_size", [32, 33, 97])
def test_bits_past_the_vocabulary_do_not_count(vocab_size):
    words = bitmask.full(vocab_size)
    bitmask.remove(words, range(vocab_size))
    assert bitmask.is_empty(words, vocab_size)
    assert not bitmask.is_empty(bitmask.of_tokens([vocab_size - 1], vocab_size), vocab_size)


def rule_requests():
    kinds = [
        {"presence_penalty": 1.5, "frequency_penalty": 0.7, "temperature": 0.9},
        {"repetition_penalty": 1.8},
        {},
        {"logit_bias": ((9, 6.0), (30, -100.0)), "temperature": 1.0},
        {"allowed_token_ids": (40, 41, 42, 43), "bad_words": ((41, 42), (43,))},
        {"min_tokens": 6, "ignore_eos": False, "logit_bias": ((1, 50.0),)},
    ]
    return [
        toy_request(
            str(i),
            [5 + i % 7, *range(9, 19), 30],
            max_tokens=14,
            seed=i,
            logprobs=1,
            **kinds[i % 6],
        )
        for i in range(18)
    ]


def test_options_are_honoured_whatever_runs_beside_them_and_through_preemption():
    requests = rule_requests()
    engine = make_engine(16)
    together = run_all(engine, requests)
    assert engine.stats().num_preemptions > 0
    for request in requests:
        assert merged(together[request.request_id]) == merged(serve(request))
    constrained = tokens_of(together["4"])
    assert set(constrained) <= {40, 41, 42}
    assert (41, 42) not in zip(constrained, constrained[1:], strict=False)
    assert len(tokens_of(together["5"])) == 7 and tokens_of(together["5"])[-1] == 1
    assert 30 not in tokens_of(together["3"]) and 9 in tokens_of(together["3"])


def test_a_step_that_changes_nothing_sends_no_tables():
    engine = make_engine()
    seen = []
    submit = engine._runner.submit
    engine._runner.submit = lambda rows, sampling: seen.append(sampling) or submit(rows, sampling)
    run_all(engine, [toy_request("a", [5])])
    assert all(sampling.changes is engine._no_changes for sampling in seen)


def test_watched_tokens_come_with_every_token():
    outputs = serve(toy_request("a", [5, 6], logprob_token_ids=(7, 90), logprobs=20))
    for output in outputs:
        (entry,) = output.logprobs
        assert [token for token, _ in entry.watched] == [7, 90]
        known = dict(entry.top)
        for token, logprob in entry.watched:
            assert logprob == known.get(token, logprob) and logprob < 0
    (entry,) = serve(toy_request("a", [5, 6], logprob_token_ids=(7,)))[0].logprobs
    assert (len(entry.watched), entry.top) == (1, ())

"""Scheduling: budgets kept, order of arrival kept, nothing held by requests that ended."""

import random

import numpy as np
import pytest
from toy_runner import EOS, toy_limits, toy_request

from serving.cache_groups import CacheGroups
from serving.scheduler import Scheduler
from serving.sequence import Finish
from sharding.cache_sizes import CacheSizes


def make(pages=None, *, reuses_pages=False, **changes):
    limits = toy_limits(**changes)
    pages = pages or limits.max_num_seqs * limits.columns
    cache = CacheGroups(
        limits, CacheSizes(window_pages=pages, global_pages=pages, slots=limits.max_num_seqs)
    )
    return (
        limits,
        cache,
        Scheduler(limits, cache, look_back=3, reuses_pages=reuses_pages),
    )


def add(scheduler, length, **sampling):
    return scheduler.add(toy_request("r", range(3, 3 + length), **sampling), 0)


def answer(scheduler, plan, token=5):
    """Gives every sampling row of the plan a token."""
    for rows in plan.rows:
        sequence = scheduler.find(rows.number)
        if rows.samples and sequence is not None:
            sequence.append(token, EOS)
            if sequence.finish is not None:
                scheduler.finish(sequence, sequence.finish)


def shape(plan):
    return [(rows.number, rows.start, len(rows.token_ids), rows.logits) for rows in plan.rows]


def test_a_prompt_is_cut_to_the_token_budget_and_mixed_with_decode():
    _, _, scheduler = make()
    add(scheduler, 4)
    add(scheduler, 30)
    plan = scheduler.schedule()
    assert shape(plan) == [(0, 0, 4, 1), (1, 0, 12, 0)]
    answer(scheduler, plan)
    plan = scheduler.schedule()
    assert shape(plan) == [(0, 4, 1, 1), (1, 12, 15, 0)]
    answer(scheduler, plan)
    plan = scheduler.schedule()
    assert shape(plan) == [(0, 5, 1, 1), (1, 27, 3, 1)]
    np.testing.assert_array_equal(plan.rows[1].token_ids, [30, 31, 32])
    np.testing.assert_array_equal(plan.rows[1].history, [27, 28, 29])


def test_look_back_before_the_prompt_is_minus_one():
    _, _, scheduler = make(max_num_batched_tokens=4)
    add(scheduler, 6)
    assert scheduler.schedule().rows[0].history.tolist() == [-1, -1, -1]
    assert scheduler.schedule().rows[0].history.tolist() == [4, 5, 6]


def test_a_request_waits_for_its_token_before_it_is_scheduled_again():
    _, _, scheduler = make()
    add(scheduler, 4)
    plan = scheduler.schedule()
    assert scheduler.schedule().rows == ()
    answer(scheduler, plan)
    assert shape(scheduler.schedule()) == [(0, 4, 1, 1)]


def test_requests_beyond_max_num_seqs_wait_in_order():
    _, _, scheduler = make()
    sequences = [add(scheduler, 2) for _ in range(6)]
    plan = scheduler.schedule()
    assert [rows.number for rows in plan.rows] == [0, 1, 2, 3]
    assert (scheduler.num_running, scheduler.num_waiting) == (4, 2)
    answer(scheduler, plan)
    scheduler.finish(sequences[2], Finish("abort"))
    assert [rows.number for rows in scheduler.schedule().rows] == [0, 1, 3, 4]


def test_prompt_logprobs_are_asked_once_per_prompt_row_within_the_logit_budget():
    limits, _, scheduler = make(max_model_len=200, max_num_batched_tokens=128)
    add(scheduler, 150, prompt_logprobs=0)
    seen = []
    while -1 not in seen:
        (rows,) = scheduler.schedule().rows
        assert rows.logits - rows.samples <= limits.prompt_logit_rows
        seen += rows.targets.tolist()
    assert seen == [*range(4, 153), -1]


def test_the_youngest_is_preempted_when_pages_run_out():
    _, cache, scheduler = make(pages=8, max_model_len=32)
    for _ in range(2):
        add(scheduler, 15, max_tokens=17)
    preempted = []
    for _ in range(60):
        plan = scheduler.schedule()
        assert [rows.number for rows in plan.rows] == sorted(rows.number for rows in plan.rows)
        preempted += plan.preempted
        answer(scheduler, plan)
    assert preempted and set(preempted) == {1}
    assert not scheduler.has_unfinished
    assert cache.usage == 0


def test_a_preempted_request_computes_its_tokens_so_far_again():
    _, _, scheduler = make(pages=8, max_model_len=32)
    for _ in range(2):
        add(scheduler, 15, max_tokens=17)
    plans = []
    while scheduler.has_unfinished:
        plans.append(scheduler.schedule())
        answer(scheduler, plans[-1], token=len(plans) % 40 + 2)
    young = [rows for plan in plans for rows in plan.rows if rows.number == 1]
    again = [rows for rows in young if rows.start == 0]
    assert len(again) >= 2
    generated = sum(rows.samples for rows in young)
    assert generated == 17


def test_a_preempted_request_with_a_token_on_its_way_waits_for_it():
    _, _, scheduler = make(pages=8, max_model_len=32, max_num_batched_tokens=32)
    old, young = add(scheduler, 16), add(scheduler, 16)
    assert [rows.samples for rows in scheduler.schedule().rows] == [True, True]
    old.append(5, EOS)
    plan = scheduler.schedule()
    assert (shape(plan), plan.preempted) == ([(0, 16, 1, 1)], (1,))
    scheduler.finish(old, Finish("abort"))
    assert scheduler.schedule().rows == ()
    young.append(6, EOS)
    assert shape(scheduler.schedule()) == [(1, 0, 17, 1)]


def test_lower_priorities_run_first_and_lose_their_pages_last():
    _, _, scheduler = make(pages=8, max_model_len=32, max_num_seqs=2, max_num_batched_tokens=32)
    for priority in (5, 0, -1, 0):
        scheduler.add(toy_request("r", range(3, 18), priority=priority, max_tokens=17), 0)
    order, preempted = [], []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        preempted += plan.preempted
        order += [rows.number for rows in plan.rows if rows.start == 0]
        answer(scheduler, plan)
    assert list(dict.fromkeys(order)) == [2, 1, 3, 0]
    assert 2 not in preempted and preempted


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_keeps_every_budget_and_leaks_nothing(seed):
    generator = random.Random(seed)
    pages = generator.choice([16, 20, 31, 64])
    limits, cache, scheduler = make(
        pages=pages, max_num_batched_tokens=generator.choice([4, 7, 16, 40])
    )
    alive, in_flight = {}, []
    for step in range(400):
        if step < 200 and generator.random() < 0.4:
            length = generator.randint(1, 40)
            options = {"prompt_logprobs": 0} if generator.random() < 0.2 else {}
            sequence = add(scheduler, length, max_tokens=generator.randint(1, 30), **options)
            alive[sequence.number] = sequence
        if alive and generator.random() < 0.1:
            number = generator.choice(sorted(alive))
            if scheduler.find(number) is not None:
                scheduler.finish(alive.pop(number), Finish("abort"))
        plan = scheduler.schedule()
        assert plan.num_tokens <= limits.max_num_batched_tokens
        assert sum(rows.logits for rows in plan.rows) <= limits.logit_rows
        numbers = [rows.number for rows in plan.rows]
        assert numbers == sorted(set(numbers)) and len(numbers) <= limits.max_num_seqs
        assert len({rows.slot for rows in plan.rows}) == len(numbers)
        assert len({p for rows in plan.rows for p in rows.global_pages if p >= 0}) == sum(
            int((rows.global_pages >= 0).sum()) for rows in plan.rows
        )
        in_flight.append(plan)
        while len(in_flight) > generator.randint(0, 2):
            answer(scheduler, in_flight.pop(0), token=generator.randint(2, 90))
    while scheduler.has_unfinished:
        in_flight.append(scheduler.schedule())
        answer(scheduler, in_flight.pop(0))
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    assert cache.window.num_used == cache.global_.num_used == 0
    for _ in range(limits.max_num_seqs):
        add(scheduler, 1)
    assert len(scheduler.schedule().rows) == limits.max_num_seqs

"""Reference-counted ids: none is lost, none is handed out twice."""

import random

import pytest

from serving.block_pool import BlockPool


def test_the_longest_free_id_is_handed_out_first():
    pool = BlockPool(3)
    assert pool.allocate(2) == [0, 1]
    pool.release(1)
    pool.release(0)
    assert pool.allocate(3) == [2, 1, 0]


def test_an_id_returns_when_its_last_holder_releases_it():
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.retain(block)
    pool.release(block)
    assert pool.num_free == 0
    pool.release(block)
    assert pool.num_free == 1


def test_too_many_ids_are_refused_and_nothing_is_taken():
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="3 ids wanted, 2 of 2 are free"):
        pool.allocate(3)
    assert pool.num_free == 2


@pytest.mark.parametrize("action", [BlockPool.release, BlockPool.retain])
def test_an_id_that_is_not_in_use_is_refused(action):
    with pytest.raises(ValueError, match="id 0 is not in use"):
        action(BlockPool(1), 0)


def test_random_use_never_shares_or_loses_an_id():
    generator = random.Random(1)
    pool, held = BlockPool(20), {}
    for _ in range(2000):
        action = generator.choice(["take", "retain", "release"])
        if action == "take" and pool.num_free:
            for block in pool.allocate(generator.randint(1, pool.num_free)):
                assert block not in held
                held[block] = 1
        elif held:
            block = generator.choice(sorted(held))
            if action == "retain":
                pool.retain(block)
                held[block] += 1
            else:
                pool.release(block)
                held[block] -= 1
                if not held[block]:
                    del held[block]
        assert pool.num_used == len(held)


def test_content_is_found_until_its_id_is_handed_out_again():
    pool = BlockPool(3)
    first, second, third = pool.allocate(3)
    pool.remember(first, b"a")
    pool.remember(second, b"b")
    for block in (first, second, third):
        pool.release(block)
    assert (pool.find(b"a"), pool.find(b"b"), pool.find(b"c")) == (first, second, None)
    assert pool.allocate(2) == [third, first]
    assert (pool.find(b"a"), pool.find(b"b")) == (None, second)
    pool.retain(second)
    assert pool.num_free == 0
    pool.release(second)
    assert pool.allocate(1) == [second] and pool.find(b"b") is None


def test_passing_content_goes_before_lasting_content():
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    for block, lasting in zip(blocks, (True, False, True, False), strict=True):
        pool.remember(block, bytes([block]))
        pool.release(block, lasting=lasting)
    assert pool.allocate(4) == [blocks[1], blocks[3], blocks[0], blocks[2]]


def test_of_equal_contents_the_one_that_is_held_is_remembered():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.remember(first, b"a")
    pool.remember(second, b"a")
    assert pool.find(b"a") == first
    pool.release(first)
    pool.remember(second, b"a")
    assert pool.find(b"a") == second
    assert pool.allocate(1) == [first] and pool.find(b"a") == second


def test_everything_can_be_forgotten():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    for block in (first, second):
        pool.remember(block, bytes([block]))
    pool.release(first)
    pool.forget_all()
    assert pool.find(bytes([first])) is None and pool.find(bytes([second])) is None
    pool.release(second)
    assert sorted(pool.allocate(2)) == [first, second]


def test_an_id_that_is_free_and_unknown_cannot_be_held():
    with pytest.raises(ValueError, match="id 1 is not in use"):
        BlockPool(2).retain(1)

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

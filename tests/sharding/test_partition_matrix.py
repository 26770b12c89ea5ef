"""Every partition, chunk size and number of microbatches; on demand, a few pairs always."""

import numpy as np
import pytest
from tiny_pipeline import CROSSING, LENGTH

HALVES = (3, 3)
PARTITIONS = [
    ((6,), 1, False),
    (HALVES, 1, False),
    ((6,), 2, False),
    (HALVES, 2, False),
    (HALVES, 2, True),
    (CROSSING, 1, False),
    (CROSSING, 2, False),
]
CUTS = [(1, 1), (2, 2), (3, 3), (5, 4), (LENGTH, 1), (LENGTH, 3)]


def options(stages, tensor, expert):
    return dict(tensor=tensor, expert=expert, relay=stages == CROSSING)


@pytest.mark.full
@pytest.mark.parametrize(("chunk", "microbatches"), CUTS)
@pytest.mark.parametrize(("stages", "tensor", "expert"), PARTITIONS)
def test_cutting_never_changes_a_bit(logits_of, stages, tensor, expert, chunk, microbatches):
    kind = options(stages, tensor, expert)
    cut = logits_of(stages, chunk=chunk, microbatches=microbatches, **kind)
    np.testing.assert_array_equal(cut, logits_of(stages, **kind))


@pytest.mark.full
@pytest.mark.parametrize(("stages", "tensor", "expert"), PARTITIONS)
def test_stages_on_shared_devices_give_the_same_bits(logits_of, stages, tensor, expert):
    kind = options(stages, tensor, expert)
    apart = logits_of(stages, microbatches=2, **kind)
    np.testing.assert_array_equal(
        logits_of(stages, microbatches=3, places=(0,) * len(stages), **kind), apart
    )


@pytest.mark.full
@pytest.mark.parametrize(("stages", "tensor", "expert"), PARTITIONS)
def test_a_partition_agrees_with_one_program(logits_of, whole, stages, tensor, expert):
    logits = logits_of(stages, **options(stages, tensor, expert))
    if tensor == 1:
        np.testing.assert_array_equal(logits, whole)
    error = np.linalg.norm(logits - whole, axis=1) / np.linalg.norm(whole, axis=1)
    assert np.median(error) <= 0.15
    best = np.sort(whole, axis=1)
    clear = best[:, -1] - best[:, -2] > 0.45
    np.testing.assert_array_equal(logits.argmax(1)[clear], whole.argmax(1)[clear])

"""How products of rows are cut and scheduled."""

import pytest

from pallas_kernels.row_matmul import ROW_TILE, Blocks, choose_blocks, choose_schedule


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ((1280, 5120), Blocks(64, 128, 8)),
        ((16384, 1280), Blocks(64, 128, 1)),
        ((288, 5120), Blocks(64, 128, 8)),
        ((5120, 288), Blocks(64, 32, 1)),
        ((32, 5120), Blocks(32, 128, 8)),
        ((10, 96), Blocks(16, 32, 1)),
        ((96, 64, 2), Blocks(16, 64, 1)),
    ],
)
def test_blocks_follow_from_the_weight(weight, expected):
    assert choose_blocks(*weight) == expected


def test_few_rows_share_a_program():
    blocks = choose_blocks(1280, 5120)
    tiles = [choose_schedule(rows, 1280, blocks).tiles for rows in (1, ROW_TILE, 17, 48, 2048)]
    assert tiles == [1, 1, 2, 4, 4]


def test_splits_that_are_not_programs_of_their_own_take_no_memory():
    blocks = choose_blocks(5120, 4096)
    assert blocks.splits > 1
    assert choose_schedule(1, 5120, blocks).programs == blocks.splits
    assert choose_schedule(2048, 5120, blocks).programs == 1


def test_weight_that_does_not_divide_into_blocks_is_named():
    with pytest.raises(ValueError, match="48 outputs in 6 groups and 64 inputs"):
        choose_blocks(48, 64, 6)
    with pytest.raises(ValueError, match="40 inputs"):
        choose_blocks(64, 40)

"""The measure of fragmentation; expected values are worked out by hand."""

from __future__ import annotations

import pytest
from gpupool_nova.fragmentation import Free, Shape, best, fits, fragmentation, increase

SMALL = Shape(25, 1000)
LARGE = Shape(100, 8000)


def test_an_empty_card_has_none_and_a_full_card_has_none():
    assert fragmentation(Free(100, 8000), [SMALL, LARGE]) == 0
    assert fragmentation(Free(0, 8000), [SMALL, LARGE]) == 0


def test_what_only_the_small_request_can_use_is_half_unusable():
    assert fragmentation(Free(40, 8000), [SMALL, LARGE]) == 20


def test_weights_count():
    mix = [Shape(25, 1000, 3), Shape(100, 8000, 1)]
    assert fragmentation(Free(40, 8000), mix) == 10
    assert fragmentation(Free(40, 8000), [Shape(25, 1000, 300), Shape(100, 8000, 100)]) == 10


def test_compute_without_memory_is_unusable():
    assert fragmentation(Free(60, 999), [SMALL]) == 60
    assert fragmentation(Free(60, 1000), [SMALL]) == 0


def test_a_request_that_breaks_a_whole_card_costs():
    # 75 % remain, of which half of the mix can use nothing: 37.5.
    assert increase(Free(100, 8000), SMALL, [SMALL, LARGE]) == 37.5
    # Filling up a card that was broken already gives that back: from 12.5 to 0.
    assert increase(Free(25, 8000), SMALL, [SMALL, LARGE]) == -12.5


def test_the_broken_card_is_filled_first():
    cards = [Free(100, 8000), Free(25, 8000), Free(50, 8000), Free(10, 8000)]
    assert best(cards, SMALL, [SMALL, LARGE]) == 1
    assert best(cards, LARGE, [SMALL, LARGE]) == 0
    assert best(cards[1:], LARGE, [SMALL, LARGE]) is None


def test_of_equal_cards_the_first():
    assert best([Free(100, 8000), Free(100, 8000)], SMALL, [SMALL]) == 0


def test_what_does_not_fit_has_no_increase():
    assert not fits(Free(24, 1000), SMALL)
    with pytest.raises(ValueError):
        increase(Free(24, 1000), SMALL, [SMALL])


@pytest.mark.parametrize("mix", [[], [Shape(1, 1, 0)], [Shape(1, 1, -1), Shape(1, 1, 2)]])
def test_a_mix_without_weight_is_an_error(mix):
    with pytest.raises(ValueError):
        fragmentation(Free(1, 1), mix)

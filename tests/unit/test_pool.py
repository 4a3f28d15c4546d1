"""PagePool against a set, with limits that fall and rise."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from splash_trt.cache.pool import PagePool


class Pools(RuleBasedStateMachine):
    """The model: `held`, and every page below `limit` that is not held is free."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = 6
        self.pool = PagePool(6)
        self.held: set[int] = set()

    @property
    def free(self) -> list[int]:
        return [page for page in range(self.limit) if page not in self.held]

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        free = self.free
        count = data.draw(st.integers(0, len(free)))
        assert self.pool.allocate(count).tolist() == free[:count], "not the lowest free pages"
        self.held |= set(free[:count])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        self.pool.free(pages)
        self.held -= set(pages)

    @rule(limit=st.integers(0, 12))
    def set_limit(self, limit: int) -> None:
        self.pool.set_limit(limit)
        self.limit = limit

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check()
        assert self.pool.limit == self.limit
        assert (self.pool.num_free, self.pool.num_held) == (len(self.free), len(self.held))
        for page in (0, 3, self.limit):
            assert self.pool.held_from(page) == sorted(p for p in self.held if p >= page)


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)


def test_more_pages_than_are_free_is_a_bug() -> None:
    pool = PagePool(3)
    pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.allocate(2)


def test_freeing_twice_is_a_bug() -> None:
    pool = PagePool(3)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(AssertionError, match="not held"):
        pool.free(pages)


def test_a_page_above_a_fallen_limit_does_not_come_back_until_the_limit_rises() -> None:
    pool = PagePool(4)
    pool.allocate(4)
    pool.set_limit(2)
    pool.free([3, 1])
    assert pool.num_free == 1 and pool.held_from(2) == [2]
    pool.set_limit(5)
    assert pool.allocate(3).tolist() == [1, 3, 4]
    pool.check()

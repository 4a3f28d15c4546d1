"""The directory under random sequences of everything that happens to requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from splash_trt.cache.compaction import compact
from splash_trt.cache.directory import Directory
from splash_trt.cache.placement import Placement
from splash_trt.layout.spec import PlacementKind


def missing(directory: Directory, placement: Placement, first: int, count: int) -> np.ndarray:
    """[N]: pages more than are free that ranks need for `count` further pages."""
    return np.maximum(directory.needed_by(placement, None, first, count) - directory.free_pages(), 0)



class Directories(RuleBasedStateMachine):
    """The model: users[rank, page] is the request that holds it; leaving[rank, page] the plan after which it is free.

    Plans are numbered as they are sent; a page that is given back while plan n is the last one stays taken until plan
    n has completed.
    """

    @initialize(limits=st.lists(st.integers(1, 12), min_size=1, max_size=4))
    def start(self, limits: list[int]) -> None:
        self.limits = limits
        self.directory = Directory(limits)
        self.users: dict[tuple[int, int], str] = {}
        self.leaving: dict[tuple[int, int], int] = {}
        self.names: dict[str, int] = {}  # living → pages
        self.sent = self.completed = self.count = 0

    def _name(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.names)))

    def _take(self, name: str, rank: int, page: int) -> None:
        assert 0 <= page < self.limits[rank]
        assert (rank, page) not in self.users, "a page in use was handed out"
        assert (rank, page) not in self.leaving, "a page was handed out before its plan had completed"
        self.users[rank, page] = name

    @rule(kind=st.sampled_from(list(PlacementKind)), data=st.data())
    def open(self, kind: PlacementKind, data: st.DataObject) -> None:
        name = f"r{self.count}"
        self.count += 1
        self.directory.open(name, Placement(kind, data.draw(st.integers(0, len(self.limits) - 1))))
        self.names[name] = 0

    @precondition(lambda self: self.names)
    @rule(count=st.integers(0, 5), data=st.data())
    def grow(self, count: int, data: st.DataObject) -> None:
        name = self._name(data)
        placement, first = self.directory[name].placement, self.names[name]
        if missing(self.directory, placement, first, count).any():
            return
        added = self.directory.grow(name, count).tables
        assert added.dtype == np.int32 and added.shape[1] == 4 and not added[:, 1].any()
        held = placement.holders(first, count, len(self.limits))
        expected = {(rank, first + i) for i, rank in zip(*np.nonzero(held), strict=True)}
        assert len(added) == len(expected) and {(r, i) for r, _, i, _ in added.tolist()} == expected
        for rank, _, index, page in added.tolist():
            self._take(name, rank, page)
            assert self.directory[name].table[index, rank] == page
        self.names[name] += count

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def grow_each(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.names)), unique=True, min_size=1))
        free, expected = self.directory.free_pages(), []
        for name in names:
            need = self.directory[name].placement.pages_per_rank(1, len(free), first_page=self.names[name])
            if (need > free).any():
                break
            free -= need
            expected += [(int(rank), len(expected), name) for rank in np.flatnonzero(need)]
        index = np.array([self.directory[name].index for name in names])
        count, added = self.directory.grow_each(index)
        assert count == len({name for _, _, name in expected})
        assert len(added.tables) == len(expected) and not len(added.target_tables)
        for rank, which, page_index, page in added.tables.tolist():
            name = names[which]
            assert page_index == self.names[name] and self.directory[name].page(page_index, rank) == page
            assert (rank, name) in {(r, n) for r, _, n in expected}
            self._take(name, rank, page)
        for name in names[:count]:
            self.names[name] += 1

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        name = self._name(data)
        self.directory.close(name, step=self.sent)
        for key in [key for key, user in self.users.items() if user == name]:
            del self.users[key]
            self.leaving[key] = self.sent
        del self.names[name]

    @rule(data=st.data(), limit=st.integers(0, 12), budget=st.integers(0, 4))
    def compact(self, data: st.DataObject, limit: int, budget: int) -> None:
        """As the scheduler does: the next plan carries the copies, so it is sent at once."""
        rank = data.draw(st.integers(0, len(self.limits) - 1))
        self.sent += 1
        before = {page for r, page in self.users if r == rank and page >= limit}
        below = [(rank, page) for page in range(min(limit, self.limits[rank]))]
        room = sum(key not in self.users and key not in self.leaving for key in below)
        moved = compact(self.directory, rank, limit, budget, step=self.sent)
        assert len(moved) == min(budget, len(before), room)
        for m in moved:
            name, index, old, new = m.request_id, m.page_index, m.old, m.new
            assert new < limit <= old and self.users.pop((rank, old)) == name
            self.leaving[rank, old] = self.sent
            self._take(name, rank, new)
            assert self.directory[name].table[index, rank] == new

    @rule(count=st.integers(0, 3))
    def send(self, count: int) -> None:
        self.sent += count

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        self.completed = data.draw(st.integers(self.completed, self.sent))
        self.directory.completed(self.completed)
        self.leaving = {key: step for key, step in self.leaving.items() if step > self.completed}

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.directory.check()
        taken = [*self.users, *self.leaving]
        used = [sum(r == rank for r, _ in taken) for rank in range(len(self.limits))]
        assert self.directory.free_pages().tolist() == [a - b for a, b in zip(self.limits, used, strict=True)]
        leaving = [sum(r == rank for r, _ in self.leaving) for rank in range(len(self.limits))]
        assert self.directory.leaving_pages().tolist() == leaving
        assert set(self.directory) == set(self.names)
        for rank in range(len(self.limits)):
            for name, count in self.names.items():
                entry = self.directory[name]
                assert entry.num_pages == count
                present = self.directory.present(rank, np.array([entry.index]))
                assert present.tolist() == [bool((entry.table[:, rank] >= 0).any())]


TestDirectories = Directories.TestCase
TestDirectories.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)


def test_missing_counts_what_lacks_on_each_rank() -> None:
    directory = Directory([2, 5, 1])
    assert missing(directory, Placement(PlacementKind.REPLICATED), 0, 3).tolist() == [1, 0, 2]
    assert missing(directory, Placement(PlacementKind.OWNED, 2), 0, 3).tolist() == [0, 0, 2]
    assert missing(directory, Placement(PlacementKind.STRIPED, 1), 0, 6).tolist() == [0, 0, 1]
    assert missing(directory, Placement(PlacementKind.STRIPED, 1), 1, 1).tolist() == [0, 0, 0]


def test_growing_without_room_is_a_bug() -> None:
    directory = Directory([2])
    directory.open("a", Placement(PlacementKind.REPLICATED))
    with pytest.raises(AssertionError):
        directory.grow("a", 3)


def test_check_finds_a_page_with_two_users() -> None:
    directory = Directory([4])
    for name in ("a", "b"):
        directory.open(name, Placement(PlacementKind.REPLICATED))
        directory.grow(name, 2)
    directory.replace("b", 0, 0, int(directory["a"].table[0, 0]), step=0)
    with pytest.raises(AssertionError, match="two users"):
        directory.check()


def test_check_finds_a_page_that_is_not_where_the_placement_says() -> None:
    directory = Directory([4, 4])
    directory.open("a", Placement(PlacementKind.STRIPED))
    directory.grow("a", 2)
    directory["a"].placement = Placement(PlacementKind.STRIPED, 1)
    with pytest.raises(AssertionError, match="placement"):
        directory.check()

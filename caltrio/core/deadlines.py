"""Deadlines in time order, dropped once they no longer matter."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count


class Deadlines:
    """A heap of (instant, still due?, action). Stale entries leave lazily, but never pile up."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Callable[[], bool], Callable[[int], None]]] = []
        self._order = count()
        self._compact_at = 64

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at_ns: int, due: Callable[[], bool], act: Callable[[int], None]) -> None:
        """Call ``act(now_ns)`` from ``at_ns`` on, if ``due()`` still holds then."""
        heapq.heappush(self._heap, (at_ns, next(self._order), due, act))
        if len(self._heap) >= self._compact_at:
            self._heap = [entry for entry in self._heap if entry[2]()]
            heapq.heapify(self._heap)
            self._compact_at = 2 * len(self._heap) + 64

    def next_ns(self) -> int | None:
        """The next instant at which something is due."""
        while self._heap and not self._heap[0][2]():
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_ns: int) -> Iterator[Callable[[int], None]]:
        """The actions that are due at ``now_ns``, in order of their instants."""
        while self._heap and self._heap[0][0] <= now_ns:
            _, _, due, act = heapq.heappop(self._heap)
            if due():
                yield act

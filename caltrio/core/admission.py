"""Who gets KV, and when: FIFO, event-driven, one attempt per wake-up (specification §7).

A wake-up is something that may have made room: KV given back, or the head of a queue gone. Nothing
polls. Steps of admitted sequences that must grow come before requests that want to enter: those
who hold KV are helped to their end first.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from .job import Job
from .kv import KvCoordinator
from .request import RequestState


class Admission:
    """The two queues for KV of one generation.

    Args:
        kv: of the generation.
        sequences: how many may be active at once; their ids are 0, 1, …
        on_admitted, on_grown: called as a request, or a step, has its KV.
        on_stuck: called if the head cannot be served although no live sequence holds KV, so that
            no end of a sequence will ever make room.
    """

    def __init__(
        self,
        kv: KvCoordinator,
        sequences: int,
        on_admitted: Callable[[RequestState, int], None],
        on_grown: Callable[[Job, int], None],
        on_stuck: Callable[[RequestState, int], None],
    ) -> None:
        self.kv = kv
        self.waiting: deque[RequestState] = deque()  # to enter
        self.growing: deque[Job] = deque()  # to go on
        self._free = list(range(sequences))
        self._on_admitted, self._on_grown, self._on_stuck = on_admitted, on_grown, on_stuck

    def serve(self, now_ns: int) -> None:
        """One wake-up: serve from the heads while it goes; a later one never overtakes."""
        while self.growing:
            job = self.growing[0]
            assert job.kv is not None
            if not self.kv.reserve(job.sequence_id, job.kv.target_len):
                return
            self.growing.popleft()
            self._on_grown(job, now_ns)
        while self.waiting:
            request = self.waiting[0]
            if not self._free or not self.kv.reserve(self._free[0], request.admission_tokens):
                if not self.kv.holders:
                    self._on_stuck(request, now_ns)
                return
            self.waiting.popleft()
            request.sequence_id = heapq.heappop(self._free)
            request.admitted_ns = now_ns
            self._on_admitted(request, now_ns)

    def leave(self, request: RequestState, now_ns: int) -> None:
        """A waiting request goes unserved; it may have stood before one that fits."""
        self.waiting.remove(request)
        self.serve(now_ns)

    def release(self, sequence_id: int, now_ns: int) -> None:
        """A sequence has ended, and the device is done with it."""
        if self.kv.release(sequence_id):
            heapq.heappush(self._free, sequence_id)
        self.serve(now_ns)

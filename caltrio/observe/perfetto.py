"""A trace for the Perfetto UI (JSON trace events): one track a stage, an engine, and a sequence.

Written as the run goes, so that an interrupted run leaves a file that opens. Times are µs with ns
in the decimals, as the format wants.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

from ..core.job import Job, engine_name
from ..device import StageTimes
from ..events import Event, JobEnded
from ..semantics import Dma, EngineSemantics, SlotRelease

_DEVICE, _ENGINES, _HOST, _SEQUENCES = 1, 2, 3, 4
_PROCESSES = {_DEVICE: "device", _ENGINES: "engine slots", _HOST: "host", _SEQUENCES: "sequences"}


class PerfettoTrace:
    """A listener that writes ``path``; a context manager.

    Args:
        path: the file, ``*.json``.
        semantics: says what shares a track.
        max_jobs: later jobs are left out, for the UI's sake; ``left_out`` counts them.
        start_ns: the executor's clock at the start of the run.
    """

    def __init__(
        self, path: Path, semantics: EngineSemantics, max_jobs: int, *, start_ns: int = 0
    ) -> None:
        self.left_out = 0
        self._semantics = semantics
        self._left = max_jobs
        self._start_ns = start_ns
        self._shared = len(semantics.compute_sharing) > 1
        self._tracks: dict[tuple[int, str], int] = {}
        self._lane_ends: dict[tuple[str, int], int] = {}
        self._file = path.open("w", encoding="utf-8")
        self._file.write('{"displayTimeUnit":"ns","traceEvents":[\n')
        self._separator = ""
        for process, name in _PROCESSES.items():
            self._write({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})

    def _write(self, event: dict[str, object]) -> None:
        self._file.write(self._separator + json.dumps(event, separators=(",", ":")))
        self._separator = ",\n"

    def _track(self, process: int, name: str) -> int:
        key = (process, name)
        if key not in self._tracks:
            track = self._tracks[key] = len(self._tracks) + 1
            self._write(
                {
                    "ph": "M",
                    "pid": process,
                    "tid": track,
                    "name": "thread_name",
                    "args": {"name": name},
                }
            )
        return self._tracks[key]

    def _slice(
        self, process: int, track: str, job: Job, start_ns: int | None, end_ns: int | None
    ) -> None:
        if start_ns is None or end_ns is None:
            return
        self._write(
            {
                "ph": "X",
                "pid": process,
                "tid": self._track(process, track),
                "name": f"request {job.request_id} {job.kind.value} {job.step}",
                "ts": (start_ns - self._start_ns) / 1_000,
                "dur": (end_ns - start_ns) / 1_000,
                "args": {
                    "job": job.job_id,
                    "past_len": job.past_len,
                    "tokens": job.token_count,
                    "state": job.state.value,
                },
            }
        )

    def _lane(self, track: str, start_ns: int, end_ns: int) -> str:
        """A track for jobs that may compute at once: slices that overlap on one cannot be shown."""
        lane = 1
        while start_ns < self._lane_ends.get((track, lane), start_ns):
            lane += 1
        self._lane_ends[track, lane] = end_ns
        return track if lane == 1 else f"{track} {lane}"

    def begin(self, start_ns: int) -> None:
        """The run starts only now, as after a warm-up; before the first job."""
        self._start_ns = start_ns

    def __call__(self, event: Event) -> None:
        """Take in one fact."""
        if not isinstance(event, JobEnded) or event.job.request.warmup:
            return
        if self._left <= 0:
            self.left_out += 1
            return
        self._left -= 1
        job, times = event.job, event.job.timings
        stages = job.stages if isinstance(job.stages, StageTimes) else StageTimes()
        half = self._semantics.dma is Dma.HALF_DUPLEX
        slot = engine_name(stages.engine)
        starts, ends = stages.die_start_ns or [], stages.die_end_ns or []
        name = "compute" if len(starts) <= 1 else "die"
        for die, (start, end) in enumerate(zip(starts, ends, strict=True)):
            track = name if len(starts) <= 1 else f"{name}{die}"
            if self._shared:
                track = self._lane(f"{track} ({slot})", start, end)
            self._slice(_DEVICE, track, job, start, end)
        h2d, d2h = ("dma", "dma") if half else ("h2d", "d2h")
        self._slice(_DEVICE, h2d, job, stages.h2d_start_ns, stages.h2d_end_ns)
        self._slice(_DEVICE, d2h, job, stages.d2h_start_ns, stages.d2h_end_ns)
        freed = {
            SlotRelease.H2D: stages.h2d_end_ns,
            SlotRelease.COMPUTE: ends[-1] if ends else None,
            SlotRelease.D2H: stages.d2h_end_ns,
            SlotRelease.WAIT: times.waited_ns,
        }[self._semantics.slot_release]
        self._slice(_ENGINES, slot, job, times.submitted_ns, freed)
        self._slice(_HOST, "submitter", job, times.infer_ns, times.submitted_ns)
        self._slice(_HOST, "completer", job, times.waited_ns, times.ended_ns)
        self._slice(_SEQUENCES, f"sequence {job.sequence_id}", job, times.accepted_ns, times.ended_ns)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._file.write("\n]}\n")
        self._file.close()

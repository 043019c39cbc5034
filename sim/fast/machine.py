"""The state of one simulated card and its executor: one array of int64 that compiled code can hold.

Scalars come first, at the names below. Tables follow; ``AT_…`` says where each begins, and its
columns have names too: the steps of the request with index ``r`` are at ``m[AT_REQUESTS] + r *
REQUEST_COLUMNS + STEPS_TAKEN``. Times are ns, ``NEVER`` for what is not scheduled, ``NONE`` for what
has not happened.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from attrs import define
from numpy.typing import NDArray

from caltrio.costs import TABLE_SIZE

from .queues import ITEMS, ROOM, ROWS, WIDTH

NEVER = 2**62
NONE = -1
EVENT_WIDTH = 4  # (when, rank and job, what, who)

# --- scalars --------------------------------------------------------------------------------------
(
    NOW, HORIZON, STATUS, NEXT_JOB, CURSOR, STARTED, OPEN, ENDED_REQUESTS, JOB_ROWS,
    LAST_CLIENT, GAVE_UP_END,
    # what is configured
    REQUESTS, CLIENTS, LIMIT, MAX_QUEUE, KV_CAPACITY, MAX_SEQ, GROWS, DECODE_FIRST, CHUNK,
    ADMISSION_TIMEOUT, QUEUE_TIMEOUT, EXECUTION_TIMEOUT, GRACE,
    ENGINES, GROUPS, SHARE_LIMIT, DIES, SPEEDS, OVERLAP, HALF_DUPLEX, AT_ISSUE, SLOT_RELEASE,
    COMPUTE_IDLE, ANY_ORDER, BUSY_WHEN_FULL, KEEP_JOBS,
    # core
    IN_FLIGHT, KV_RESERVED, WAITING, ENTERING, ORDER,
    # submitter, completer
    SUBMITTING, SLOT_WANTED, IN_WAIT,
    # engine
    COMPUTES_QUEUED, WHOLE_TAKEN,
    # for the summary
    STEPS, DELIVERED, UNTIL, DELIVERED_UNTIL, LAST_DELIVERY, SUBMIT_BUSY, COMPLETER_BUSY,
    H2D_BUSY, D2H_BUSY, COMPUTE_ON, COMPUTE_SINCE, COMPUTE_BUSY,
    DEVICE_ON, DEVICE_SINCE, DEVICE_BUSY, DEVICE_OVERLAP,
    # where the tables begin that have no place of their own
    AT_REQUESTS, AT_JOBS, AT_RUNNING, AT_SPEEDS, WAITING_REQUESTS, SOON, DEADLINES,
    DEADLINE_ROOM, JOB_WIDTH,
    SCALARS,
) = range(73)  # fmt: skip

# What the twin covers: the tables that events touch have places of their own, which compiled code need
# not look up.
MOST_DIES, MOST_ENGINES, MOST_SEQUENCES = 8, 64, 1024
AT_COSTS = SCALARS
AT_ON = AT_COSTS + TABLE_SIZE  # does channel 0, or 1, serve a turn?
AT_DIES = AT_ON + 2

# STATUS: why the loop stopped early.
RUNNING, FLUSH, FAULT_BUSY, FAULT_EXECUTION, FAULT_INFER, FAULT_DRAIN, TOO_LONG = range(7)

# --- a sequence and its one job under way ---------------------------------------------------------
(
    JOB, REQUEST, KIND, TOKENS, PAST, STEP, STATE, GAVE_UP, RESERVED,
    GROUP, SLOT, JOINED, READY_H2D, READY_D2H, FINISHED, H2D_NS, D2H_NS, COMPUTE_NS, REMAINING,
    ACCEPTED, INFER, SUBMITTED, H2D_START, H2D_END, D2H_START, D2H_END, WAITED, ANSWERED,
    SEQUENCE_COLUMNS,
) = range(29)  # fmt: skip

IDLE, GROWING, QUEUED, ACTIVE = range(4)  # STATE

# --- a request ------------------------------------------------------------------------------------
(
    PROMPT, OUTPUT, ARRIVAL, KV_TOKENS, SEQUENCE, ADMITTED, FIRST, LAST, ENDED, TOKENS_OUT, STEPS_TAKEN,
    OUTCOME, REASON, DETAIL, END_ORDER, CLOSING,
    REQUEST_COLUMNS,
) = range(17)  # fmt: skip

OPEN_OUTCOME, COMPLETED, REFUSED, EXPIRED, FAILED = range(5)  # OUTCOME
(
    NO_REASON, TOO_FEW_TOKENS, TOO_LONG_FOR_MODEL, ABOVE_THE_CARD, QUEUE_FULL, NOT_ADMITTED,
    NO_GROWTH, LATE_ADMISSION, LATE_QUEUE,
) = range(9)  # fmt: skip

# --- an ended job; two more columns for each die at the end ---------------------------------------
(
    ROW_JOB, ROW_REQUEST, ROW_SEQUENCE, ROW_KIND, ROW_STEP, ROW_PAST, ROW_TOKENS, ROW_ENGINE,
    ROW_REASON, ROW_ACCEPTED, ROW_INFER, ROW_SUBMITTED, ROW_H2D_START, ROW_H2D_END,
    ROW_D2H_START, ROW_D2H_END, ROW_WAITED, ROW_ENDED, ROW_ANSWERED,
    JOB_COLUMNS,
) = range(20)  # fmt: skip

# --- SOON: what happens before the next timed event, each (what, who, more) -----------------------
WAKE_ADMITTED, WAKE_FAILED, WAKE_LEFT, CLAIMED, DRAINED, DIE_DONE = range(6)

# --- DEADLINES: rows (at, order, who, what, job) --------------------------------------------------
OF_REQUEST, OF_ADMISSION, OF_QUEUE = range(3)

# --- engine slots, and groups of buffers ----------------------------------------------------------
E_FREE, E_LOAD, E_PREFILL_FREE, E_DECODE_FREE, E_ON, E_SINCE, E_BUSY, E_USED, ENGINE_COLUMNS = range(9)

# --- a die ----------------------------------------------------------------------------------------
D_PART_END, D_SINCE, D_RUNNING, D_ON_SINCE, D_BUSY, D_FORESEEN, DIE_COLUMNS = range(7)


# --- the other fixed places -----------------------------------------------------------------------

AT_ENGINES = AT_DIES + MOST_DIES * DIE_COLUMNS
AT_SEQUENCES = AT_ENGINES + MOST_ENGINES * ENGINE_COLUMNS
AT_DIE_TIMES = AT_SEQUENCES + MOST_SEQUENCES * SEQUENCE_COLUMNS
EVENTS = AT_DIE_TIMES + MOST_SEQUENCES * 2 * MOST_DIES  # each job has one at most
FREE_IDS = EVENTS + 1 + EVENT_WIDTH * (MOST_SEQUENCES + MOST_DIES + 8)
# Rings of sequences, and of turns: half duplex has two of each sequence in one queue.
RING_LENGTH = ITEMS + 2 * MOST_SEQUENCES + 2
READY = FREE_IDS + ROWS + WIDTH * (MOST_SEQUENCES + 1)
GROWING_STEPS = READY + RING_LENGTH
ISSUED = GROWING_STEPS + RING_LENGTH
FINISHED_JOBS = ISSUED + RING_LENGTH
WHOLE = FINISHED_JOBS + RING_LENGTH
HELD = WHOLE + RING_LENGTH
CHANNELS = HELD + RING_LENGTH  # two
DIE_QUEUES = CHANNELS + 2 * RING_LENGTH  # one a die
FIXED = DIE_QUEUES + MOST_DIES * RING_LENGTH


@define(eq=False)
class Machine:
    """One card with its executor: the array ``m``, and views of its tables.

    Attributes:
        m: everything; what compiled code gets.
        requests: ``[n, REQUEST_COLUMNS]``.
        jobs: ``[rows, …]``, the job table as far as it is kept.
        engines, dies: ``[engines, ENGINE_COLUMNS]``, ``[dies, DIE_COLUMNS]``.
    """

    m: NDArray[np.int64]
    requests: NDArray[np.int64]
    jobs: NDArray[np.int64]
    engines: NDArray[np.int64]
    dies: NDArray[np.int64]


def lay_out(
    costs: NDArray[np.int64],
    *,
    requests: int,
    sequences: int,
    waiting: int,
    engines: int,
    dies: int,
    speeds: int,
    job_rows: int,
) -> Machine:
    """An array with room for all tables, whose scalars say where they are.

    ``waiting``: requests that may wait for admission at once.
    """
    width = JOB_COLUMNS + 2 * dies
    deadlines = 2 * waiting + 4 * sequences + 64  # those that matter are fewer
    soon = ITEMS + 3 * (waiting + 4 * sequences + 16)
    sizes: Mapping[str, int] = {
        "AT_RUNNING": dies * speeds,
        "AT_SPEEDS": speeds,
        "WAITING_REQUESTS": ITEMS + waiting + 2,
        "SOON": soon,
        "DEADLINES": ROWS + WIDTH * deadlines,
        "AT_REQUESTS": requests * REQUEST_COLUMNS,
        "AT_JOBS": job_rows * width,
    }
    m = np.zeros(FIXED + sum(sizes.values()), np.int64)
    at = {"AT_ENGINES": AT_ENGINES, "AT_DIES": AT_DIES}
    begin = FIXED
    for name, size in sizes.items():
        at[name] = begin
        m[globals()[name]] = begin
        begin += size
    m[[DEADLINE_ROOM, JOB_WIDTH, DIES, SPEEDS]] = deadlines, width, dies, speeds
    m[AT_COSTS:AT_ON] = costs
    m[READY + ROOM : FIXED : RING_LENGTH] = RING_LENGTH - ITEMS
    m[at["WAITING_REQUESTS"] + ROOM] = waiting + 2
    m[at["SOON"] + ROOM] = soon - ITEMS

    def view(name: str, rows: int, columns: int) -> NDArray[np.int64]:
        return m[at[name] : at[name] + rows * columns].reshape(rows, columns)

    return Machine(
        m,
        view("AT_REQUESTS", requests, REQUEST_COLUMNS),
        view("AT_JOBS", job_rows, width),
        view("AT_ENGINES", engines, ENGINE_COLUMNS),
        view("AT_DIES", dies, DIE_COLUMNS),
    )

"""The twin's event loop: the rules of the executor and of the simulated card, compiled.

Each function names the rule that it carries out. Rules of ``Core``, ``Admission`` and so on are in
:mod:`caltrio.core`, those of the card in :mod:`sim.engine` and :mod:`sim.device`, the order of what
happens at one instant in :class:`caltrio.timer.Rank`. ``tests/sim/test_parity.py`` shows that both give
the same tables, to the nanosecond.

What an event makes happen at once, but after all tasks have come to rest, goes through the ring
``SOON``: there SimPy has events without delay, and the executor wakes several callers one by one.
"""

# ruff: noqa: F403, F405 - two hundred names of columns
from __future__ import annotations

from typing import Any

from numba import njit

from caltrio.costs import DECODE, PREFILL, stage_ns
from caltrio.semantics import PERMILLE
from caltrio.timing import Stage

from .events import *
from .machine import *
from .queues import ROWS, SIZE, WIDTH, add, drop, first, nth, pointer, pop, push, remove, rise

_SUBMIT, _H2D, _COMPUTE, _D2H = int(Stage.SUBMIT), int(Stage.H2D), int(Stage.COMPUTE), int(Stage.D2H)
_INTERRUPT, _POSTPROCESS = int(Stage.INTERRUPT), int(Stage.POSTPROCESS)
_CLIENT = int(Stage.CLIENT)
_LONGEST_NS = 2**52  # beyond, thousandths of a ns leave 64 bits

rule = njit(cache=True, error_model="numpy")
hot = njit(cache=True, error_model="numpy", forceinline=True)
inlined = njit(
    inline="always", error_model="numpy"
)  # called from one place: a call costs more than it does

AFTER_H2D, AFTER_COMPUTE, AFTER_D2H, AFTER_WAIT = range(4)  # SLOT_RELEASE


@hot
def _job(s: int) -> Any:
    return AT_SEQUENCES + s * SEQUENCE_COLUMNS


@hot
def request_at(m: Any, r: int) -> Any:
    """Where the row of request ``r`` begins."""
    return m[AT_REQUESTS] + r * REQUEST_COLUMNS


@hot
def _engine(index: int) -> Any:
    return AT_ENGINES + index * ENGINE_COLUMNS


@hot
def _die(d: int) -> Any:
    return AT_DIES + d * DIE_COLUMNS


@hot
def _die_times(m: Any, s: int) -> Any:
    return AT_DIE_TIMES + s * 2 * m[DIES]


@hot
def _cost(m: Any, stage: int, s: int) -> Any:
    """Durations are pure functions: when they are asked for does not matter."""
    job = _job(s)
    kind, tokens, past = m[job + KIND], m[job + TOKENS], m[job + PAST]
    ns = stage_ns(m, AT_COSTS, stage, kind, tokens, past, m[job + REQUEST], m[job + STEP])
    if ns > _LONGEST_NS:
        m[STATUS] = TOO_LONG
    return ns


@hot
def _later(m: Any, what: int, who: int, more: int) -> None:
    push(m, m[SOON], what)
    push(m, m[SOON], who)
    push(m, m[SOON], more)


# --- engine slots (sim/engine.py) -----------------------------------------------------------------
@hot
def _free_slot(m: Any, s: int) -> Any:
    """``Engine.free_slot``: the one that the job is bound to, or any with one in flight (§6.4)."""
    if m[LIMIT] > 1:
        slot = m[_job(s) + GROUP]
        return slot if m[_engine(slot) + E_FREE] else NONE
    for slot in range(m[ENGINES]):
        if m[_engine(slot) + E_FREE]:
            return slot
    return NONE


@hot
def _release_slot(m: Any, slot: int) -> None:
    """``Engine.release_slot``: a submitter that waits for it goes on at this instant."""
    m[_engine(slot) + E_FREE] = 1
    if m[SLOT_WANTED] and _free_slot(m, m[SUBMITTING]) != NONE:
        m[SLOT_WANTED] = 0
        schedule(m, m[NOW], SUBMIT_RETURNED, m[_job(m[SUBMITTING]) + JOB], m[SUBMITTING])


# --- DMA channels: a turn is 2 * sequence, and 1 more for D2H -------------------------------------
@hot
def _channel_next(m: Any, c: int) -> None:
    """``Channel._next``: the head of the queue, once it is ready."""
    queue = CHANNELS + c * RING_LENGTH
    if m[AT_ON + c] or m[queue + SIZE] == 0:
        return
    turn = first(m, queue)
    if m[_job(turn >> 1) + READY_H2D + (turn & 1)]:
        pop(m, queue)
        _channel_begins(m, c, turn)


@hot
def _channel_begins(m: Any, c: int, turn: int) -> None:
    job, now = _job(turn >> 1), m[NOW]
    m[AT_ON + c] = 1
    if turn & 1:
        m[job + D2H_START] = now
        schedule(m, now + m[job + D2H_NS], CHANNEL_END, m[job + JOB], turn)
        m[D2H_BUSY] += m[job + D2H_NS]
    else:
        m[job + H2D_START] = now
        schedule(m, now + m[job + H2D_NS], CHANNEL_END, m[job + JOB], turn)
        m[H2D_BUSY] += m[job + H2D_NS]
        m[COMPUTES_QUEUED] += 1
        _device(m, 1)


@hot
def _device(m: Any, change: int) -> None:
    """One job more or less on the device: its busy time, and that of two or more."""
    lasted = m[NOW] - m[DEVICE_SINCE]
    m[DEVICE_SINCE] = m[NOW]
    if m[DEVICE_ON] > 0:
        m[DEVICE_BUSY] += lasted
    if m[DEVICE_ON] > 1:
        m[DEVICE_OVERLAP] += lasted
    m[DEVICE_ON] += change


@hot
def _serve_h2d(m: Any, s: int) -> None:
    """``Channel.serve``: the turn is ready."""
    job = _job(s)
    m[job + READY_H2D] = 1
    if m[job + JOINED]:
        _channel_next(m, 0)
    elif m[AT_ON] == 0 and m[CHANNELS + SIZE] == 0:
        _channel_begins(m, 0, 2 * s)
    else:
        push(m, CHANNELS, 2 * s)
        _channel_next(m, 0)


@hot
def _serve_d2h(m: Any, s: int) -> None:
    job = _job(s)
    c = 0 if m[HALF_DUPLEX] else 1
    queue = CHANNELS + c * RING_LENGTH
    m[job + READY_D2H] = 1
    if m[job + JOINED]:
        _channel_next(m, c)
    elif m[AT_ON + c] == 0 and m[queue + SIZE] == 0:
        _channel_begins(m, c, 2 * s + 1)
    else:
        push(m, queue, 2 * s + 1)
        _channel_next(m, c)


@inlined
def _channel_ends(m: Any, turn: int) -> None:
    """The channel takes its next turn first, then the job goes on."""
    c = 0 if m[HALF_DUPLEX] else turn & 1
    m[AT_ON + c] = 0
    _channel_next(m, c)
    if turn & 1:
        _after_d2h(m, turn >> 1)
    else:
        _after_h2d(m, turn >> 1)


# --- dies -----------------------------------------------------------------------------------------
@hot
def _part_ns(m: Any, d: int, s: int) -> Any:
    """``split_permille``: whole nanoseconds, and nothing is lost."""
    total = m[_job(s) + COMPUTE_NS]
    if m[DIES] == 1:
        return total
    before = m[_die(d - 1) + D_PART_END] if d > 0 else 0
    return total * m[_die(d) + D_PART_END] // PERMILLE - total * before // PERMILLE


@hot
def _serve_die(m: Any, d: int, s: int) -> None:
    queue = DIE_QUEUES + d * RING_LENGTH
    if m[SPEEDS] > 1:
        push(m, queue, s)
        _progress(m, d)
        m[_job(s) + REMAINING] = _part_ns(m, d, s) * PERMILLE
        _refill(m, d)
    elif m[_die(d) + D_RUNNING] == 0 and m[queue + SIZE] == 0:
        _die_takes(m, d, s)
    else:
        push(m, queue, s)


@hot
def _die_begins(m: Any, d: int, s: int) -> None:
    now = m[NOW]
    m[_die_times(m, s) + 2 * d] = now
    if d == 0:
        if m[COMPUTE_ON] == 0:
            m[COMPUTE_SINCE] = now
        m[COMPUTE_ON] += 1
    die = _die(d)
    if m[die + D_RUNNING] == 0:
        m[die + D_ON_SINCE] = now
    m[die + D_RUNNING] += 1


@hot
def _die_next(m: Any, d: int) -> None:
    """``Channel._next`` of a die that serves one job at a time."""
    queue = DIE_QUEUES + d * RING_LENGTH
    if m[queue + SIZE] > 0:
        _die_takes(m, d, pop(m, queue))


@hot
def _die_takes(m: Any, d: int, s: int) -> None:
    _die_begins(m, d, s)
    schedule(m, m[NOW] + _part_ns(m, d, s), DIE_END, m[_job(s) + JOB], s * MOST_DIES + d)


@rule
def _progress(m: Any, d: int) -> None:
    """``SharedUnit._progress``: the work done since the number of running jobs last changed."""
    die, running = _die(d), m[AT_RUNNING] + d * m[SPEEDS]
    count = m[die + D_RUNNING]
    if count > 0:
        done = (m[NOW] - m[die + D_SINCE]) * m[m[AT_SPEEDS] + count - 1]
        for index in range(count):
            m[_job(m[running + index]) + REMAINING] -= done
    m[die + D_SINCE] = m[NOW]


@rule
def _refill(m: Any, d: int) -> None:
    """``SharedUnit._refill``: start whom there is room for, and foresee the next end."""
    die, running = _die(d), m[AT_RUNNING] + d * m[SPEEDS]
    queue = DIE_QUEUES + d * RING_LENGTH
    while m[queue + SIZE] > 0 and m[die + D_RUNNING] < m[SPEEDS]:
        s = pop(m, queue)
        m[running + m[die + D_RUNNING]] = s
        _die_begins(m, d, s)
    count = m[die + D_RUNNING]
    if m[die + D_FORESEEN] != NONE:  # any end foreseen before now is void
        unschedule(m, DIE_END, m[die + D_FORESEEN] * MOST_DIES + d)
        m[die + D_FORESEEN] = NONE
    if count == 0:
        return
    best = m[running]
    for index in range(1, count):
        one, other = _job(m[running + index]), _job(best)
        if m[one + REMAINING] < m[other + REMAINING] or (
            m[one + REMAINING] == m[other + REMAINING] and m[one + JOB] < m[other + JOB]
        ):
            best = m[running + index]
    speed = m[m[AT_SPEEDS] + count - 1]
    remaining = max(m[_job(best) + REMAINING], 0)
    m[die + D_FORESEEN] = best
    when = m[NOW] + (remaining + speed - 1) // speed
    schedule(m, when, DIE_END, m[_job(best) + JOB], best * MOST_DIES + d)


@inlined
def _die_ends(m: Any, which: int) -> None:
    """The die takes its next turn first, then the job goes on."""
    s, d = which // MOST_DIES, which % MOST_DIES
    die, running = _die(d), m[AT_RUNNING] + d * m[SPEEDS]
    if m[SPEEDS] > 1:
        m[die + D_FORESEEN] = NONE
        _progress(m, d)
        index = 0
        while m[running + index] != s:
            index += 1
        while index + 1 < m[die + D_RUNNING]:
            m[running + index] = m[running + index + 1]
            index += 1
    m[die + D_RUNNING] -= 1
    if m[die + D_RUNNING] == 0:
        m[die + D_BUSY] += m[NOW] - m[die + D_ON_SINCE]
    if m[SPEEDS] > 1:
        _refill(m, d)
        _later(m, DIE_DONE, s, d)
        return
    _die_next(m, d)
    _die_done(m, d, s)


# --- the way of a job on the device (Engine._run) -------------------------------------------------
@inlined
def _start(m: Any, s: int, slot: int) -> None:
    """``Engine.start``: the job takes its slot, and is on its way."""
    job = _job(s)
    m[_engine(slot) + E_FREE] = 0
    m[job + SLOT] = slot
    m[job + H2D_NS] = _cost(m, _H2D, s)
    m[job + D2H_NS] = _cost(m, _D2H, s)
    m[job + READY_H2D] = 0
    m[job + READY_D2H] = 0
    m[job + FINISHED] = 0
    m[job + JOINED] = m[AT_ISSUE]
    if m[AT_ISSUE]:
        push(m, CHANNELS, 2 * s)
        push(m, CHANNELS + (0 if m[HALF_DUPLEX] else RING_LENGTH), 2 * s + 1)
    if m[OVERLAP]:
        _serve_h2d(m, s)
    elif m[WHOLE_TAKEN]:
        push(m, WHOLE, s)
    else:
        m[WHOLE_TAKEN] = 1
        _later(m, CLAIMED, s, 0)


@inlined
def _after_h2d(m: Any, s: int) -> None:
    job = _job(s)
    m[job + H2D_END] = m[NOW]
    if m[SLOT_RELEASE] == AFTER_H2D:
        _release_slot(m, m[job + SLOT])
    m[job + COMPUTE_NS] = _cost(m, _COMPUTE, s)
    _serve_die(m, 0, s)


@hot
def _die_done(m: Any, d: int, s: int) -> None:
    """The next die of the pipeline, or what follows the last one."""
    m[_die_times(m, s) + 2 * d + 1] = m[NOW]
    if d + 1 < m[DIES]:
        _serve_die(m, d + 1, s)
        return
    m[COMPUTE_ON] -= 1
    if m[COMPUTE_ON] == 0:
        m[COMPUTE_BUSY] += m[NOW] - m[COMPUTE_SINCE]
    m[COMPUTES_QUEUED] -= 1
    if m[SLOT_RELEASE] == AFTER_COMPUTE:
        _release_slot(m, m[_job(s) + SLOT])
    if not m[COMPUTE_IDLE]:
        _serve_d2h(m, s)
        return
    push(m, HELD, s)  # Engine._computes_drained: in the order of their ends
    while m[COMPUTES_QUEUED] == 0 and m[HELD + SIZE] > 0:
        _later(m, DRAINED, pop(m, HELD), 0)


@inlined
def _after_d2h(m: Any, s: int) -> None:
    job = _job(s)
    m[job + D2H_END] = m[NOW]
    _device(m, -1)
    if not m[OVERLAP]:
        if m[WHOLE + SIZE] > 0:
            _later(m, CLAIMED, pop(m, WHOLE), 0)
        else:
            m[WHOLE_TAKEN] = 0
    if m[SLOT_RELEASE] == AFTER_D2H:
        _release_slot(m, m[job + SLOT])
    schedule(m, m[NOW] + _cost(m, _INTERRUPT, s), INTERRUPT, m[job + JOB], s)


# --- Wait() (sim/device.py) -----------------------------------------------------------------------
@hot
def _offer(m: Any) -> Any:
    """``SimDevice._offer``: the job for which ``Wait()`` returns now, if somebody is in it."""
    queue = FINISHED_JOBS if m[ANY_ORDER] else ISSUED
    if not m[IN_WAIT] or m[queue + SIZE] == 0:
        return NONE
    s = first(m, queue)
    if not m[_job(s) + FINISHED]:
        return NONE
    pop(m, queue)
    m[IN_WAIT] = 0
    return s


@inlined
def _interrupted(m: Any, s: int) -> None:
    """``SimDevice._finished``."""
    m[_job(s) + FINISHED] = 1
    if m[ANY_ORDER]:
        push(m, FINISHED_JOBS, s)
    returned = _offer(m)
    if returned == s:
        _wait_returned(m, s)  # its event would be the next: same instant, rank and job
    elif returned != NONE:
        schedule(m, m[NOW], WAIT_RETURNED, m[_job(returned) + JOB], returned)


@rule
def _wait_returned(m: Any, s: int) -> None:
    """``Core.wait_returned``: the permit comes back. Then the completer converts the output."""
    now, job = m[NOW], _job(s)
    slot = _engine(m[job + SLOT])
    if m[SLOT_RELEASE] == AFTER_WAIT:
        _release_slot(m, m[job + SLOT])
    m[slot + E_ON] -= 1
    if m[slot + E_ON] == 0:
        m[slot + E_BUSY] += now - m[slot + E_SINCE]
    m[IN_FLIGHT] -= 1
    m[_engine(m[job + GROUP]) + E_LOAD] -= 1
    m[job + WAITED] = now
    if m[EXECUTION_TIMEOUT] and now > m[job + SUBMITTED] + m[EXECUTION_TIMEOUT]:
        m[STATUS] = FAULT_EXECUTION
    _stage(m)
    if m[job + GAVE_UP]:
        _completed(m, s)
    else:
        schedule(m, now + _cost(m, _POSTPROCESS, s), COMPLETER_DONE, m[job + JOB], s)


# --- the executor (caltrio/core/scheduler.py, caltrio/executor.py) --------------------------------
@rule
def _stage(m: Any) -> None:
    """``Core._stage``: the next ready job to the submitter, if that is idle and a permit is free.

    The submitter prepares it, and is in ``infer()``, at this very instant.
    """
    if m[READY + SIZE] == 0 or m[SUBMITTING] != NONE or m[IN_FLIGHT] >= m[LIMIT]:
        return
    s = first(m, READY)
    if m[DECODE_FIRST]:
        for index in range(m[READY + SIZE]):
            other = nth(m, READY, index)
            if m[_job(other) + KIND] == DECODE:
                s = other
                break
    job = _job(s)
    buffers = E_DECODE_FREE if m[job + KIND] == DECODE else E_PREFILL_FREE
    group, load = NONE, m[SHARE_LIMIT]  # an engine takes its share; the least loaded goes first
    for index in range(m[GROUPS]):
        engine = _engine(index)
        if m[engine + E_LOAD] < load and m[engine + buffers] > 0:
            group, load = index, m[engine + E_LOAD]
    if group == NONE:
        return
    remove(m, READY, s)
    engine = _engine(group)
    m[engine + buffers] -= 1
    m[engine + E_LOAD] += 1
    m[IN_FLIGHT] += 1
    m[job + STATE] = ACTIVE
    m[job + GROUP] = group
    m[job + INFER] = m[NOW]
    m[SUBMITTING] = s
    schedule(m, m[NOW] + _cost(m, _SUBMIT, s), SUBMIT_RETURNED, m[job + JOB], s)
    if m[QUEUE_TIMEOUT]:
        _deadline(m, m[NOW] + m[QUEUE_TIMEOUT], s, OF_QUEUE, m[job + JOB])


@inlined
def _submit(m: Any, s: int) -> None:
    """``SimDevice.infer`` once the submitter has done its work, and ``Core.submit_returned``."""
    now, job = m[NOW], _job(s)
    slot = _free_slot(m, s)
    if slot == NONE:
        if m[BUSY_WHEN_FULL]:
            m[STATUS] = FAULT_BUSY
        m[SLOT_WANTED] = 1
        return
    if not m[ANY_ORDER]:
        push(m, ISSUED, s)
    _start(m, s, slot)
    engine = _engine(slot)
    if m[engine + E_ON] == 0:
        m[engine + E_SINCE] = now
    m[engine + E_ON] += 1
    m[engine + E_USED] = 1
    m[SUBMITTING] = NONE
    m[job + SUBMITTED] = now
    m[SUBMIT_BUSY] += now - m[job + INFER]
    if m[QUEUE_TIMEOUT] and now > m[job + INFER] + m[QUEUE_TIMEOUT] + m[GRACE]:
        m[STATUS] = FAULT_INFER
    _stage(m)


@rule
def _completed(m: Any, s: int) -> None:
    """``Core.completed``; then the completer waits again, and then the caller goes on."""
    now, job = m[NOW], _job(s)
    request = request_at(m, m[job + REQUEST])
    held = m[job + PAST] + m[job + TOKENS]
    gave_up = m[job + GAVE_UP]
    buffers = E_DECODE_FREE if m[job + KIND] == DECODE else E_PREFILL_FREE
    m[_engine(m[job + GROUP]) + buffers] += 1
    if not gave_up:
        m[job + ANSWERED] = now
        m[COMPLETER_BUSY] += now - m[job + WAITED]
        if m[request + OUTPUT] > 0 and held >= m[request + PROMPT]:
            m[DELIVERED] += 1
            m[LAST_DELIVERY] = now
            if now == m[UNTIL]:
                m[DELIVERED_UNTIL] = m[DELIVERED]
    _job_ended(m, s, LATE_QUEUE if gave_up else NO_REASON)
    m[job + STATE] = IDLE
    if gave_up:
        m[GAVE_UP_END] = now
        if m[request + CLOSING]:
            _end_admitted(m, s, EXPIRED)
    _stage(m)
    m[IN_WAIT] = 1
    returned = _offer(m)
    if returned != NONE:
        schedule(m, now, WAIT_RETURNED, m[_job(returned) + JOB], returned)
    if gave_up:
        return
    if held < m[request + PROMPT]:
        _next_step(m, s)
    elif m[request + OUTPUT] == 0:
        _end_admitted(m, s, COMPLETED)
        _client_done(m)
    else:  # Sequence.emit_token
        schedule(m, now + _cost(m, _CLIENT, s), CLIENT_READY, m[job + JOB], s)


@rule
def _job_ended(m: Any, s: int, reason: int) -> None:
    """Its row of the job table; ``reason``: why it failed, if it did."""
    m[STEPS] += 1
    if not m[KEEP_JOBS]:
        return
    job, times = _job(s), _die_times(m, s)
    row = m[AT_JOBS] + m[JOB_ROWS] * m[JOB_WIDTH]
    m[JOB_ROWS] += 1
    if m[JOB_ROWS] >= m[KEEP_JOBS] and m[STATUS] == RUNNING:
        m[STATUS] = FLUSH
    m[row + ROW_JOB] = m[job + JOB]
    m[row + ROW_REQUEST] = m[job + REQUEST]
    m[row + ROW_SEQUENCE] = s
    m[row + ROW_KIND] = m[job + KIND]
    m[row + ROW_STEP] = m[job + STEP]
    m[row + ROW_PAST] = m[job + PAST]
    m[row + ROW_TOKENS] = m[job + TOKENS]
    m[row + ROW_REASON] = reason
    m[row + ROW_ACCEPTED] = m[job + ACCEPTED]
    m[row + ROW_ENDED] = m[NOW]
    m[row + ROW_ANSWERED] = m[job + ANSWERED]
    if m[job + STATE] != ACTIVE:  # the device never had it
        for column in (ROW_ENGINE, ROW_INFER, ROW_SUBMITTED, ROW_H2D_START, ROW_H2D_END):
            m[row + column] = NONE
        for column in (ROW_D2H_START, ROW_D2H_END, ROW_WAITED):
            m[row + column] = NONE
        for column in range(2 * m[DIES]):
            m[row + JOB_COLUMNS + column] = NONE
        return
    m[row + ROW_ENGINE] = m[job + SLOT]
    m[row + ROW_INFER] = m[job + INFER]
    m[row + ROW_SUBMITTED] = m[job + SUBMITTED]
    m[row + ROW_H2D_START] = m[job + H2D_START]
    m[row + ROW_H2D_END] = m[job + H2D_END]
    m[row + ROW_D2H_START] = m[job + D2H_START]
    m[row + ROW_D2H_END] = m[job + D2H_END]
    m[row + ROW_WAITED] = m[job + WAITED]
    for column in range(2 * m[DIES]):
        m[row + JOB_COLUMNS + column] = m[times + column]


@inlined
def _emitted(m: Any, s: int) -> None:
    """``Core.token_emitted``; the client runs the next step, or leaves."""
    request = request_at(m, m[_job(s) + REQUEST])
    m[request + TOKENS_OUT] += 1
    m[request + LAST] = m[NOW]
    if m[request + TOKENS_OUT] == 1:
        m[request + FIRST] = m[NOW]
    if m[request + TOKENS_OUT] < m[request + OUTPUT]:
        _next_step(m, s)
    else:
        _end_admitted(m, s, COMPLETED)
        _client_done(m)


@rule
def _next_step(m: Any, s: int) -> None:
    """``Core.submit_step``: the prompt, a chunk of it, or one token."""
    job = _job(s)
    request = request_at(m, m[job + REQUEST])
    m[job + PAST] += m[job + TOKENS]  # what the step before it added
    left = m[request + PROMPT] - m[job + PAST]
    if left > 0:
        m[job + KIND] = PREFILL
        m[job + TOKENS] = min(left, m[CHUNK]) if m[CHUNK] else left
    else:
        m[job + KIND] = DECODE
        m[job + TOKENS] = 1
    m[job + JOB] = m[NEXT_JOB]
    m[NEXT_JOB] += 1
    m[job + STEP] = m[request + STEPS_TAKEN]
    m[request + STEPS_TAKEN] += 1
    m[job + ACCEPTED] = m[NOW]
    m[job + GAVE_UP] = 0
    m[job + STATE] = GROWING
    if m[ADMISSION_TIMEOUT]:
        entered = m[request + ARRIVAL] if m[job + STEP] == 0 else m[NOW]
        _deadline(m, entered + m[ADMISSION_TIMEOUT], s, OF_ADMISSION, m[job + JOB])
    if m[job + PAST] + m[job + TOKENS] <= m[job + RESERVED]:
        _grown(m, s)
    else:
        push(m, GROWING_STEPS, s)
        _serve(m)


@hot
def _grown(m: Any, s: int) -> None:
    """``Core._grown``: its KV is reserved, and it queues for its turn."""
    m[_job(s) + STATE] = QUEUED
    push(m, READY, s)
    _stage(m)


@rule
def _serve(m: Any) -> None:
    """``Admission.serve``: from the heads while it goes; a later one never overtakes."""
    while m[GROWING_STEPS + SIZE] > 0:
        s = first(m, GROWING_STEPS)
        job = _job(s)
        more = m[job + PAST] + m[job + TOKENS] - m[job + RESERVED]
        if m[KV_RESERVED] + more > m[KV_CAPACITY]:
            return
        m[KV_RESERVED] += more
        m[job + RESERVED] += more
        pop(m, GROWING_STEPS)
        _grown(m, s)
    while m[WAITING] > 0:
        r = first(m, m[WAITING_REQUESTS])
        request = request_at(m, r)
        wanted = m[request + PROMPT] if m[GROWS] else m[request + KV_TOKENS]
        if m[FREE_IDS] == 0 or m[KV_RESERVED] + wanted > m[KV_CAPACITY]:
            return
        pop(m, m[WAITING_REQUESTS])
        m[WAITING] -= 1
        _forget_those_who_left(m)
        m[KV_RESERVED] += wanted
        s = m[FREE_IDS + ROWS]
        drop(m, FREE_IDS)
        m[request + SEQUENCE] = s
        m[request + ADMITTED] = m[NOW]
        if m[NOW] > m[UNTIL]:
            m[UNTIL] = m[NOW]
            m[DELIVERED_UNTIL] = m[DELIVERED]
        job = _job(s)
        m[job + REQUEST] = r
        m[job + RESERVED] = wanted
        m[job + PAST] = 0
        m[job + TOKENS] = 0
        if r != m[ENTERING]:
            _later(m, WAKE_ADMITTED, r, 0)


@rule
def _forget_those_who_left(m: Any) -> None:
    """Who has left the queue for KV stays in its ring until it is at the head."""
    queue = m[WAITING_REQUESTS]
    while m[queue + SIZE] > 0 and m[request_at(m, first(m, queue)) + OUTCOME] != OPEN_OUTCOME:
        pop(m, queue)


@rule
def _end_request(m: Any, r: int, outcome: int, reason: int, detail: int) -> None:
    """``Core._end_request``."""
    request = request_at(m, r)
    m[request + OUTCOME] = outcome
    if reason != NO_REASON:
        m[request + REASON] = reason
        m[request + DETAIL] = detail
    m[request + ENDED] = m[NOW]
    m[request + END_ORDER] = m[ENDED_REQUESTS]
    m[ENDED_REQUESTS] += 1
    m[OPEN] -= 1


@rule
def _end_admitted(m: Any, s: int, outcome: int) -> None:
    """``Core._end_admitted`` and ``Admission.release``."""
    job = _job(s)
    _end_request(m, m[job + REQUEST], outcome, NO_REASON, 0)
    m[KV_RESERVED] -= m[job + RESERVED]
    m[job + RESERVED] = 0
    add(m, FREE_IDS, s, 0, s, 0, 0)
    _serve(m)


# --- requests and their clients -------------------------------------------------------------------
@rule
def enter(m: Any, r: int) -> Any:
    """``Core.submit_request``, and the client's first step; is there more to come of it?"""
    request = request_at(m, r)
    m[OPEN] += 1
    m[request + ARRIVAL] = m[NOW]
    reason = NO_REASON
    if m[request + PROMPT] < 1 or m[request + OUTPUT] < 0:
        reason = TOO_FEW_TOKENS
    elif m[request + KV_TOKENS] > m[MAX_SEQ]:
        reason = TOO_LONG_FOR_MODEL
    elif m[request + KV_TOKENS] > m[KV_CAPACITY]:
        reason = ABOVE_THE_CARD
    elif m[WAITING] > 0 and m[WAITING] >= m[MAX_QUEUE]:
        reason = QUEUE_FULL  # it would stand behind others that wait
    if reason != NO_REASON:
        _end_request(m, r, REFUSED, reason, m[WAITING])
        return False
    push(m, m[WAITING_REQUESTS], r)
    m[WAITING] += 1
    m[ENTERING] = r
    _serve(m)
    m[ENTERING] = NONE
    if m[request + ADMITTED] != NONE:
        _next_step(m, m[request + SEQUENCE])
        return True
    if m[WAITING] > m[MAX_QUEUE]:  # nobody may wait
        m[WAITING] -= 1
        _end_request(m, r, REFUSED, QUEUE_FULL, m[WAITING])
        _forget_those_who_left(m)
        return False
    if m[ADMISSION_TIMEOUT]:
        _deadline(m, m[NOW] + m[ADMISSION_TIMEOUT], r, OF_REQUEST, 0)
    return True


@rule
def _client_done(m: Any) -> None:
    """A client of a closed loop sends its next request (``caltrio.workload.replay``)."""
    m[LAST_CLIENT] = m[NOW]
    while m[CLIENTS] > 0 and m[CURSOR] < m[REQUESTS]:
        r = m[CURSOR]
        m[CURSOR] += 1
        if enter(m, r):
            return


@inlined
def _happens(m: Any) -> None:
    """The next of what happens at once, but after all have come to rest."""
    what, who, more = pop(m, m[SOON]), pop(m, m[SOON]), pop(m, m[SOON])
    if what == CLAIMED:
        _serve_h2d(m, who)
    elif what == DRAINED:
        _serve_d2h(m, who)
    elif what == DIE_DONE:
        _die_done(m, more, who)
    elif what == WAKE_ADMITTED:
        _next_step(m, m[request_at(m, who) + SEQUENCE])
    elif what == WAKE_LEFT:
        _client_done(m)
    else:  # WAKE_FAILED: its step failed, so the client closes the request
        request = request_at(m, who)
        if m[request + OUTCOME] == OPEN_OUTCOME:
            s = m[request + SEQUENCE]
            if m[_job(s) + STATE] == ACTIVE:
                m[request + CLOSING] = 1  # it ends once the device is done with its job
            else:
                _end_admitted(m, s, EXPIRED)
        _client_done(m)


# --- deadlines ------------------------------------------------------------------------------------
@rule
def _due(m: Any, row: int) -> Any:
    """Does a deadline still matter?"""
    who, what = m[row + 2], m[row + 3]
    if what == OF_REQUEST:
        request = request_at(m, who)
        return m[request + ADMITTED] == NONE and m[request + OUTCOME] == OPEN_OUTCOME
    job = _job(who)
    if m[job + JOB] != m[row + 4]:
        return False
    if what == OF_ADMISSION:
        return m[job + STATE] == GROWING or m[job + STATE] == QUEUED
    return m[SUBMITTING] == who and m[job + GAVE_UP] == 0


@rule
def _deadline(m: Any, when: int, who: int, what: int, job: int) -> None:
    """``Deadlines.add``; those that no longer matter leave when the heap is full."""
    heap = m[DEADLINES]
    if m[heap] == m[DEADLINE_ROOM]:
        kept = 0
        for index in range(m[heap]):
            row = heap + ROWS + WIDTH * index
            if _due(m, row):
                for column in range(WIDTH):
                    m[heap + ROWS + WIDTH * kept + column] = m[row + column]
                rise(m, heap, kept)
                kept += 1
        m[heap] = kept
    add(m, heap, when, m[ORDER], who, what, job)
    m[ORDER] += 1


@inlined
def _expire(m: Any) -> None:
    """``Core.expire``: act on every deadline that has passed; those concerned go on afterwards."""
    heap = m[DEADLINES]
    top = heap + ROWS
    while m[heap] > 0 and m[top] <= m[NOW]:
        due, who, what, job_id = _due(m, top), m[top + 2], m[top + 3], m[top + 4]
        drop(m, heap)
        if not due:
            continue
        if what == OF_REQUEST:
            _end_request(m, who, EXPIRED, NOT_ADMITTED, m[NOW] - m[request_at(m, who) + ARRIVAL])
            _later(m, WAKE_LEFT, who, 0)
            m[WAITING] -= 1
            _forget_those_who_left(m)
            _serve(m)
            continue
        job = _job(who)
        r = m[job + REQUEST]
        starved = m[job + STATE] == GROWING
        reason = LATE_QUEUE if what == OF_QUEUE else NO_GROWTH if starved else LATE_ADMISSION
        m[request_at(m, r) + REASON] = reason
        m[request_at(m, r) + DETAIL] = job_id
        m[job + ANSWERED] = m[NOW]
        _later(m, WAKE_FAILED, r, 0)
        if what == OF_QUEUE:  # the device may have it: it goes on without its caller
            m[job + GAVE_UP] = 1
            continue
        remove(m, GROWING_STEPS if starved else READY, who)
        _job_ended(m, who, reason)
        m[job + STATE] = IDLE
        if starved:  # its sequence gives up what it holds, so that others go on
            _end_admitted(m, who, FAILED)
        _serve(m)
        _stage(m)


# --- the loop -------------------------------------------------------------------------------------
@hot
def next_ns(m: Any) -> Any:
    """When something happens next, once all is settled; ``NEVER``: nothing does."""
    when = next_event(m)
    return min(when, m[m[DEADLINES] + ROWS]) if m[m[DEADLINES]] > 0 else when


@rule
def advance(m: Any) -> None:
    """Let everything happen that is due by ``m[HORIZON]``, in the order of time, rank and job id.

    Arrivals are the last of an instant: requests enter after this. Returns early when the status is no
    longer ``RUNNING``.
    """
    deadlines = m[DEADLINES]
    soon = m[SOON] + SIZE
    while True:
        while m[soon] > 0:
            _happens(m)
        if m[STATUS] != RUNNING:
            return
        when = next_event(m)
        late = m[deadlines] > 0 and m[deadlines + ROWS] < when  # of one instant they are the last
        if late:
            when = m[deadlines + ROWS]
        if when > m[HORIZON] or when == NEVER:
            return
        m[NOW] = when
        if late:
            _expire(m)
            continue
        what, who = take_event(m)
        if what == CHANNEL_END:
            _channel_ends(m, who)
        elif what == DIE_END:
            _die_ends(m, who)
        elif what == INTERRUPT:
            _interrupted(m, who)
        elif what == WAIT_RETURNED:
            _wait_returned(m, who)
        elif what == SUBMIT_RETURNED:
            _submit(m, who)
        elif what == COMPLETER_DONE:
            _completed(m, who)
        else:
            _emitted(m, who)


@rule
def drive(array: Any) -> None:
    """Run all requests: at their arrival times, or as a closed loop. Goes on where it had stopped."""
    m = pointer(array)
    while m[STARTED] < m[CLIENTS]:  # of a closed loop: all start at 0, one after another
        m[HORIZON] = 0
        advance(m)
        if m[STATUS] != RUNNING:
            return
        m[STARTED] += 1
        _client_done(m)
    while m[CLIENTS] == 0 and m[CURSOR] < m[REQUESTS]:
        r = m[CURSOR]
        when = max(m[request_at(m, r) + ARRIVAL], m[NOW])
        m[HORIZON] = when
        advance(m)
        if m[STATUS] != RUNNING:
            return
        m[CURSOR] += 1
        m[NOW] = when
        m[LAST_CLIENT] = when
        enter(m, r)
    m[HORIZON] = NEVER
    advance(m)
    if m[STATUS] == RUNNING and m[GAVE_UP_END] > m[LAST_CLIENT] + m[GRACE]:
        m[STATUS] = FAULT_DRAIN
    if m[STATUS] == RUNNING and m[ENDED_REQUESTS] < m[REQUESTS]:
        m[STATUS] = TOO_LONG  # what is due after NEVER never comes

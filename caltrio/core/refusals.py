"""What requests and jobs are told that do not get what they asked for, in one place.

The decisions are :class:`~caltrio.core.scheduler.Core`'s. The compiled twin makes the same ones and
tells the same.
"""

from __future__ import annotations

from ..errors import DeadlineExceeded, InvalidArgument, Phase, ResourceExhausted
from ..units import format_ns

# (job id, sequence id, generation id)
Whose = tuple[int, int, int]


def too_few_tokens(request_id: int, prompt_tokens: int, output_tokens: int) -> InvalidArgument:
    """A prompt without tokens, or less than no output."""
    return InvalidArgument(
        f"request {request_id} has {prompt_tokens} prompt and {output_tokens} output "
        "tokens; it needs at least 1 and 0"
    )


def too_long(
    request_id: int, prompt_tokens: int, output_tokens: int, kv_tokens: int, max_seq: int
) -> InvalidArgument:
    """More positions than the model has."""
    return InvalidArgument(
        f"request {request_id} needs {kv_tokens} positions ({prompt_tokens} prompt, "
        f"{output_tokens} output), above max_seq {max_seq}; shorten it"
    )


def above_the_card(request_id: int, kv_tokens: int, capacity_tokens: int) -> ResourceExhausted:
    """More KV than the card has."""
    return ResourceExhausted(
        f"request {request_id} needs {kv_tokens} tokens of KV, above the card's "
        f"{capacity_tokens}; shorten it"
    )


def queue_full(request_id: int, waiting: int) -> ResourceExhausted:
    """As many wait as may."""
    return ResourceExhausted(
        f"request {request_id} found the admission queue full ({waiting} waiting); retry later"
    )


def not_admitted(request_id: int, waited_ns: int) -> DeadlineExceeded:
    """It waited for KV until its admission deadline."""
    return DeadlineExceeded(
        f"request {request_id} waited {format_ns(waited_ns)} for KV; "
        "lower the load or raise admission_timeout"
    )


def no_growth(job_id: int, token_count: int, facts: Whose) -> ResourceExhausted:
    """A step waited for KV until its admission deadline: its sequence is ended."""
    return ResourceExhausted(
        f"job {job_id} got no KV for {token_count} more tokens in time; its "
        "sequence is ended, and what it held is free",
        Phase.ADMISSION,
        0,
        *facts,
    )


_TIMEOUTS = {
    Phase.ADMISSION: "admission_timeout",
    Phase.QUEUE: "queue_timeout",
    Phase.EXECUTE: "execution_timeout",
}


def too_late(phase: str, job_id: int, facts: Whose) -> DeadlineExceeded:
    """A deadline of §9.1 passed."""
    return DeadlineExceeded(
        f"the {phase} deadline of job {job_id} passed; lower the load or raise {_TIMEOUTS[phase]}",
        phase,
        0,
        *facts,
    )

"""One request in the executor: from its arrival to its single outcome."""

from __future__ import annotations

from enum import StrEnum
from operator import attrgetter

from attrs import Factory, define, field

from ..errors import RequestError
from .job import Job


class Outcome(StrEnum):
    """How a request ended; each request ends in exactly one of these."""

    COMPLETED = "completed"
    REFUSED = "refused"  # never admitted: invalid, no room, or no service
    EXPIRED = "expired"  # a deadline passed
    CANCELLED = "cancelled"  # its caller, or the shutdown, gave it up
    FAILED = "failed"  # the device or the executor failed it


@define(slots=True, eq=False)
class RequestState:
    """One request and, once admitted, its sequence. Only ``Core`` changes it.

    Args:
        request_id: given by the caller, unique in a run.
        prompt_tokens, output_tokens: what it asks for; tokens.
        kv_tokens: KV that it may need at the most: the last output token is never fed back.
        arrival_ns: when it entered the service.
        admission_tokens: KV that it reserves when it is admitted; all of it by default.
        warmup: part of a generation's golden run, not of the traffic.
    """

    request_id: int
    prompt_tokens: int
    output_tokens: int
    kv_tokens: int
    arrival_ns: int
    admission_tokens: int = field(default=Factory(attrgetter("kv_tokens"), takes_self=True))
    warmup: bool = False
    sequence_id: int = -1
    admission_deadline_ns: int | None = None
    admitted_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    ended_ns: int | None = None
    tokens_out: int = 0
    jobs: int = 0
    job: Job | None = None  # the step under way: a sequence has at most one
    closing: bool = False  # its caller has left; it ends once no job is under way
    outcome: Outcome | None = None
    error: RequestError | None = None
    lost: RequestError | None = None  # what further steps are told, if it was ended for its caller
    waiter: object = field(default=None, repr=False)

    @property
    def admitted(self) -> bool:
        """Does it hold a sequence, now or before its end?"""
        return self.admitted_ns is not None

"""The limits that an executor works under."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from attrs import field, frozen

from .tomlfile import Ns


def _at_least(least: int, most: int = 2**62) -> Any:
    def check(_instance: object, attribute: Any, value: int | None) -> None:
        name = attribute.metadata.get("toml", attribute.name)
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}; give {least} or more")
        if value is not None and value > most:
            raise ValueError(f"{name} is {value}; give at most {most}")

    return check


def _timeout(name: str, default: int | None) -> Any:
    return field(
        default=None if default is None else Ns(default),
        metadata={"toml": name},
        validator=_at_least(1),
    )


class KvPolicy(StrEnum):
    """How much KV a sequence reserves when it is admitted (§7)."""

    FULL = "full"  # all that it may ever need: a step never waits for KV
    GROW = "grow"  # its prompt; each step reserves what it adds, and may have to wait


class JobOrder(StrEnum):
    """Which prepared job the submitter takes next."""

    FIFO = "fifo"
    DECODE_FIRST = (
        "decode_first"  # the oldest decode step before any prefill: tokens flow, newcomers wait
    )


@frozen
class ExecutorConfig:
    """Limits and timeouts of one executor. Times in nanoseconds; ``None`` is no deadline.

    Args:
        max_inflight: jobs between the call of ``infer()`` and the return of ``Wait()``.
        max_active_sequences: sequences that hold KV at once.
        max_queue: requests that may wait for admission; one more is refused.
        kv_capacity_tokens: tokens of KV that the card holds.
        order: of the jobs that wait for a permit.
        admission_timeout_ns: from entering the service until KV and a buffer are held (§9.1).
        queue_timeout_ns: from prepared until ``infer()`` has succeeded.
        execution_timeout_ns: from there until ``Wait()`` has returned.
        grace_ns: how long a drain or a recovery waits for what is on the device.
        reset_timeout_ns: how long a reset and the load of a model may take.
        kv_policy: what a sequence reserves; ``grow`` needs an admission timeout, which ends a wait
            of sequences for each other.
        backoff_ns, backoff_most_ns: pause after a busy or a timeout; doubles up to the most (§8).
        backoff_threshold: so many of them without a success between: the device is not trusted.
        retry_after_ns: the hint that UNAVAILABLE carries.
    """

    max_inflight: int = field(default=1, validator=_at_least(1, 4096))
    max_active_sequences: int = field(default=8, validator=_at_least(1, 100_000))
    max_queue: int = field(default=1024, validator=_at_least(0))
    kv_capacity_tokens: int = field(default=81_920, validator=_at_least(1))
    admission_timeout_ns: Ns | None = _timeout("admission_timeout", None)
    queue_timeout_ns: Ns | None = _timeout("queue_timeout", None)
    execution_timeout_ns: Ns | None = _timeout("execution_timeout", None)
    grace_ns: Ns = _timeout("grace", 60_000_000_000)
    reset_timeout_ns: Ns = _timeout("reset_timeout", 60_000_000_000)
    kv_policy: KvPolicy = field(default=KvPolicy.FULL, converter=KvPolicy)
    order: JobOrder = field(default=JobOrder.FIFO, converter=JobOrder)
    backoff_ns: Ns = _timeout("backoff", 1_000_000)
    backoff_most_ns: Ns = _timeout("backoff_most", 100_000_000)
    backoff_threshold: int = field(default=5, validator=_at_least(1, 1_000_000))
    retry_after_ns: Ns = _timeout("retry_after", 1_000_000_000)

    @kv_policy.validator
    def _bounded(self, _attribute: object, policy: KvPolicy) -> None:
        if policy is KvPolicy.GROW and self.admission_timeout_ns is None:
            raise ValueError(
                "kv_policy is 'grow' without an admission_timeout; give one, "
                "or sequences may wait for each other's KV for ever"
            )

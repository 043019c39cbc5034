"""The limits that an executor works under."""

from __future__ import annotations

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


@frozen
class ExecutorConfig:
    """Limits and timeouts of one executor. Times in nanoseconds; ``None`` is no deadline.

    Args:
        max_inflight: jobs between the call of ``infer()`` and the return of ``Wait()``.
        max_active_sequences: sequences that hold KV at once.
        max_queue: requests that may wait for admission; one more is refused.
        kv_capacity_tokens: tokens of KV that the card holds.
        admission_timeout_ns: from entering the service until KV and a buffer are held (§9.1).
        queue_timeout_ns: from prepared until ``infer()`` has succeeded.
        execution_timeout_ns: from there until ``Wait()`` has returned.
        grace_ns: how long a drain or a recovery waits for what is on the device.
    """

    max_inflight: int = field(default=1, validator=_at_least(1, 4096))
    max_active_sequences: int = field(default=8, validator=_at_least(1, 100_000))
    max_queue: int = field(default=1024, validator=_at_least(0))
    kv_capacity_tokens: int = field(default=81_920, validator=_at_least(1))
    admission_timeout_ns: Ns | None = _timeout("admission_timeout", None)
    queue_timeout_ns: Ns | None = _timeout("queue_timeout", None)
    execution_timeout_ns: Ns | None = _timeout("execution_timeout", None)
    grace_ns: Ns = _timeout("grace", 60_000_000_000)

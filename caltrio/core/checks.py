"""Checks 1 to 4 of specification §6.3, in their order; none of them asks the device anything.

Checks 5 to 8 need the device's memory, and are in :mod:`caltrio.prepare`. Sums are Python's, which
cannot overflow; lengths are bounded to 63 bits where they enter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import (
    BatchTooLarge,
    EmptyJob,
    InputMismatch,
    Phase,
    RequestError,
    SequenceTooLong,
)
from ..manifest import SubmodelContract, TaskKind

if TYPE_CHECKING:
    from ..stepdata import StepData


def check_step(
    contract: SubmodelContract,
    token_count: int,
    past_len: int,
    limit: int,
    data: StepData | None,
    facts: tuple[str, int, int],
) -> None:
    """Raise the typed error of the first check that a step fails.

    Args:
        contract: of the graph that would run it.
        token_count: tokens of the step.
        past_len: tokens of the sequence before it.
        limit: positions that the sequence may fill: ``max_seq``, or what it asked for.
        data: the inputs; ``None`` where only timing is of interest.
        facts: (who, sequence id, generation id), for the error.
    """
    who, sequence_id, generation_id = facts

    def error(kind: type[RequestError], text: str) -> RequestError:
        return kind(f"{who}: {text}", Phase.PREPARE, 0, -1, sequence_id, generation_id)

    if token_count < 1 or (past_len == 0 and contract.kind is TaskKind.DECODE):
        raise error(
            EmptyJob,
            f"{contract.kind.value} of {token_count} tokens at past length {past_len}; "
            "prefill at least one token first",
        )
    if past_len + token_count > limit:
        raise error(
            SequenceTooLong,
            f"past length {past_len} + {token_count} tokens is above the {limit} positions that it "
            "may fill; ask for more output tokens at its start, or shorten it",
        )
    if data is None:
        return
    if data.sequences > contract.max_batch:
        raise error(
            BatchTooLarge,
            f"{data.sequences} sequences in one job; graph {contract.exact_name!r} takes "
            f"{contract.max_batch}",
        )
    mismatch = data.mismatch(contract, token_count, past_len)
    if mismatch is not None:
        raise error(InputMismatch, mismatch)

"""Checks 1 to 4 of specification §6.3, in their order; none of them asks the device anything.

Checks 5 to 8 need the device's memory, and are in :mod:`caltrio.prepare`. Sums are Python's, which
cannot overflow; lengths are bounded to 63 bits where they enter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import BatchTooLarge, EmptyJob, InputMismatch, RequestError, SequenceTooLong
from ..manifest import SubmodelContract, TaskKind
from .request import RequestState

if TYPE_CHECKING:
    from ..stepdata import StepData


def check_step(
    contract: SubmodelContract,
    request: RequestState,
    token_count: int,
    past_len: int,
    max_seq: int,
    data: StepData | None,
) -> tuple[type[RequestError], str] | None:
    """The first check that a step fails: the kind of its error, and what is wrong.

    Args:
        contract: of the graph that would run it.
        request: whose step it is; it may fill the positions that it asked for.
        token_count: tokens of the step.
        past_len: tokens of the sequence before it.
        max_seq: positions that any sequence may fill.
        data: the inputs; ``None`` where only timing is of interest.
    """
    if token_count < 1 or (past_len == 0 and contract.kind is TaskKind.DECODE):
        return EmptyJob, (
            f"{contract.kind.value} of {token_count} tokens at past length {past_len}; "
            "prefill at least one token first"
        )
    limit = min(max_seq, request.kv_tokens)
    if past_len + token_count > limit:
        return SequenceTooLong, (
            f"past length {past_len} + {token_count} tokens is above the {limit} positions that it "
            "may fill; ask for more output tokens at its start, or shorten it"
        )
    if data is None:
        return None
    if data.sequences > contract.max_batch:
        return BatchTooLarge, (
            f"{data.sequences} sequences in one job; graph {contract.exact_name!r} takes "
            f"{contract.max_batch}"
        )
    mismatch = data.mismatch(contract, token_count, past_len)
    return None if mismatch is None else (InputMismatch, mismatch)

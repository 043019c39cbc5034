"""Send the requests of a workload to an executor, as clients would."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import trio
from numpy.typing import NDArray

from ..core.lifecycle import LifecycleState
from ..errors import RequestError, ServiceFailed, Unavailable
from ..executor import Executor
from ..timer import Rank, Timer
from .requests import Request

Prompts = Callable[[Request], NDArray[np.int32]]


async def serve(
    executor: Executor,
    request: Request,
    prompts: Prompts | None = None,
    chunk_tokens: int | None = None,
) -> RequestError | None:
    """One request from admission to its last token; greedy tokens, where ``prompts`` gives it one.

    A prompt longer than ``chunk_tokens`` is prefilled in as many jobs as that takes.
    Returns the error that it ended with, if one did; that is in the records too.
    """
    prompt = None if prompts is None else prompts(request)
    # Of tokens there may be fewer than asked for: the executor is to refuse what no model takes.
    total = request.prompt_tokens if prompt is None else len(prompt)
    token: int | None = None
    try:
        async with executor.sequence(
            request.prompt_tokens, request.output_tokens, request_id=request.request_id
        ) as sequence:
            for start in range(0, total, chunk_tokens or total):
                end = min(start + (chunk_tokens or total), total)
                result = await sequence.prefill(end - start if prompt is None else prompt[start:end])
            for step in range(request.output_tokens):
                if step > 0:
                    result = await sequence.decode(token)
                token = None if result.logits is None else int(result.logits.argmax())
                await sequence.emit_token()
    except RequestError as error:
        return error
    return None


async def replay(
    executor: Executor,
    timer: Timer,
    requests: Sequence[Request],
    clients: int | None = None,
    prompts: Prompts | None = None,
    *,
    chunk_tokens: int | None = None,
    heed_failure: bool = True,
) -> None:
    """Replay ``requests``: at their arrival times, or in a closed loop of ``clients``.

    Returns when the last one has ended. Arrivals are ranked, so that two at one instant enter in
    the order of their ids.

    Args:
        executor: serves them.
        timer: its time.
        requests: in the order of their arrivals.
        clients: of the closed loop; ``None`` for an open one.
        prompts: gives the tokens of a request; without it, steps carry none.
        chunk_tokens: the longest prefill job; ``None``: a prompt is one job.
        heed_failure: a client that is told to try again later does so, and what is not sent by the
            time the executor has failed for good is not sent. Else all of it is, to be refused.

    Raises :class:`ServiceFailed` if the executor has failed for good, where that is heeded.
    """
    start_ns = timer.now_ns()
    pauses: set[trio.CancelScope] = set()

    def over() -> bool:
        return heed_failure and executor.core.lifecycle is LifecycleState.FAILED

    async def pause(until_ns: int, tie: int) -> None:
        if over():
            return
        with trio.CancelScope() as scope:
            pauses.add(scope)
            await timer.sleep_until_ns(until_ns, Rank.ARRIVAL, tie)
        pauses.discard(scope)

    async def client(index: int, queue: Iterator[Request]) -> None:
        await pause(start_ns, index)
        for request in queue:
            if over():
                break
            error = await serve(executor, request, prompts, chunk_tokens)
            if heed_failure and isinstance(error, Unavailable):
                await pause(timer.now_ns() + executor.core.config.retry_after_ns, index)

    async def send() -> None:
        async with trio.open_nursery() as nursery:
            if clients is not None:
                queue = iter(requests)
                for index in range(min(clients, len(requests))):
                    nursery.start_soon(client, index, queue)
                return
            for request in requests:
                await pause(start_ns + request.arrival_ns, request.request_id)
                if over():
                    break
                nursery.start_soon(serve, executor, request, prompts, chunk_tokens)

    async def watch() -> None:
        try:
            await executor.failed()
        except ServiceFailed:
            for scope in pauses:  # what has been sent ends by itself
                scope.cancel()

    if not heed_failure:
        await send()
        return
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await send()
        nursery.cancel_scope.cancel()
    executor.check()

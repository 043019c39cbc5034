"""Send the requests of a workload to an executor, as clients would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import trio

from ..errors import RequestError
from ..executor import Executor
from ..timer import Rank, Timer
from .requests import Request


async def serve(executor: Executor, request: Request) -> None:
    """One request from admission to its last token. A failed one is in the records; no error here."""
    try:
        async with executor.sequence(
            request.prompt_tokens, request.output_tokens, request_id=request.request_id
        ) as sequence:
            await sequence.prefill(request.prompt_tokens)
            for token in range(request.output_tokens):
                if token > 0:
                    await sequence.decode()
                await sequence.emit_token()
    except RequestError:
        pass  # typed, and recorded with the request's outcome


async def replay(
    executor: Executor, timer: Timer, requests: Sequence[Request], clients: int | None = None
) -> None:
    """Replay ``requests``: at their arrival times, or in a closed loop of ``clients``.

    Returns when the last one has ended. Arrivals are ranked, so that two at one instant enter in
    the order of their ids.
    """
    start_ns = timer.now_ns()

    async def client(index: int, queue: Iterator[Request]) -> None:
        await timer.sleep_until_ns(start_ns, Rank.ARRIVAL, index)
        for request in queue:
            await serve(executor, request)

    async with trio.open_nursery() as nursery:
        if clients is not None:
            queue = iter(requests)
            for index in range(min(clients, len(requests))):
                nursery.start_soon(client, index, queue)
            return
        for request in requests:
            await timer.sleep_until_ns(start_ns + request.arrival_ns, Rank.ARRIVAL, request.request_id)
            nursery.start_soon(serve, executor, request)

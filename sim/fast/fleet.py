"""A fleet of cards behind a router, each a twin of its own; they share nothing but the arrivals."""

# ruff: noqa: F403, F405 - names of columns
from __future__ import annotations

from enum import StrEnum
from typing import Any

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from caltrio.costs import mix
from caltrio.errors import InputError
from caltrio.observe.metrics import RequestFacts
from caltrio.scenario import Scenario
from caltrio.workload.requests import stream_seed

from .kernel import advance, enter, inlined, next_ns, request_at, rule
from .machine import *
from .queues import pointer
from .tables import request_facts
from .twin import WHY_NOT, build, checked, cost_table


class Router(StrEnum):
    """Which card a request goes to, at the moment when it arrives."""

    ROUND_ROBIN = "round_robin"  # the next one, whatever they have to do
    LEAST_OUTSTANDING = "least_outstanding"  # that with the fewest open requests
    POWER_OF_TWO = "power_of_two"  # the better of two drawn at random (Mitzenmacher, 2001)
    SHARED_QUEUE = "shared_queue"  # requests wait at the router until a card has a sequence free


_ROUTERS = tuple(Router)
_ROUND_ROBIN, _LEAST, _TWO, _SHARED = range(len(_ROUTERS))


@inlined
def _assign(card: Any, number: int, requests: Any, i: int, when: int, place: Any) -> None:
    """Request ``i`` enters ``card`` at ``when``."""
    r = card[CURSOR]
    row = request_at(card, r)
    card[row + PROMPT] = requests[i, 1]
    card[row + OUTPUT] = requests[i, 2]
    card[row + KV_TOKENS] = requests[i, 1] + max(requests[i, 2] - 1, 0)
    card[CURSOR] += 1
    card[NOW] = when
    card[LAST_CLIENT] = when
    place[i, 0] = number
    place[i, 1] = r
    enter(card, r)


@inlined
def _run_until(cards: Any, when: int) -> Any:
    """Let everything happen on all cards that is due by ``when``; did it go without a fault?"""
    for number in range(cards.shape[0]):
        card = pointer(cards[number])
        card[HORIZON] = when
        advance(card)
        if card[STATUS] != RUNNING:
            return False
    return True


@inlined
def _least(cards: Any) -> Any:
    """The first of the cards with the fewest open requests."""
    best = 0
    for number in range(1, cards.shape[0]):
        if cards[number, OPEN] < cards[best, OPEN]:
            best = number
    return best


@inlined
def _hand_out(
    cards: Any, requests: Any, head: int, tail: int, until: int, room: int, place: Any
) -> Any:
    """Requests ``head`` to ``tail`` wait at the router: hand out what cards take by ``until``.

    Returns the new head. A card takes one as a sequence ends, which may be at any event of its.
    """
    while head < tail:
        best, when = -1, NEVER
        for number in range(cards.shape[0]):
            card = pointer(cards[number])
            if next_ns(card) < when:
                best, when = number, next_ns(card)
        if best < 0 or when > until:
            return head
        card = pointer(cards[best])
        card[HORIZON] = when
        advance(card)
        if card[STATUS] != RUNNING:
            return head
        while head < tail and card[OPEN] < room:
            _assign(card, best, requests, head, when, place)
            head += 1
    return head


@rule
def _drive_fleet(cards: Any, requests: Any, router: int, seed: Any, room: int, place: Any) -> None:
    count = cards.shape[0]
    head = 0  # of what waits at the router
    for i in range(requests.shape[0]):
        when = requests[i, 0]
        if router == _SHARED:
            head = _hand_out(cards, requests, head, i, when, room, place)
        if not _run_until(cards, when):
            return
        number: Any = 0
        if router == _ROUND_ROBIN:
            number = i % count
        elif router == _LEAST:
            number = _least(cards)
        elif router == _TWO and count > 1:
            drawn = mix(seed ^ np.uint64(i))
            number = np.int64(drawn % np.uint64(count))
            other = np.int64((drawn >> np.uint64(32)) % np.uint64(count - 1))
            other += 1 if other >= number else 0
            if cards[other, OPEN] < cards[number, OPEN]:
                number = other
        elif router == _SHARED:
            number = _least(cards)
            if head < i or cards[number, OPEN] >= room:
                continue  # it waits behind the others, or for a card
            head = i + 1
        _assign(pointer(cards[number]), number, requests, i, when, place)
    if router == _SHARED:
        _hand_out(cards, requests, head, requests.shape[0], NEVER, room, place)
    _run_until(cards, NEVER)


@frozen
class FleetRun:
    """What a fleet did.

    Attributes:
        facts: every request in the order of arrival; what waits at the router waits since then.
        card: which card each request went to.
    """

    facts: RequestFacts
    card: NDArray[np.int64]


def run_fleet(
    scenario: Scenario,
    requests: NDArray[np.int64],
    cards: int,
    router: Router = Router.LEAST_OUTSTANDING,
) -> FleetRun:
    """Run ``requests`` on ``cards`` cards, each as ``scenario`` says, behind ``router``.

    Args:
        scenario: one card, with its executor and its seed; arrivals are open.
        requests: ``[n, 3]`` as of :func:`~sim.fast.twin.request_array`, in the order of arrival.
        cards: how many.
        router: where a request goes.

    Raises :class:`~caltrio.errors.InputError` if the twin does not cover the scenario.
    """
    workload = scenario.workload
    requests, router = checked(requests), Router(router)
    if cards < 1:
        raise InputError("fleet", "cards", f"is {cards}", "give 1 or more")
    if workload.clients is not None:
        raise InputError("fleet", "arrivals", "are closed: a client has one card", "give a rate")
    memory = np.tile(build(scenario, np.zeros_like(requests)).m, (cards, 1))
    for number in range(cards):
        # Each card's own jitter: the same request number on two cards is two jobs.
        own = evolve(scenario, seed=stream_seed(scenario.seed, f"card {number}") >> 1)
        memory[number, AT_COSTS:AT_ON] = cost_table(own)
    place = np.full((len(requests), 2), NONE)
    room = min(scenario.executor.max_active_sequences, max(len(requests), 1))
    seed = np.uint64(stream_seed(scenario.seed, "router"))
    _drive_fleet(memory, np.ascontiguousarray(requests), _ROUTERS.index(router), seed, room, place)
    for row in memory:
        why_not = WHY_NOT.get(int(row[STATUS]))
        if why_not is not None:
            raise InputError("fleet", "", f"is not simulated with faults ({why_not})", "lower the load")
    facts = _gather(memory, requests, place)
    if (facts.ended_ns < 0).any() or (place < 0).any():
        raise InputError("fleet", "", f"is not simulated ({WHY_NOT[TOO_LONG]})", "lower the times")
    return FleetRun(facts, place[:, 0])


def _gather(
    memory: NDArray[np.int64], requests: NDArray[np.int64], place: NDArray[np.int64]
) -> RequestFacts:
    """The rows of all cards in the order of arrival."""
    begin = int(memory[0, AT_REQUESTS])
    room = len(requests) * REQUEST_COLUMNS
    tables = memory[:, begin : begin + room].reshape(len(memory), len(requests), REQUEST_COLUMNS)
    rows = tables[place[:, 0], place[:, 1]]
    rows[:, ARRIVAL] = requests[:, 0]
    return request_facts(memory[0], rows)

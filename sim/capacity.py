"""How many requests a second one card holds within an SLO, and how many cards a rate takes.

Everything runs in the compiled twin. A replication draws its requests once, at one request a second,
and keeps them at every rate, hypothesis and in-flight limit, with the jitter of its seed: only the gaps
between arrivals shrink (common random numbers). Its critical rate is found by bisection; those of
the replications are independent, and Student's t makes an interval of them. Of a fleet, the critical
number of cards is found and judged in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, as_completed
from pathlib import Path

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from caltrio.config import ExecutorConfig
from caltrio.errors import InputError
from caltrio.manifest import load_manifest
from caltrio.observe.metrics import RequestFacts, Slo
from caltrio.scenario import Scenario
from caltrio.semantics import EngineSemantics
from caltrio.units import NS_PER_S
from caltrio.workload.requests import stream
from caltrio.workload.spec import ArrivalKind, Arrivals, Workload

from .fast import Router, kernel, request_array
from .fast import machine as k
from .fast.fleet import run_fleet
from .fast.tables import request_facts
from .fast.twin import WHY_NOT, build
from .stats import Interval, LoadState, load_state, mean_interval

OWN = "own"  # the scenario's own semantics, among hypotheses
BLOCK = 50
WARM_UP = 0.1
MOST_LOST = 0.01
LEAST_REQUESTS = 250  # so that P99 rests on 200 and more after warm-up
PRECISION = 1.005
MOST_CARDS = 200
REQUESTS_PER_CARD = 20
_LOW_LOAD = 1_000  # of the rate of requests served one by one, the part below which we do not look
_MOST_NS = 2**61
_MOST_ROWS = 8_000_000  # requests times cards: a gigabyte in each process, and once more as it begins
_DISTRUST = (k.FAULT_EXECUTION, k.FAULT_INFER, k.FAULT_DRAIN)  # more load makes these worse

Array = NDArray[np.int64]


@frozen
class Objective:
    """What has to hold. Times in ns; ``None`` asks nothing.

    Args:
        ttft_ns, tpot_ns: bounds of P99 over the completed requests.
        goodput: in place of the percentiles, the share of all requests that has to be completed
            within both bounds, each by itself; 0 to 1.
        lost: without ``goodput``, the most requests that may be refused, expired or failed, as a share.

    Raises ``ValueError`` if there is no bound.
    """

    ttft_ns: int | None = None
    tpot_ns: int | None = None
    goodput: float | None = None
    lost: float = MOST_LOST

    def __attrs_post_init__(self) -> None:
        if self.ttft_ns is None and self.tpot_ns is None:
            raise ValueError("there is no bound to hold; give a TTFT, a TPOT, or both")

    def missed(self, facts: RequestFacts, counted: NDArray[np.bool_]) -> tuple[str, ...]:
        """What of it a run misses, over the requests of ``counted``; empty if it holds."""
        done = facts.completed & counted
        if self.goodput is not None:
            good = facts.good(Slo(self.ttft_ns, self.tpot_ns)) & counted
            return () if good.sum() >= self.goodput * counted.sum() else ("goodput",)
        late = []
        if counted.sum() - done.sum() > self.lost * counted.sum():
            late.append("lost")
        ttft, tpot = latencies(facts, done)
        for name, samples, bound in (("TTFT", ttft, self.ttft_ns), ("TPOT", tpot, self.tpot_ns)):
            if bound is not None and len(samples) and np.percentile(samples, 99) > bound:
                late.append(name)
        return tuple(late)


def latencies(
    facts: RequestFacts, which: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(TTFT, TPOT) of the requests of ``which`` that have them, ns."""
    first = which & (facts.first_token_ns >= 0)
    more = which & (facts.tokens_out >= 2)
    ttft = (facts.first_token_ns - facts.arrival_ns)[first].astype(np.float64)
    tpot = (facts.last_token_ns - facts.first_token_ns)[more] / (facts.tokens_out[more] - 1)
    return ttft, tpot


@frozen
class Traffic:
    """Draws the requests of a replication, at a mean of one request a second.

    Made-up arrivals are made with the seed. There is only one trace, so a replication resamples it by
    circular blocks: runs of ``block`` successive requests, with the gaps before them, begin
    at random places and wrap at the end (Politis, Romano: A circular block-resampling procedure for
    stationary data, 1992; after Künsch, Ann. Statist. 17 (1989) 1217-1241). Bursts, and lengths
    that go together, stay as they are within a block. Rotating the trace keeps them all, but then
    every replication holds the same requests, and an interval of them would only say how much it
    matters which comes first. Closed arrivals have no rate; they become Poisson.

    Attributes:
        workload: with open arrivals.
        base: the folder that a relative trace is taken from.
        rows: the trace's requests, ``[n, 3]`` as of ``request_array``; ``None`` for made-up arrivals.
        block: successive requests that stay together.
        was_closed: arrivals were closed, and are now Poisson.
    """

    workload: Workload
    base: Path | None
    rows: Array | None = None
    block: int = BLOCK
    was_closed: bool = False

    def draw(self, seed: int, count: int) -> Array:
        """``[count, 3]``: arrival (ns, at one request a second), prompt and output tokens.

        The requests of a lower count are the first of those of a higher one.
        """
        if self.rows is None:
            arrivals = evolve(self.workload.arrivals, rate=1.0)
            workload = evolve(self.workload, arrivals=arrivals, requests=count)
            return request_array(workload.build(seed, self.base))
        size = len(self.rows)
        block = min(self.block, size)
        starts = stream(seed, "blocks").integers(size, size=-(-count // block))
        index = ((starts[:, None] + np.arange(block)) % size).ravel()[:count]
        drawn: Array = self.rows[index]
        gaps = np.diff(self.rows[:, 0]).astype(np.float64)
        gaps *= NS_PER_S / gaps.mean()
        gaps = np.concatenate([[NS_PER_S], gaps])[index]  # the first of the trace has no gap: the mean
        gaps[0] = 0.0  # a run starts with its first request
        drawn[:, 0] = np.rint(np.cumsum(gaps))
        return drawn


def traffic_of(scenario: Scenario) -> Traffic:
    """The traffic of a scenario's workload.

    Raises :class:`~caltrio.errors.InputError` if a trace cannot be read, or arrives all at once.
    """
    workload, base = scenario.workload, scenario.base
    kind = workload.arrivals.kind
    if kind is ArrivalKind.CLOSED:
        poisson = Arrivals(kind=ArrivalKind.POISSON, rate=1.0)
        return Traffic(evolve(workload, arrivals=poisson), base, was_closed=True)
    if kind is not ArrivalKind.TRACE:
        return Traffic(workload, base)
    plain = evolve(workload, arrivals=Arrivals(kind=kind))
    rows = request_array(plain.build(scenario.seed, base))
    if len(rows) < 2 or rows[0, 0] == rows[-1, 0]:
        raise InputError(
            str(workload.trace), "", "all requests arrive at once, so it has no rate",
            "use --arrivals poisson",
        )  # fmt: skip
    return Traffic(plain, base, rows)


def at_rate(unit: Array, rate: float) -> Array:
    """The same requests at ``rate`` requests a second, from those at one."""
    arrivals = unit[:, 0] / rate
    if not arrivals[-1] < _MOST_NS:
        raise OverflowError
    scaled = unit.copy()
    scaled[:, 0] = np.rint(arrivals)
    return scaled


@frozen
class Question:
    """What to find out.

    Args:
        scenario: limits, timing, seed; replication *i* has the seed ``scenario.seed + i``.
        cells: (hypothesis, its semantics, in-flight limit) to compare.
        objective: what has to hold.
        traffic: what arrives.
        requests: of each run.
        rate: requests a second to find the number of cards for, or ``None``.
        router: of the fleet.
        most_cards: the largest fleet that is simulated.
    """

    scenario: Scenario
    cells: tuple[tuple[str, EngineSemantics, int], ...]
    objective: Objective
    traffic: Traffic
    requests: int = 1_000
    rate: float | None = None
    router: Router = Router.LEAST_OUTSTANDING
    most_cards: int = MOST_CARDS


def cells_of(
    scenario: Scenario, hypotheses: Iterable[str], limits: Iterable[int], *, possible: bool = False
) -> tuple[tuple[str, EngineSemantics, int], ...]:
    """Each hypothesis with each in-flight limit; ``own`` is the scenario's semantics.

    Raises ``ValueError`` for an unknown hypothesis, or for a limit that cannot work with one, unless
    only what is ``possible`` is wanted.
    """
    cells = []
    limits = list(limits)
    for name in hypotheses:
        semantics = scenario.semantics if name == OWN else scenario.plan.hypothesis(name).semantics
        for limit in limits:
            try:
                semantics.check_in_flight(limit)
            except ValueError as error:
                if possible:
                    continue
                raise ValueError(f"{name}: {error}") from error
            cells.append((name, semantics, limit))
    return tuple(cells)


def servable(requests: Array, limits: ExecutorConfig) -> NDArray[np.bool_]:
    """Which requests a card can serve at all: the others are refused at any load, and not counted."""
    room = min(limits.kv_capacity_tokens, load_manifest().max_seq)
    kv = requests[:, 1] + np.maximum(requests[:, 2] - 1, 0)
    fits: NDArray[np.bool_] = (requests[:, 1] >= 1) & (kv <= room)
    return fits


def check(question: Question) -> Array:
    """The requests of the first replication, if they can answer the question.

    Raises :class:`~caltrio.errors.InputError` if no request can be served, none has the latency
    that is bounded, or the largest fleet takes too much memory.
    """
    most = question.most_cards
    if (
        question.rate is not None
        and max(question.requests, REQUESTS_PER_CARD * most) * most > _MOST_ROWS
    ):
        raise InputError(
            "capacity", "",
            f"runs of {question.requests:,} requests on up to {most:,} cards take too much memory",
            "give fewer --requests, or a smaller --most-cards",
        )  # fmt: skip
    unit = question.traffic.draw(question.scenario.seed, question.requests)
    limits, objective = question.scenario.executor, question.objective
    fits = servable(unit, limits)
    if not fits.any():
        shortest = int((unit[:, 1] + np.maximum(unit[:, 2] - 1, 0)).min())
        raise InputError(
            "capacity", "",
            f"no request can be served: the shortest needs {shortest:,} tokens of KV, and the card "
            f"has {limits.kv_capacity_tokens:,}, the model {load_manifest().max_seq:,} positions",
            "shorten the requests, or raise kv_capacity_tokens",
        )  # fmt: skip
    for bound, least, name in ((objective.ttft_ns, 1, "TTFT"), (objective.tpot_ns, 2, "TPOT")):
        if bound is not None and not (unit[fits, 2] >= least).any():
            raise InputError(
                "capacity", "",
                f"no request has {least} output token{'s' * (least > 1)}, so none has a {name}",
                f"give more output tokens, or no bound on {name}",
            )  # fmt: skip
    return unit


@frozen
class Found:
    """What one replication says of one cell.

    Attributes:
        rate: requests a second up to which the objective holds on one card; 0.0 for none.
        missed: what is missed just above it; ``("saturation",)`` where the card cannot serve more.
        saturation: requests a second that the card completes when its sequences are never free.
        alone_ttft_ns, alone_tpot_ns: P99 with one request at a time; NaN where that was not run.
        alone_missed: what is missed even so.
        cards: the fewest that hold the wanted rate; ``None`` if there is none up to the most.
    """

    rate: float
    missed: tuple[str, ...]
    saturation: float
    alone_ttft_ns: float = math.nan
    alone_tpot_ns: float = math.nan
    alone_missed: tuple[str, ...] = ()
    cards: int | None = None


def replication(question: Question, seed: int, hints: Sequence[Found] | None = None) -> list[Found]:
    """What the replication with ``seed`` says of each cell of ``question``, in their order.

    ``hints`` are what another replication said: where to look first. Raises
    :class:`~caltrio.errors.InputError` if the twin does not cover a cell.
    """
    unit = question.traffic.draw(seed, question.requests)
    known: dict[object, Found] = {}
    before: dict[int, int] = {}  # in-flight limit: the last cell with it
    found: list[Found] = []
    for index, (name, semantics, limit) in enumerate(question.cells):
        # With one job on the device at a time there is nothing for the semantics to decide.
        key = (semantics if limit > 1 else None, limit)
        if key not in known:
            scenario = evolve(
                question.scenario,
                seed=seed,
                semantics=semantics,
                executor=evolve(question.scenario.executor, max_inflight=limit),
                workload=question.traffic.workload,
            )
            hint, last = None if hints is None else hints[index], before.get(limit)
            if hint is not None and hints is not None and last is not None:
                hint = _moved(hint, hints[last], found[last])
            known[key] = _Card(question, scenario, name, unit).found(hint)
        before[limit] = index
        found.append(known[key])
    return found


def _moved(hint: Found, last: Found, now: Found) -> Found:
    """``hint``, moved as the cell before has moved from ``last`` to ``now``."""
    rate, cards = hint.rate, hint.cards
    if last.rate and now.rate:
        rate *= now.rate / last.rate
    if cards and last.cards and now.cards:
        cards = max(1, round(cards * now.cards / last.cards))
    return evolve(hint, rate=rate, cards=cards)


@frozen
class _Card:
    """One cell of one replication."""

    question: Question
    scenario: Scenario
    hypothesis: str
    unit: Array

    def found(self, hint: Found | None) -> Found:
        alone = None
        if hint is None or hint.alone_missed:
            alone = self._alone()
            if alone.alone_missed:
                return alone
        loaded = self._closed(self.scenario.executor.max_active_sequences)
        # Where a deadline keeps it from being saturated, that deadline is missed sooner.
        most = math.inf
        if loaded is not None:
            # The rate searched for is of all arrivals, also of those that no card can serve.
            most = _completion_rate(loaded) / max(float((loaded.admitted_ns >= 0).mean()), 1e-9)
        start = 1.0 if loaded is None else most / 3
        guess = hint.rate if hint and hint.rate else start
        rate, missed = critical_rate(self._missed_at, guess, start / _LOW_LOAD, most)
        if not rate and alone is None:
            alone = self._alone()
            if alone.alone_missed:
                return alone
        said = Found(rate, missed, most) if alone is None else evolve(
            alone, rate=rate, missed=missed, saturation=most
        )  # fmt: skip
        if self.question.rate is None:
            return said
        return evolve(said, cards=self._cards(most, hint.cards if hint else None))

    def _alone(self) -> Found:
        facts, counted = self._closed(1), self._counted(self.unit)
        if facts is None:
            return Found(0.0, ("faults",), math.nan, alone_missed=("faults",))
        missed = self.question.objective.missed(facts, counted)
        ttft, tpot = (
            float(np.percentile(each, 99)) if len(each) else math.nan
            for each in latencies(facts, counted & facts.completed)
        )
        return Found(0.0, missed, math.nan, ttft, tpot, missed)

    def _cards(self, saturation: float, guess: int | None) -> int | None:
        question = self.question
        assert question.rate is not None
        least = question.rate / saturation
        if least > question.most_cards:
            return None
        count = max(question.requests, math.ceil(REQUESTS_PER_CARD * least))
        seed = self.scenario.seed
        requests = at_rate(question.traffic.draw(seed, count), question.rate)
        counted = self._counted(requests)

        def holds(cards: int) -> bool:
            try:
                facts = run_fleet(self.scenario, requests, cards, question.router).facts
            except InputError:  # a card's executor would come to distrust its device
                return False
            return not self._judge(facts, counted)

        return critical_cards(holds, guess or math.ceil(least), question.most_cards)

    def _counted(self, requests: Array) -> NDArray[np.bool_]:
        """The requests that are judged: after warm-up, and such as can be served at all."""
        counted = servable(requests, self.scenario.executor)
        counted[: int(WARM_UP * len(requests))] = False
        return counted

    def _missed_at(self, rate: float) -> tuple[str, ...]:
        facts = self._run(self.scenario, at_rate(self.unit, rate))
        return ("faults",) if facts is None else self._judge(facts, self._counted(self.unit))

    def _judge(self, facts: RequestFacts, counted: NDArray[np.bool_]) -> tuple[str, ...]:
        done = facts.completed  # of the others, the share is judged
        if load_state(facts.arrival_ns[done], facts.ended_ns[done]) is LoadState.OVERLOADED:
            return ("overload",)
        return self.question.objective.missed(facts, counted)

    def _closed(self, clients: int) -> RequestFacts | None:
        """The same requests, each sent as soon as one of ``clients`` has its last answer."""
        arrivals = Arrivals(kind=ArrivalKind.CLOSED, clients=clients)
        plain = Workload().lengths  # of the workload only what the card sees counts: these are sent
        workload = evolve(self.scenario.workload, trace=None, arrivals=arrivals, lengths=plain)
        requests = self.unit.copy()
        requests[:, 0] = 0
        return self._run(evolve(self.scenario, workload=workload), requests)

    def _run(self, scenario: Scenario, requests: Array) -> RequestFacts | None:
        """``None`` if the executor would come to distrust its device, which takes a deadline."""
        machine = build(scenario, requests)
        kernel.drive(machine.m)
        status = int(machine.m[k.STATUS])
        if status in _DISTRUST:
            return None
        if status in WHY_NOT:
            raise InputError(
                self.hypothesis, "", f"the twin does not cover it: {WHY_NOT[status]}",
                "use other hypotheses, or 'caltrio simulate' at rates of your choice",
            )  # fmt: skip
        return request_facts(machine.m, machine.requests)


def _completion_rate(facts: RequestFacts) -> float:
    """Completed requests a second until the last admission; without a tail in which load runs out."""
    done = facts.completed
    if not done.any():
        return 0.0
    until = int(facts.admitted_ns[done].max())
    by_then = int((facts.ended_ns[done] <= until).sum())
    if not by_then:
        until, by_then = int(facts.ended_ns[done].max()), int(done.sum())
    return by_then * NS_PER_S / until


def critical_rate(
    missed_at: Callable[[float], tuple[str, ...]], guess: float, floor: float, most: float
) -> tuple[float, tuple[str, ...]]:
    """A rate that holds, within 0.5 % of one that does not; and what that one misses.

    The objective holds up to some rate and not above it, as far as one run tells: where it changes
    more than once, this is one of the changes. 0.0 if nothing down to ``floor`` holds; ``most`` if
    that does.
    """
    missed: tuple[str, ...] = ("saturation",)
    low, high = 0.0, math.inf
    rate, step = min(max(guess, floor), most), 1.02
    while low == 0.0 or math.isinf(high):
        found = missed_at(rate)
        if not found:
            low = rate
            if low >= most:
                return low, missed
            rate = min(low * step, most)
        else:
            high, missed = rate, found
            if high <= floor:
                return 0.0, missed
            rate = max(high / step, floor)
        step = min(step * step, 8.0)
    while high / low > PRECISION:
        rate = math.sqrt(low * high)
        found = missed_at(rate)
        if found:
            high, missed = rate, found
        else:
            low = rate
    return low, missed


def critical_cards(holds: Callable[[int], bool], guess: int, most: int) -> int | None:
    """The fewest cards that hold where one card less does not; ``None`` if ``most`` do not hold."""
    low, high = 0, most + 1  # low does not hold, high does
    cards, step = min(max(guess, 1), most), 1
    while high - low > 1:
        if holds(cards):
            high = cards
        else:
            low = cards
        if high > most:
            cards = min(low + step, most)
        elif low == 0:
            cards = max(high - step, 1)
        else:
            cards = (low + high) // 2
        step *= 2
    return high if high <= most else None


@frozen
class Cell:
    """One hypothesis with one in-flight limit, over all replications.

    Attributes:
        rate: interval of the critical rate, requests a second.
        held: share of the replications whose own critical rate is ``holds_at`` or more.
        limited_by: what most replications miss just above their critical rate.
        saturation: mean, requests a second.
        alone_ttft_ns, alone_tpot_ns: P99 of one request at a time, in the first replication.
        alone_missed: what that misses.
        cards: interval of the critical number of cards; ``None`` if it was not asked for, or if a
            replication takes more than the most.
        cards_held: share of the replications that ``cards_needed`` is enough for.
        found: of each replication.
    """

    hypothesis: str
    max_inflight: int
    rate: Interval
    held: float
    limited_by: tuple[str, ...]
    saturation: float
    alone_ttft_ns: float
    alone_tpot_ns: float
    alone_missed: tuple[str, ...]
    cards: Interval | None
    cards_held: float
    found: tuple[Found, ...]

    @property
    def holds_at(self) -> float:
        """The lower end of the interval: the rate to count on, requests a second."""
        return max(0.0, self.rate.low)

    @property
    def cards_needed(self) -> int | None:
        """The upper end of the interval of cards, rounded up."""
        return None if self.cards is None else _up(self.cards.high)

    def by_division(self, rate: float) -> int | None:
        """Cards for ``rate`` if each took its share of it; ``None`` where one card holds nothing."""
        return _up(rate / self.holds_at) if self.holds_at else None


def _up(value: float) -> int:
    return math.ceil(value - 1e-9)


def cells_from(question: Question, replications: Sequence[Sequence[Found]]) -> list[Cell]:
    """What the replications say together, a cell each."""
    made = []
    for index, (name, _, limit) in enumerate(question.cells):
        found = tuple(each[index] for each in replications)
        rate = mean_interval([each.rate for each in found])
        counts = [each.cards for each in found if each.cards is not None]
        cards = mean_interval(counts) if len(counts) == len(found) else None
        made.append(
            Cell(
                name,
                limit,
                rate,
                float(np.mean([each.rate >= max(0.0, rate.low) for each in found])),
                _often(each.missed for each in found),
                float(np.mean([each.saturation for each in found])),
                found[0].alone_ttft_ns,
                found[0].alone_tpot_ns,
                found[0].alone_missed,
                cards,
                0.0 if cards is None else float(np.mean([c <= _up(cards.high) for c in counts])),
                found,
            )
        )
    return made


def _often(missed: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """What is in at least half of them."""
    each = list(missed)
    names = dict.fromkeys(name for one in each for name in one)
    return tuple(name for name in names if 2 * sum(name in one for one in each) >= len(each))


def find_capacity(
    question: Question,
    replications: int,
    executor: Executor | None = None,
    on_replication: Callable[[], None] = lambda: None,
) -> list[Cell]:
    """Answer ``question`` by so many replications, a cell each in their order.

    Args:
        question: what to find out.
        replications: 2 or more, for an interval.
        executor: runs replications beside each other; ``None`` runs them here. It changes nothing else.
        on_replication: called at the end of each.

    Raises:
        InputError: the requests cannot answer the question, or the twin does not cover a cell.
    """
    check(question)
    first, *seeds = [question.scenario.seed + index for index in range(replications)]
    made = [replication(question, first)]
    on_replication()
    if executor is None:
        for seed in seeds:
            made.append(replication(question, seed, made[0]))
            on_replication()
        return cells_from(question, made)
    futures = [executor.submit(replication, question, seed, made[0]) for seed in seeds]
    for future in as_completed(futures):
        future.result()
        on_replication()
    return cells_from(question, [*made, *(future.result() for future in futures)])


def output_tokens(question: Question, replications: int) -> float:
    """Mean output tokens of a request; one that cannot be served has none."""
    total = 0.0
    for seed in range(question.scenario.seed, question.scenario.seed + replications):
        unit = question.traffic.draw(seed, question.requests)
        fits = servable(unit, question.scenario.executor)
        total += float(unit[fits, 2].sum()) / len(unit)
    return total / replications


def cost_per_million(cards: float, price: float, rate: float, tokens: float) -> float:
    """Price of a million output tokens; NaN if there are none.

    Args:
        cards: how many serve them.
        price: of one for an hour.
        rate: requests a second.
        tokens: output tokens of a request, on average.
    """
    per_hour = rate * tokens * 3_600
    return cards * price / per_hour * 1e6 if per_hour else math.nan

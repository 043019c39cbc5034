"""What a sweep is to run: its file, the points of its design, and the scenario of each point."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen
from cattrs import Converter

from caltrio.errors import InputError
from caltrio.manifest import load_manifest
from caltrio.scenario import Scenario, scenario_from
from caltrio.timing import Figure, Jitter, Source, TimingProfile, load_timing
from caltrio.tomlfile import converter, one_of, read_toml, structure
from caltrio.units import format_ns, parse_bandwidth, parse_ns, parse_ps
from caltrio.workload.run import about_run

from .device import KIND

VERSION = version("caltrio")
MOST_POINTS = 100_000
MOST_RUNS = 1_000_000
NOTE = "set by the sweep"
_FIXED = {
    "seed": "seeds come from replications",
    "schema": "it is the layout of the file",
    "plan": "it changes no run",
}
_TIMING = "timing."


class Design(StrEnum):
    """Which points of the parameters' space are run."""

    GRID = "grid"  # every combination of the values listed
    SOBOL = "sobol"  # scrambled Sobol sequence
    LATIN_HYPERCUBE = "latin_hypercube"


class Scale(StrEnum):
    """How a range is covered: evenly, or evenly in its logarithm."""

    LINEAR = "linear"
    LOG = "log"


@frozen
class _File:
    """The layout of a sweep file."""

    schema: int = field()
    parameters: dict[str, Any]
    scenario: str | None = None
    replications: int = field(default=1)
    design: Design = Design.GRID
    points: int | None = None
    seed: int | None = None
    skip_impossible: bool = False

    @schema.validator
    def _known_schema(self, _attribute: object, schema: int) -> None:
        if schema != 1:
            raise ValueError(f"schema is {schema}; this version reads 1")

    @replications.validator
    def _some(self, _attribute: object, replications: int) -> None:
        if not 1 <= replications <= MOST_RUNS:
            raise ValueError(f"replications is {replications}; give 1 to {MOST_RUNS}")

    def __attrs_post_init__(self) -> None:
        if self.design is Design.GRID:
            for name in ("points", "seed"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is for sobol and latin_hypercube; the design is grid")
            return
        if self.points is None:
            raise ValueError(f"design {self.design.value} needs points, how many to draw")
        if not 1 <= self.points <= MOST_POINTS:
            raise ValueError(f"points is {self.points}; give 1 to {MOST_POINTS}")
        if self.design is Design.SOBOL and self.points.bit_count() != 1:
            below = 1 << (self.points.bit_length() - 1)
            near = f"{below} or {2 * below}" if 2 * below <= MOST_POINTS else str(below)
            raise ValueError(
                f"points is {self.points}, which is not a power of two; only then do Sobol points "
                f"cover the ranges evenly: give {near}, or design = 'latin_hypercube'"
            )
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; give 0 to 2**63 - 1")


@frozen
class _Range:
    """``{ from = ..., to = ... }``, both ends included."""

    low: Any = field(metadata={"toml": "from"})
    high: Any = field(metadata={"toml": "to"})
    scale: Scale = Scale.LINEAR
    integer: bool = False


@frozen
class _Unit:
    """A unit that quantities are kept in: the end of a column's name, and how it is written."""

    suffix: str
    symbol: str
    parse: Callable[[str], int]
    show: Callable[[int], str]


_NS = _Unit("_ns", "ns", parse_ns, format_ns)
_PS = _Unit("_ps", "ps", parse_ps, lambda value: format_ns(value / 1_000))
_BANDWIDTH = _Unit("_bytes_per_s", "B/s", parse_bandwidth, lambda value: f"{value / 1e9:.3g} GB/s")


def _unit_for(key: str) -> _Unit:
    """The unit of a quantity under this key."""
    last = key.rpartition(".")[2]
    if last.startswith("per_"):  # the slopes of a timing profile are the only durations kept in ps
        return _PS
    return _BANDWIDTH if last == "bandwidth" else _NS


def _unit_of(key: str, values: Sequence[Any]) -> _Unit | None:
    """The unit that all of these are quantities in; ``None`` for plain values."""
    unit = _unit_for(key)
    try:
        for value in values:
            if not isinstance(value, str):
                return None
            unit.parse(value)
    except ValueError:  # a plain word
        return None
    return unit


@frozen
class Axis:
    """One parameter: a dotted key of the scenario, and the values that it takes.

    Args:
        key: of the scenario file, or ``timing.`` and the key of a figure of the timing profile.
        choices: the values listed; empty for a range.
        span: the ends of a range, in ``unit`` if there is one.
        unit: of quantities.
        log, integer: how a range is covered.
    """

    key: str
    choices: tuple[Any, ...] = ()
    span: tuple[float, float] = (0.0, 0.0)
    unit: _Unit | None = None
    log: bool = False
    integer: bool = False

    @property
    def column(self) -> str:
        """The name of its column: a quantity's ends in the unit."""
        return self.key + (self.unit.suffix if self.unit else "")

    def at(self, share: float) -> Any:
        """The value at ``share`` of the axis, 0 to 1, as a scenario file would have it."""
        if self.choices:
            return self.choices[min(int(share * len(self.choices)), len(self.choices) - 1)]
        low, high = self.span
        # Rounding must give the ends as much room as the numbers between them.
        edge = 0.5 if self.integer else 0.0
        first, last = low - edge, high + edge
        if self.log:
            value = math.exp((1 - share) * math.log(first) + share * math.log(last))
        else:
            value = (1 - share) * first + share * last
        value = min(max(value, low), high)  # rounding errors, and the edges
        if self.unit is not None:
            return f"{round(value)}{self.unit.symbol}"
        return round(value) if self.integer else value

    def number(self, value: Any) -> Any:
        """``value`` for the table: a quantity as a whole number of its unit."""
        return value if self.unit is None else self.unit.parse(value)

    def text(self, value: Any) -> str:
        """``value`` for a person."""
        if self.unit is not None and not self.choices:
            return self.unit.show(self.unit.parse(value))
        if isinstance(value, float):
            return f"{value:.4g}"
        return value if isinstance(value, str) else json.dumps(value)


@frozen
class Point:
    """One point: a value for each axis, the digest of its scenario, and why it cannot be run, if so."""

    values: tuple[Any, ...]
    digest: str
    impossible: str | None = None


@frozen(eq=False)
class Sweep:
    """A sweep, checked: every point has a scenario that can be run, or says why not.

    Args:
        path: its file.
        axes: its parameters, in the order of the file.
        points: in the order of the table.
        seeds: one for each replication, the same at every point.
        digest: of all that its table depends on.
        about: what the metadata of its table says; JSON types only.
        scenario_at: builds the scenario of a point from its index and values.
    """

    path: Path
    axes: tuple[Axis, ...]
    points: tuple[Point, ...]
    seeds: tuple[int, ...]
    digest: str
    about: Mapping[str, Any]
    scenario_at: Callable[[int, Sequence[Any]], Scenario]

    @property
    def total(self) -> int:
        """Runs in all: points that can be run, times replications."""
        return sum(point.impossible is None for point in self.points) * len(self.seeds)

    def scenario(self, index: int) -> Scenario:
        """The scenario of point ``index``, with the first seed."""
        return self.scenario_at(index, self.points[index].values)

    def name(self, index: int) -> str:
        """Point ``index`` in words, for messages."""
        return _name(index, self.axes, self.points[index].values)


def load_sweep(path: Path, on_point: Callable[[int, int], None] = lambda _done, _total: None) -> Sweep:
    """A sweep from TOML, with the scenario of every point built and checked.

    ``on_point`` is told how many points of how many are checked. Raises :class:`InputError` naming
    the file and the key, or the point.
    """
    where = str(path)
    file = structure(read_toml(path), _File, where, _converter())
    given: dict[str, Any] = {}
    for key, value in _flat(file.parameters):
        if key in given:
            raise InputError(where, f"parameters.{key}", "is there twice, in quotes and as a table")
        given[key] = value
    axes = tuple(_axis(key, value, file.design, where) for key, value in given.items())
    if not axes:
        example = 'name one, as in "executor.max_inflight" = [1, 2]'
        raise InputError(where, "parameters", "is empty", example)
    values = _points(file, axes, where)
    runs = len(values) * file.replications
    if runs > MOST_RUNS:
        problem = f"{runs:,} runs ({len(values):,} points) are more than {MOST_RUNS:,}"
        raise InputError(where, "replications", problem, "give fewer")
    base = None if file.scenario is None else path.parent / file.scenario
    checker = _Checker(path, base, axes)
    seed = checker.scenario(0, values[0]).seed
    seeds = tuple(range(seed, seed + file.replications))
    if seeds[-1] >= 2**63:
        raise InputError(
            where, "replications", f"seed {seeds[-1]} is beyond 2**63 - 1", "lower the seed"
        )
    points = []
    for index, point in enumerate(values):
        points.append(checker.point(index, point, skip_impossible=file.skip_impossible))
        on_point(index + 1, len(values))
    sweep = {
        "design": file.design.value,
        "points": len(points),
        "replications": file.replications,
        "seed": file.seed,
        "parameters": given,
    }
    about = {
        **about_run(checker.scenario(0, values[0]), KIND.name, load_manifest()),
        "scenario": checker.base_facts(),
        "seeds": {"run": seed, "replications": file.replications},
        "sweep": sweep,
        "complete": True,
    }
    columns = [axis.column for axis in axes]
    digest = _digest([VERSION, columns, seeds, [(point.values, point.digest) for point in points]])
    return Sweep(path, axes, tuple(points), seeds, digest, about, checker.scenario)


@cache  # making one takes much longer than using it
def _converter() -> Converter:
    made = converter()
    made.register_structure_hook_func(lambda cls: cls is Any, lambda value, _cls: value)
    return made


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _name(index: int, axes: Sequence[Axis], values: Sequence[Any]) -> str:
    pairs = zip(axes, values, strict=True)
    text = ", ".join(f"{axis.key} = {axis.text(value)}" for axis, value in pairs)
    return f"point {index} ({text if len(text) <= 300 else text[:300] + '...'})"


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values, whether the keys are in quotes or are tables in tables."""
    for key, value in table.items():
        dotted = prefix + key
        if isinstance(value, dict) and not {"from", "to"} & value.keys():
            yield from _flat(value, f"{dotted}.")
        else:
            yield dotted, value


def _axis(key: str, value: Any, design: Design, where: str) -> Axis:
    place = f"parameters.{key}"
    reason = _FIXED.get(key.partition(".")[0])
    if reason is not None:
        raise InputError(where, place, f"cannot be swept: {reason}")
    if isinstance(value, list):
        if not value:
            raise InputError(where, place, "is an empty list", "give a value or more")
        for index, choice in enumerate(value):
            _check_value(choice, where, f"{place}.{index}")
        return Axis(key, tuple(value), unit=_unit_of(key, value))
    if design is Design.GRID:
        raise InputError(where, place, f"{value!r} is not a list; a grid needs the values listed")
    if not isinstance(value, dict):
        problem = f"{value!r} is neither a list of values nor a range"
        raise InputError(where, place, problem, "write { from = 1, to = 8 }")
    spread = structure(value, _Range, f"{where}: {place}", _converter())
    unit = _unit_of(key, (spread.low, spread.high))
    ends: list[float] = []
    for name, end in (("from", spread.low), ("to", spread.high)):
        if unit is not None:
            ends.append(unit.parse(end))
            continue
        _check_value(end, where, f"{place}.{name}")
        if isinstance(end, bool) or not isinstance(end, int | float):
            problem = f"{end!r} is not a number, nor are both ends durations, or bandwidths"
            raise InputError(where, f"{place}.{name}", problem)
        if spread.integer and end != round(end):
            problem = f"{end!r} is not a whole number, and integer is true"
            raise InputError(where, f"{place}.{name}", problem)
        ends.append(end)
    low, high = ends
    if not low < high:
        problem = f"from {spread.low!r} is not below to {spread.high!r}"
        raise InputError(where, place, problem)
    log = spread.scale is Scale.LOG
    if log and low <= 0:
        problem = f"from is {spread.low!r}; a range with scale = 'log' starts above 0"
        raise InputError(where, place, problem)
    return Axis(key, (), (low, high), unit, log, spread.integer)


def _check_value(value: Any, where: str, place: str) -> None:
    """Only what a scenario can hold, and JSON can tell of."""
    if isinstance(value, list):
        for index, inner in enumerate(value):
            _check_value(inner, where, f"{place}.{index}")
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check_value(inner, where, f"{place}.{key}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError(where, place, f"{value!r} is not a finite number")
    elif isinstance(value, int) and abs(value) > 2**64:
        raise InputError(where, place, f"{value!r} is beyond 64 bits")
    elif not isinstance(value, str | int | float):
        raise InputError(where, place, f"{value!r} is no value of a scenario")


def _points(file: _File, axes: Sequence[Axis], where: str) -> list[tuple[Any, ...]]:
    if file.design is Design.GRID:
        count = math.prod(len(axis.choices) for axis in axes)
        if count > MOST_POINTS:
            remedy = "list fewer values, or draw points with design = 'sobol'"
            raise InputError(
                where, "parameters", f"{count:,} points are more than {MOST_POINTS:,}", remedy
            )
        return list(itertools.product(*(axis.choices for axis in axes)))
    from scipy.stats import qmc  # noqa: PLC0415 - takes a second, and workers need it not

    kind = qmc.Sobol if file.design is Design.SOBOL else qmc.LatinHypercube
    shares = kind(len(axes), seed=file.seed or 0).random(file.points).tolist()
    return [tuple(axis.at(share) for axis, share in zip(axes, row, strict=True)) for row in shares]


class _Checker:
    """Builds the scenarios of a sweep's points, and says what is wrong with one."""

    def __init__(self, path: Path, base: Path | None, axes: tuple[Axis, ...]) -> None:
        self._where, self._axes, self._base_path = str(path), axes, base
        self._base: dict[str, Any] = {"schema": 1} if base is None else read_toml(base)
        self._folder = (base or path).parent.absolute()  # a worker may run in another folder
        # "semantics" before "semantics.engines": what is set in a table comes after the table.
        self._order = sorted(range(len(axes)), key=lambda index: axes[index].key.count("."))
        self._load = cache(load_timing)
        self._traces: dict[tuple[str, str], str] = {}

    def base_facts(self) -> dict[str, Any]:
        """The tables of the scenario, without folders of this machine."""
        facts = copy.deepcopy(self._base)
        workload = facts.get("workload")
        if isinstance(workload, dict) and "trace" in workload:
            workload["trace"] = Path(workload["trace"]).name
        return facts

    def scenario(self, index: int, values: Sequence[Any]) -> Scenario:
        """The scenario of point ``index``. Raises :class:`InputError`."""
        try:
            return self._build(values)
        except InputError as error:
            self._blame_base(error)
            parts = (part for part in (error.where, error.place) if part != self._where)
            place = ": ".join((_name(index, self._axes, values), *filter(None, parts)))
            raise InputError(self._where, place, error.problem, error.remedy) from error

    def _build(self, values: Sequence[Any]) -> Scenario:
        data = copy.deepcopy(self._base)
        figures = {}
        for index in self._order:
            key, value = self._axes[index].key, values[index]
            if key.startswith(_TIMING):
                figures[key.removeprefix(_TIMING)] = value
            else:
                _set(data, key, copy.deepcopy(value))
        scenario = scenario_from(data, self._where, self._folder, self._load)
        if not figures:
            return scenario
        return evolve(scenario, timing=_with_figures(scenario.timing, figures, self._where))

    def _blame_base(self, error: InputError) -> None:
        """Raise the same error of the scenario's own file, if it is wrong without the sweep."""
        if self._base_path is None:
            return
        try:
            scenario_from(self._base, str(self._base_path), self._folder, self._load)
        except InputError as own:
            if (own.place, own.problem) == (error.place, error.problem):
                raise

    def point(self, index: int, values: tuple[Any, ...], *, skip_impossible: bool) -> Point:
        """Point ``index``, checked. Raises :class:`InputError`."""
        scenario = self.scenario(index, values)
        digest = _digest([VERSION, scenario.to_json(), self._trace(scenario)])
        try:
            scenario.semantics.check_in_flight(scenario.executor.max_inflight)
        except ValueError as error:
            if skip_impossible:
                return Point(values, digest, str(error))
            place, remedy = _name(index, self._axes, values), "or set skip_impossible = true"
            raise InputError(self._where, place, str(error), remedy) from error
        return Point(values, digest)

    def _trace(self, scenario: Scenario) -> str:
        """A digest of the trace's contents, once it has been read without complaint."""
        workload = scenario.workload
        if workload.trace is None:
            return ""
        known = workload.trace, workload.format
        if known not in self._traces:
            workload.build(scenario.seed, scenario.base)
            content = (self._folder / workload.trace).read_bytes()
            self._traces[known] = hashlib.sha256(content).hexdigest()
        return self._traces[known]


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key of a scenario's tables."""
    *parts, last = key.split(".")
    table = data
    for depth, part in enumerate(parts):
        inner = table.setdefault(part, {})
        if depth == 0 and part == "semantics" and isinstance(inner, str):
            inner = table[part] = {"preset": inner}
        if not isinstance(inner, dict):
            place = ".".join(parts[: depth + 1])
            raise InputError(f"parameters.{key}", place, f"is {inner!r} in the scenario, not a table")
        table = inner
    table[last] = value


def _with_figures(profile: TimingProfile, changes: Mapping[str, Any], where: str) -> TimingProfile:
    """``profile`` with figures by dotted key, each marked as assumed."""
    jitter = {
        "distribution": profile.jitter.distribution.value,
        "cv": profile.jitter.cv,
        "seed": profile.jitter.seed,
        "stages": list(profile.jitter.stages),
    }
    known = [*profile.figures(), *(f"jitter.{name}" for name in jitter)]
    shaken = False
    for key, value in changes.items():
        try:
            one_of(key, known, "timing figure")
            if key.startswith("jitter."):
                jitter[key.removeprefix("jitter.")], shaken = value, True
                continue
            if not isinstance(value, str):
                raise ValueError(f'{value!r} has no unit; write it as text with one, as in "40ms"')
            figure: Figure[Any] = Figure(_unit_for(key).parse(value), Source.ASSUMED, NOTE)
        except ValueError as error:
            raise InputError(where, f"timing.{key}", str(error)) from error
        profile = _replaced(profile, key.split("."), figure)
    if shaken:
        where = f"{where}: timing.jitter"
        profile = evolve(profile, jitter=structure(jitter, Jitter, where, _converter()))
    return profile


def _replaced(thing: Any, path: Sequence[str], value: Any) -> Any:
    """``thing`` with another value in an attribute of an attribute of it."""
    head, *rest = path
    return evolve(thing, **{head: _replaced(getattr(thing, head), rest, value) if rest else value})

"""A scenario: everything that a run depends on, from one TOML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import cattrs
from attrs import asdict, evolve, field, fields, frozen

from .config import ExecutorConfig
from .errors import InputError
from .planspec import PlanSpec
from .semantics import PRESETS, EngineSemantics, Preset
from .timing import Figure, Fixed, Source, TimingProfile, load_timing
from .tomlfile import converter, one_of, read_toml, structure
from .workload.spec import Workload


def semantics_from(value: object, made: cattrs.Converter, where: str) -> EngineSemantics:
    """A preset by name, ``{preset = "...", field = ...}``, or fields alone."""
    if isinstance(value, str):
        return preset(value)
    if isinstance(value, dict) and "preset" in value:
        rest = {key: inner for key, inner in value.items() if key != "preset"}
        given = structure({"semantics": rest}, _Semantics, where, made).semantics
        names = [attribute.name for attribute in fields(EngineSemantics) if attribute.name in rest]
        changes = {name: getattr(given, name) for name in names}
        return evolve(preset(value["preset"]), **changes)
    return structure({"semantics": value}, _Semantics, where, made).semantics


def _custom(given: Mapping[str, Any], made: cattrs.Converter, where: str) -> dict[str, Preset]:
    """Hypotheses that a plan defines itself; what they mean is what they change."""
    found = {}
    for name, table in given.items():
        if name in PRESETS:
            raise ValueError(f"custom.{name} has the name of a preset; give it another")
        if not isinstance(table, dict):
            raise ValueError(f'custom.{name} is {table!r}; give a table, as {{preset = "serial"}}')
        changes = ", ".join(f"{key} = {value}" for key, value in dict(table).items() if key != "preset")
        like = table.get("preset")
        meaning = f"As {like}, with {changes}." if like else f"{changes}."
        found[name] = Preset(name, meaning, semantics_from(table, made, f"{where}: plan.custom.{name}"))
    return found


def preset(name: object) -> EngineSemantics:
    """The semantics of a preset. Raises ``ValueError`` naming the known ones."""
    return PRESETS[one_of(str(name), list(PRESETS), "semantics preset")].semantics


@frozen
class _Semantics:
    semantics: EngineSemantics


@frozen
class _File:
    """The layout of a scenario file."""

    schema: int = field()
    seed: int = 0
    timing: str = "qwen3-8b"
    semantics: Any = "full-duplex"
    workload: Workload = field(factory=Workload)
    executor: ExecutorConfig = field(factory=ExecutorConfig)
    plan: PlanSpec = field(factory=PlanSpec)

    @schema.validator
    def _known_schema(self, _attribute: object, schema: int) -> None:
        if schema != 1:
            raise ValueError(f"schema is {schema}; this version reads 1")


@frozen
class Scenario:
    """Everything that a run depends on.

    Args:
        seed: of every named random stream of the run.
        timing: what the stages cost.
        semantics: the hypothesis about the engines.
        workload: what arrives.
        executor: the limits.
        plan: what ``caltrio plan`` compares.
        base: folder that relative paths are taken from.
    """

    seed: int = field(default=0)
    timing: TimingProfile = field(factory=lambda: load_timing("qwen3-8b"))
    semantics: EngineSemantics = field(factory=EngineSemantics)
    workload: Workload = field(factory=Workload)
    executor: ExecutorConfig = field(factory=ExecutorConfig)
    plan: PlanSpec = field(factory=PlanSpec)
    base: Path | None = None

    @seed.validator
    def _in_range(self, _attribute: object, seed: int) -> None:
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed is {seed}; give 0 to 2**63 - 1")

    @property
    def run_timing(self) -> TimingProfile:
        """The timing of a run: the profile, with the workload's client time where it states one."""
        client_ns = self.workload.client_time_ns
        if client_ns is None:
            return self.timing
        figure = Figure(client_ns, Source.ASSUMED, "set by the workload's client_time")
        return evolve(self.timing, client=Fixed(figure))

    def to_json(self) -> dict[str, Any]:
        """The scenario as JSON types, for the metadata of records."""
        plain = asdict(self, filter=lambda attribute, _value: attribute.name not in ("base", "plan"))
        plain["workload"]["trace"] = self.workload.trace and Path(self.workload.trace).name
        return plain


def load_scenario(path: Path) -> Scenario:
    """A scenario from TOML. Raises :class:`InputError` naming the file and the first wrong key."""
    scenario = scenario_from(read_toml(path), str(path), path.parent)
    try:
        scenario.semantics.check_in_flight(scenario.executor.max_inflight)
    except ValueError as error:
        raise InputError(str(path), "semantics", str(error)) from error
    return scenario


def scenario_from(
    data: dict[str, Any],
    where: str,
    base: Path,
    load: Callable[[str, Path | None], TimingProfile] = load_timing,
) -> Scenario:
    """A scenario from the tables of a file; its in-flight limit is not yet checked.

    Args:
        data: the tables.
        where: names them in errors.
        base: the folder that relative paths are taken from.
        load: reads the timing profile; who makes many scenarios may keep what was read.

    Raises :class:`InputError` naming ``where`` and the first wrong key.
    """
    made = _scenario_converter()
    read = structure(data, _File, where, made)
    try:
        plan = evolve(read.plan, custom=_custom(read.plan.custom, made, where))
        for name in plan.hypotheses:
            plan.hypothesis(name)
    except ValueError as error:
        raise InputError(where, "plan", str(error)) from error
    try:
        semantics = semantics_from(read.semantics, made, where)
    except ValueError as error:
        raise InputError(where, "semantics", str(error)) from error
    try:
        return Scenario(
            seed=read.seed,
            timing=load(read.timing, base),
            semantics=semantics,
            workload=read.workload,
            executor=read.executor,
            plan=plan,
            base=base,
        )
    except ValueError as error:
        raise InputError(where, "seed", str(error)) from error


@cache  # making one takes much longer than using it
def _scenario_converter() -> cattrs.Converter:
    made = converter()
    made.register_structure_hook_func(lambda cls: cls is Any, lambda value, _cls: value)
    return made

"""What changed since an earlier plan: verdicts, figures that moved beyond their intervals, settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attrs import frozen

from caltrio.errors import InputError

FILE = "plan.json"


@frozen
class Change:
    """One thing that is not as it was; ``None`` where it was not there."""

    what: str
    before: str | None
    now: str | None


def read_plan(path: Path) -> dict[str, Any]:
    """The ``plan.json`` of an earlier plan, from its folder or itself.

    Raises :class:`InputError` if there is none, or it is not one.
    """
    file = path / FILE if path.is_dir() else path
    where = f"--compare {path}"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            where, "", f"{file.name} cannot be read: {reason}", "name the --out folder of a plan"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(where, file.name, f"is not JSON: {error}", "run that plan again") from error
    keys = {"verdicts", "scenario", "cells", "seed", "complete"}
    if not isinstance(found, dict) or not keys <= found.keys():
        raise InputError(where, file.name, "is not of a plan of this version", "run that plan again")
    if found["complete"] is not True:
        raise InputError(where, file.name, "is of a plan that was interrupted", "run that plan again")
    changes(found, found, where)  # before anything runs: is all there that will be compared?
    return found


def changes(before: dict[str, Any], now: dict[str, Any], where: str = "--compare") -> list[Change]:
    """Verdicts first, then figures whose intervals do not meet, then settings.

    Both are as of :meth:`sim.plan.Plan.to_json`. Raises :class:`InputError` if ``before`` is damaged.
    """
    try:
        return [*_verdicts(before, now), *_figures(before, now), *_settings(before, now)]
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InputError(where, FILE, f"is damaged ({error!r})", "run that plan again") from error


def _verdicts(before: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    old, new = (
        {(v["hypothesis"], v["max_inflight"]): v["verdict"] for v in plan["verdicts"]}
        for plan in (before, now)
    )
    return [
        Change(f"verdict of {name}, {limit} in flight", old.get((name, limit)), new.get((name, limit)))
        for name, limit in dict.fromkeys([*old, *new])
        if old.get((name, limit)) != new.get((name, limit))
    ]


_FIGURES = (
    ("gain", "gain in tokens/s", 100, "%"),
    ("tpot_p99_change", "change of TPOT P99", 100, "%"),
)
_CELL_FIGURES = (
    ("loaded_tokens_per_s", "tokens/s", 1, ""),
    ("ttft_p99_ns", "TTFT P99", 1e-6, "ms"),
    ("tpot_p99_ns", "TPOT P99", 1e-6, "ms"),
)


def _figures(before: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    found = []
    for kind, keys, figures in (
        ("verdicts", ("hypothesis", "max_inflight"), _FIGURES),
        ("cells", ("hypothesis", "max_inflight", "load"), _CELL_FIGURES),
    ):
        old, new = (
            {tuple(one[key] for key in keys): one for one in plan[kind]} for plan in (before, now)
        )
        for key in old.keys() & new.keys():
            for name, words, factor, unit in figures:
                one, two = old[key][name], new[key][name]
                if _apart(one, two):
                    place = f"{key[0]}, {key[1]} in flight" + (f", {key[2]}" if len(key) > 2 else "")
                    found.append(
                        Change(
                            f"{words} of {place}", _text(one, factor, unit), _text(two, factor, unit)
                        )
                    )
    return sorted(found, key=lambda change: change.what)


def _apart(one: dict[str, Any], two: dict[str, Any]) -> bool:
    """Do two intervals not meet?"""
    ends = [one["low"], one["high"], two["low"], two["high"]]
    return None not in ends and (one["high"] < two["low"] or two["high"] < one["low"])


def _text(interval: dict[str, Any], factor: float, unit: str) -> str:
    half = (interval["high"] - interval["low"]) / 2
    return f"{interval['estimate'] * factor:.4g} ± {half * factor:.2g} {unit}".rstrip()


def _settings(before: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    old, new = (_flat(plan["scenario"]) | _flat({"seed": plan["seed"]}) for plan in (before, now))
    return [
        Change(f"setting {key}", old.get(key), new.get(key))
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key) and not key.endswith(".note")
    ]


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(value, dict):
        found: dict[str, str] = {}
        for key, inner in value.items():
            found |= _flat(inner, f"{prefix}.{key}" if prefix else key)
        return found
    return {prefix: str(list(value) if isinstance(value, tuple) else value)}

"""Readers of public request traces. Every row is read or is an error; none is skipped.

Formats, recognised by their header line:

* ``azure``: ``TIMESTAMP,ContextTokens,GeneratedTokens`` (Azure LLM inference traces);
* ``burstgpt``: ``Timestamp,[Session ID,Elapsed time,]Model,Request tokens,Response tokens,...``;
* ``csv``: ``arrival_s,prompt_tokens,output_tokens``;
* ``mooncake``: JSON lines with ``timestamp`` (ms), ``input_length``, ``output_length``.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any

from attrs import frozen

from ..errors import InputError
from ..tomlfile import read_text
from ..units import NS_PER_MS, NS_PER_S
from .requests import Request

MOST_TOKENS = 10**9
MOST_NS = 2**62


@frozen
class _Layout:
    """Where a CSV format keeps its three columns, and how it writes an instant."""

    arrival: str
    prompt: str
    output: str
    columns: tuple[str, ...]  # all that must be there
    to_ns: Callable[[str], int]


def _seconds(text: str) -> int:
    return _scaled(text, NS_PER_S)


# ASCII digits only: Decimal() and int() would take "１２" and "1_000" too.
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?")


def _scaled(text: str, factor: int) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError(text)
    value = Decimal(text) * factor
    if abs(value) >= MOST_NS:
        raise ValueError(text)
    return round(value)


_FRACTION = re.compile(r"\.([0-9]{1,9})")


def _date(text: str) -> int:
    """``2023-11-16 18:17:03.9799600`` -> ns since 1970; datetime itself keeps only µs."""
    fraction = _FRACTION.search(text)
    whole = datetime.fromisoformat(_FRACTION.sub("", text, count=1).strip())
    if whole.tzinfo is None:
        whole = whole.replace(tzinfo=UTC)
    since = whole - datetime(1970, 1, 1, tzinfo=UTC)
    ns = (since.days * 86_400 + since.seconds) * NS_PER_S
    return ns + (int(fraction[1].ljust(9, "0")) if fraction else 0)


_LAYOUTS = {
    "azure": _Layout(
        "TIMESTAMP",
        "ContextTokens",
        "GeneratedTokens",
        ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
        _date,
    ),
    "burstgpt": _Layout(
        "Timestamp",
        "Request tokens",
        "Response tokens",
        ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type"),
        _seconds,
    ),
    "csv": _Layout(
        "arrival_s",
        "prompt_tokens",
        "output_tokens",
        ("arrival_s", "prompt_tokens", "output_tokens"),
        _seconds,
    ),
}
FORMATS = ("auto", *_LAYOUTS, "mooncake")


def read_trace(path: Path, form: str = "auto", limit: int | None = None) -> list[Request]:
    """The requests of a trace; the first arrives at 0.

    Args:
        path: the file.
        form: one of :data:`FORMATS`; ``auto`` looks at the header.
        limit: read only so many rows.

    Raises :class:`InputError` naming the file, the row, the column and the value.
    """
    text = read_text(path)
    where = str(path)
    if not text.strip():
        raise InputError(where, "", "is empty", "give a trace with a header and at least one row")
    if form == "auto":
        form = _recognise(text, where)
    rows = _json_rows(text, where) if form == "mooncake" else _csv_rows(text, where, form)
    requests: list[Request] = []
    start_ns = previous_ns = None
    for place, arrival_ns, prompt, output in rows:
        if previous_ns is not None and arrival_ns < previous_ns:
            raise InputError(
                where,
                place,
                f"arrival time goes backwards by {(previous_ns - arrival_ns) / NS_PER_S:.9g} s",
                "sort the trace by arrival",
            )
        previous_ns = arrival_ns
        start_ns = arrival_ns if start_ns is None else start_ns
        requests.append(Request(len(requests), arrival_ns - start_ns, prompt, output))
        if limit is not None and len(requests) >= limit:
            break
    if not requests:
        raise InputError(where, "", "has a header but no rows", "give at least one request")
    return requests


def _recognise(text: str, where: str) -> str:
    first = next(line for line in text.splitlines() if line.strip())
    if first.lstrip().startswith("{"):
        return "mooncake"
    header = {cell.strip() for cell in next(csv.reader([first]))}
    best = max(_LAYOUTS, key=lambda name: len(header & set(_LAYOUTS[name].columns)))
    if not header & set(_LAYOUTS[best].columns):
        known = "; ".join(",".join(layout.columns) for layout in _LAYOUTS.values())
        raise InputError(
            where, "line 1", f"header {first[:80]!r} is of no known format", f"known: {known}"
        )
    return best


_Row = tuple[str, int, int, int]  # place, arrival_ns, prompt_tokens, output_tokens


def _csv_rows(text: str, where: str, form: str) -> Iterator[_Row]:
    layout = _LAYOUTS[form]
    reader = csv.reader(StringIO(text, newline=""), strict=True)
    try:
        header = [cell.strip() for cell in next(row for row in reader if row)]
        missing = [name for name in layout.columns if name not in header]
        if missing:
            raise InputError(
                where,
                f"line {reader.line_num}",
                f"column {missing[0]!r} is missing; the header has {', '.join(header)[:200]}",
                f"the {form} format needs {', '.join(layout.columns)}",
            )
        picked = [header.index(name) for name in (layout.arrival, layout.prompt, layout.output)]
        for number, row in enumerate((row for row in reader if row), start=1):
            place = f"row {number} (line {reader.line_num})"
            if len(row) != len(header):
                raise InputError(
                    where, place, f"has {len(row)} cells, the header {len(header)}", "mend the row"
                )
            arrival, prompt, output = (row[index].strip() for index in picked)
            try:
                arrival_ns = layout.to_ns(arrival)
            except (ValueError, OverflowError) as error:
                raise InputError(
                    where,
                    f"{place}, column {layout.arrival!r}",
                    f"{arrival[:60]!r} is not an arrival time",
                    "write it as the format does",
                ) from error
            yield (
                place,
                arrival_ns,
                _tokens(prompt, where, f"{place}, column {layout.prompt!r}"),
                _tokens(output, where, f"{place}, column {layout.output!r}"),
            )
    except csv.Error as error:
        raise InputError(where, f"line {reader.line_num}", f"is not valid CSV: {error}") from error


def _tokens(value: object, where: str, place: str) -> int:
    text = str(value)
    if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) > MOST_TOKENS:
        raise InputError(
            where, place, f"{text[:60]!r} is not a token count", "give a whole number, 0 or more"
        )
    return int(text)


def _json_rows(text: str, where: str) -> Iterator[_Row]:
    number = 0
    for line_number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        number += 1
        place = f"row {number} (line {line_number})"
        try:
            row: Any = json.loads(line, parse_float=Decimal)
        except (ValueError, RecursionError, ArithmeticError) as error:
            raise InputError(where, place, f"is not valid JSON: {error}", "mend the row") from error
        if not isinstance(row, dict):
            raise InputError(where, place, f"is not a JSON object: {line[:60]!r}", "mend the row")
        for key in ("timestamp", "input_length", "output_length"):
            if key not in row:
                raise InputError(where, place, f"key {key!r} is missing", "add it")
            if not isinstance(row[key], int | float | Decimal) or isinstance(row[key], bool):
                raise InputError(
                    where,
                    f"{place}, key {key!r}",
                    f"{json.dumps(row[key], default=str)[:60]} is not a number",
                    "give a number",
                )
        try:
            arrival_ns = _scaled(str(row["timestamp"]), NS_PER_MS)
        except ValueError as error:
            raise InputError(
                where,
                f"{place}, key 'timestamp'",
                f"{str(row['timestamp'])[:60]!r} is not a time in ms",
                "give a number",
            ) from error
        yield (
            place,
            arrival_ns,
            _tokens(row["input_length"], where, f"{place}, key 'input_length'"),
            _tokens(row["output_length"], where, f"{place}, key 'output_length'"),
        )

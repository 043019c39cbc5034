"""Strict TOML: every unknown key, wrong type or wrong unit is one line that names file and key."""

from __future__ import annotations

import difflib
import math
import operator
import tomllib
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, NewType, TypeVar, get_origin

import cattrs
from attrs import fields, has
from cattrs.errors import (
    AttributeValidationNote,
    ClassValidationError,
    ForbiddenExtraKeysError,
    IterableValidationError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn, override

from . import units
from .errors import InputError

Ns = NewType("Ns", int)
Ps = NewType("Ps", int)
Bandwidth = NewType("Bandwidth", int)

T = TypeVar("T")


def _text(parse: Callable[[str], int]) -> Callable[[Any, Any], int]:
    def structure(value: Any, _type: Any) -> int:
        if not isinstance(value, str):
            raise ValueError(f'{value!r} has no unit; write it as text with one, as in "40ms"')
        return parse(value)

    return structure


def _exactly(kind: type) -> Callable[[Any, Any], Any]:
    names = {int: "a whole number", str: "text in quotes", bool: "true or false"}

    def structure(value: Any, _type: Any) -> Any:
        # bool is an int to Python, but not to the person who wrote the file.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{value!r} is not {names[kind]}")
        return value

    return structure


def _number(value: Any, _type: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def _listed(structure: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def listed(value: Any, kind: Any) -> Any:
        if not isinstance(value, list):  # text would be taken letter by letter
            raise ValueError(f"{value!r} is not a list; write it in brackets")
        return structure(value, kind)

    return listed


def _has_file_names(cls: Any) -> bool:
    return has(cls) and any("toml" in attribute.metadata for attribute in fields(cls))


def _by_file_name(made: cattrs.Converter, cls: Any) -> Callable[[Any, Any], Any]:
    """A field may be written under another name: "grace" in a file, ``grace_ns`` inside."""
    renamed: dict[str, Any] = {
        attribute.name: override(rename=attribute.metadata["toml"])
        for attribute in fields(cls)
        if "toml" in attribute.metadata
    }
    return make_dict_structure_fn(
        cls, made, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True, **renamed
    )


def _choice(value: Any, kind: Any) -> Any:
    return kind(one_of(str(value), [member.value for member in kind], kind.__name__))


def converter() -> cattrs.Converter:
    """A cattrs converter that knows our units and forgives nothing."""
    made = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
    # By class, not by predicate: cattrs asks its own hooks for these before any predicate.
    hooks: dict[Any, Callable[[Any, Any], Any]] = {
        int: _exactly(int),
        str: _exactly(str),
        bool: _exactly(bool),
        float: _number,
        StrEnum: _choice,  # nearer to an enum of ours than str is
        Ns: _text(units.parse_ns),
        Ps: _text(units.parse_ps),
        Bandwidth: _text(units.parse_bandwidth),
    }
    for kind, hook in hooks.items():
        made.register_structure_hook(kind, hook)
    for kind in (int, float, str):
        several = tuple[kind, ...]  # type: ignore[valid-type]
        made.register_structure_hook_func(
            partial(operator.eq, several), _listed(made.get_structure_hook(several))
        )
    made.register_structure_hook_factory(_has_file_names, partial(_by_file_name, made))
    return made


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises :class:`InputError` with file, line and column."""
    return parse_toml(read_text(path), str(path))


def read_text(path: Path) -> str:
    """The text of a file, UTF-8. Raises :class:`InputError` that says why it cannot be read."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise InputError(str(path), "", "is not a regular file", "give a readable file")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(
            str(path), "", f"cannot be read: {error.strerror or error}", "give a readable file"
        ) from error
    except ValueError as error:  # not UTF-8, or a NUL in the name
        raise InputError(str(path), "", f"is not a UTF-8 text file: {error}") from error


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """As :func:`read_toml`, from text; ``where`` names it in errors."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or digits beyond Python's limit
        raise InputError(where, "", f"is not valid TOML: {error}", "correct the line named") from error


def structure(data: object, cls: type[T], where: str, made: cattrs.Converter) -> T:
    """``data`` as a ``cls``. Raises :class:`InputError` naming the first wrong key."""
    try:
        return made.structure(data, cls)
    except Exception as error:  # cattrs lets whatever a hook or a validator raised come through
        place, problem, remedy = _first_fault(error, data, cls)
        raise InputError(where, place, problem, remedy) from error


def _first_fault(error: BaseException, data: Any, cls: Any) -> tuple[str, str, str]:
    """The first leaf of a cattrs error tree: (dotted key, problem, remedy)."""
    path: list[str] = []
    while isinstance(error, ClassValidationError | IterableValidationError):
        owner = error.cl
        error, note = _descend(error)
        if note is None:
            continue
        cls = note.type
        if isinstance(note, AttributeValidationNote):
            key: Any = _file_name(owner, note.name)
            data = data.get(key) if isinstance(data, dict) else None
        else:
            key = note.index
            data = data[key] if isinstance(data, list) and isinstance(key, int) else None
        path.append(str(key))
    problem, remedy = _explain(error, data, cls)
    return ".".join(path), problem, remedy


def _file_name(cls: Any, name: str) -> str:
    """What a file calls the field ``name`` of ``cls``."""
    for attribute in fields(get_origin(cls) or cls):
        if attribute.name == name:
            return str(attribute.metadata.get("toml", name))
    return name


def _descend(
    error: ClassValidationError | IterableValidationError,
) -> tuple[BaseException, AttributeValidationNote | IterableValidationNote | None]:
    # An unknown key first: it is most often the misspelling that makes another key "missing".
    for inner in error.exceptions:
        if isinstance(inner, ForbiddenExtraKeysError):
            return inner, None
    noted, plain = error.group_exceptions()
    return noted[0] if noted else (plain[0], None)


def _explain(error: BaseException, data: Any, cls: Any) -> tuple[str, str]:
    if isinstance(error, ForbiddenExtraKeysError):
        known = known_keys(error.cl)
        wrong = min(map(str, error.extra_fields))
        near = difflib.get_close_matches(wrong, known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"unknown key {wrong!r}", f"{hint}known keys: {', '.join(known)}"
    if isinstance(error, KeyError):
        return f"key {error.args[0]!r} is missing", "add it"
    if isinstance(error, TypeError | AttributeError):
        keys = known_keys(cls)
        form = "a table" if keys else "of the form expected here"
        return f"{repr(data)[:80]} is not {form}", f"known keys: {', '.join(keys)}" if keys else ""
    if error.args and isinstance(error.args[0], str):
        return error.args[0], ""  # attrs' validators put the attribute and the value after the prose
    return f"{type(error).__name__}: {error}", ""


def known_keys(cls: Any) -> list[str]:
    """The keys that a table for ``cls`` may hold."""
    origin = get_origin(cls) or cls
    if isinstance(origin, type) and has(origin):
        return [attribute.metadata.get("toml", attribute.name) for attribute in fields(origin)]
    return []


def one_of(value: str, known: list[str], what: str) -> str:
    """``value`` if it is in ``known``; else a ``ValueError`` with the nearest name."""
    if value in known:
        return value
    near = difflib.get_close_matches(value, known, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"{what} {value!r} is unknown; {hint}use one of {', '.join(known)}")

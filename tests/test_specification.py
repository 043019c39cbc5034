"""docs/specification.md: whatever it refers to exists, and nothing of the specification is left out."""

import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "specification.md").read_text(encoding="utf-8")

HEAD = ["id", "requirement", "code", "test", "missing or different"]
SECTIONS = ["1", "3", "4.1", "4.2", "5.1", "5.2", "6.1", "6.2", "6.3", "6.4", "6.5", "7", "8", "9.1",
            "9.2", "10.1", "10.2", "10.3", "13.1", "13.2", "13.3", "14"]  # fmt: skip
REQUIRED = [
    *(f"S{number:02}" for number in range(1, 13)),
    *(f"PR{number}" for number in range(1, 9)),
    *(f"FI{number:02}" for number in range(1, 16)),
    *(f"§5.1 rule {number}" for number in range(1, 9)),
    *(f"§6.3 check {number}" for number in range(1, 9)),
]
REFERENCES = re.compile(r"(`[\w/]+\.py::[\w.]+`( `[\w/]+\.py::[\w.]+`)*)?")


def rows(text):
    """(line number, cells) of every row of a table, its head and its rule left out."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("|") and not set(line) <= set("|- "):
            cells = [cell.strip() for cell in line.strip()[1:-1].split("|")]
            if cells != HEAD:
                yield number, cells


def code_exists(reference):
    path, name = reference.split("::")
    if not (ROOT / path).is_file():
        return False
    found = import_module(path.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


@cache
def functions(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds)}


def is_tested(reference):
    path, name = reference.split("::")
    return path.startswith("tests/") and (ROOT / path).is_file() and name in functions(path)


def problems(text):
    """Everything that is wrong with the tables of ``text``."""
    found, ids = [], []
    for number, cells in rows(text):
        if len(cells) != len(HEAD):
            found.append(f"line {number}: {len(cells)} cells")
            continue
        name, _, code, tests, missing = cells
        ids.append(name)
        for cell, exists in ((code, code_exists), (tests, is_tested)):
            if not REFERENCES.fullmatch(cell):
                found.append(f"line {number}: {cell!r} is no row of references")
                continue
            found += [
                f"line {number}: {reference} does not exist"
                for reference in re.findall(r"`(.+?)`", cell)
                if not exists(reference)
            ]
        if not tests and not missing:
            found.append(f"line {number}: no test, and no reason")
    found += [f"{name} is there twice" for name in set(ids) if ids.count(name) > 1]
    found += [f"{name} is missing" for name in REQUIRED if name not in ids]
    found += [
        f"§{section} is missing"
        for section in SECTIONS
        if not any(re.fullmatch(rf"§{re.escape(section)}( .*)?", name) for name in ids)
    ]
    return found


def test_every_reference_exists_and_nothing_is_left_out():
    assert problems(TEXT) == []
    assert len(list(rows(TEXT))) > 100


def test_a_page_without_tables_is_no_page():
    assert len(problems("")) == len(REQUIRED) + len(SECTIONS)


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("kv.py::KvCoordinator.commit`", "kv.py::KvCoordinator.commits`", "commits does not exist"),
        ("caltrio/logits.py::convert`", "caltrio/logit.py::convert`", "logit.py::convert does not"),
        ("::test_s05_a_failed_wait_is_no_success`", "::test_s05`", "test_s05 does not exist"),
        ("`tests/test_codes.py::", "`tests/test_code.py::", "test_code.py::"),
        ("`tests/test_codes.py::test_a_code", "`caltrio/codes.py::test_a_code", "does not exist"),
        ("`caltrio/logits.py::convert`", "caltrio/logits.py::convert", "no row of references"),
        ("| S07 |", "| S77 |", "S07 is missing"),
        ("| §5.2 |", "| §5.3 |", "§5.2 is missing"),
        ("| FI02 |", "| FI01 |", "FI01 is there twice"),
        ("| FI02 |", "| FI02 | |", "6 cells"),
        ("by construction: one owner is opened; no test looks for a second", "", "no reason"),
    ],
)
def test_a_doctored_line_is_caught(right, wrong, told):
    assert right in TEXT
    found = problems(TEXT.replace(right, wrong, 1))
    assert any(told in problem for problem in found), found

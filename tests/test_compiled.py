"""Compiled code that is kept on disk is forgotten when a constant of another file has changed."""

import os
import subprocess
import sys

import pytest

CODE = """
from numba import njit
import constants

@njit(cache=True)
def value():
    return constants.VALUE
"""
MAIN = """
import sys
import code_of_ours, constants
from caltrio.compiled import keep_fresh
if sys.argv[1] == "fresh":
    keep_fresh(code_of_ours.value, [code_of_ours, constants])
print(code_of_ours.value())
"""


@pytest.mark.parametrize(("how", "after"), [("fresh", "2"), ("stale", "1")])
def test_a_constant_of_another_file(tmp_path, how, after):
    (tmp_path / "code_of_ours.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "main.py").write_text(MAIN, encoding="utf-8")

    def said(value):
        (tmp_path / "constants.py").write_text(f"VALUE = {value}\n", encoding="utf-8")
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
                       "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
        done = subprocess.run(
            [sys.executable, "main.py", how],
            check=False,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert said(1) == "1"
    assert said(1) == "1"
    assert said(2) == after  # numba alone does not notice: that is why we do

"""sim -> caltrio <- hw, walked over the real imports."""

import subprocess
import sys

import grimp
import pytest

ALLOWED = {"caltrio": {"caltrio"}, "sim": {"sim", "caltrio"}, "hw": {"hw", "caltrio"}}
IN_CORE = {"caltrio.core", "caltrio.codes", "caltrio.config", "caltrio.errors", "caltrio.events",
           "caltrio.manifest", "caltrio.semantics", "caltrio.tomlfile", "caltrio.units"}  # fmt: skip
IO = {"trio", "simpy", "time", "random", "asyncio", "threading", "socket", "numpy"}


@pytest.fixture(scope="module")
def graph():
    return grimp.build_graph(
        *ALLOWED, include_external_packages=True, exclude_type_checking_imports=True
    )


def wrong_arrows(graph):
    walked = 0
    wrong = []
    for module in graph.modules:
        package = module.split(".")[0]
        if package not in ALLOWED:
            continue
        for imported in graph.find_modules_directly_imported_by(module):
            walked += 1
            target = imported.split(".")[0]
            if target in ALLOWED and target not in ALLOWED[package]:
                wrong.append((module, imported))
    return walked, wrong


def test_arrows(graph):
    walked, wrong = wrong_arrows(graph)
    assert walked > 100, "walked nothing: the test is blind"
    assert not wrong


def test_a_wrong_arrow_is_seen(graph):
    import copy

    bent = copy.deepcopy(graph)
    bent.add_import(importer="caltrio.units", imported="sim.clock")
    bent.add_import(importer="hw", imported="sim.engine")
    _, wrong = wrong_arrows(bent)
    assert sorted(wrong) == [("caltrio.units", "sim.clock"), ("hw", "sim.engine")]


def test_core_knows_no_io(graph):
    core = [module for module in graph.modules if module.startswith("caltrio.core")]
    assert len(core) >= 8
    for module in core:
        for imported in graph.find_modules_directly_imported_by(module):
            assert imported.split(".")[0] not in IO, (module, imported)
            if imported.startswith("caltrio"):
                assert any(imported == ok or imported.startswith(ok + ".") for ok in IN_CORE)


@pytest.mark.parametrize(
    ("name", "others"), [("fake", ("sim", "hw", "matplotlib")), ("emulator", ("sim", "matplotlib"))]
)
def test_a_kind_of_device_brings_no_other(name, others):
    """A service on the card does not import the simulation, and what that draws with."""
    program = f"""
import sys
from caltrio.device import device_kind
from caltrio.errors import InputError
try:
    device_kind({name!r})
except InputError:
    pass  # not built
print(*sys.modules)
"""
    line = [sys.executable, "-c", program]
    ended = subprocess.run(line, capture_output=True, text=True, check=True)
    assert not set(others) & set(ended.stdout.split())

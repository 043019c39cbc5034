"""The face of each package lists what exists, sorted, and everything in it has a docstring."""

import importlib
import inspect

import pytest


@pytest.mark.parametrize("name", ["caltrio", "sim", "hw"])
def test_face(name):
    package = importlib.import_module(name)
    assert package.__doc__
    names = getattr(package, "__all__", [])
    assert len(set(names)) == len(names)
    assert sorted(names) == sorted(getattr(package, "_HOME", names))
    for exported in names:
        thing = getattr(package, exported)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), exported
            assert thing.__module__.split(".")[0] == name, f"{exported} is another package's"

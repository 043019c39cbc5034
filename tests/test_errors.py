"""Every error travels: pickled or copied, it is what it was; and it says what it knows."""

import copy
import importlib
import inspect
import pickle
import pkgutil

import pytest

import caltrio
from caltrio.errors import (
    CaltrioError,
    DeviceFailed,
    InputError,
    JobCancelled,
    RequestError,
    ServiceFailed,
    Unavailable,
)

VALUES = {  # one value for each argument that an error may take; none of them a default
    "message": "it broke",
    "phase": "submit",
    "code": 17,
    "job_id": 5,
    "sequence_id": 3,
    "generation_id": 2,
    "retry_after_ns": 1_500_000,
    "where": "scenario.toml",
    "place": "executor.grace",
    "problem": "is 3",
    "remedy": "give a time",
    "manifest": "qwen3-8b",
    "differences": ("graph 'a' is missing", "graph 'b' is missing"),
    "reason": "the reset returned 25",
    "exit_code": 78,
}


def _import_all():
    for module in pkgutil.walk_packages(caltrio.__path__, "caltrio."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def _subclasses(cls):
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


_import_all()
CLASSES = sorted(
    {c for c in (CaltrioError, *_subclasses(CaltrioError)) if c.__module__.startswith("caltrio")},
    key=lambda cls: cls.__name__,
)
REQUEST_CLASSES = [cls for cls in CLASSES if issubclass(cls, RequestError)]


def _arguments(cls):
    names = list(inspect.signature(cls.__init__).parameters)[1:]
    return {} if names == ["args", "kwargs"] else {name: VALUES[name] for name in names}


def _made(cls):
    arguments = _arguments(cls)
    return cls(**arguments) if arguments else cls("it broke")


def test_the_walk_finds_errors_of_every_sort():
    names = {cls.__name__ for cls in CLASSES}
    assert {"ManifestMismatch", "CsrRejected", "ServiceFailed", "LeaseError", "InputError"} <= names


@pytest.mark.parametrize("through", [lambda e: pickle.loads(pickle.dumps(e)), copy.deepcopy, copy.copy])
@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_survives_pickling_and_copying(cls, through):
    error = _made(cls)
    for name, value in _arguments(cls).items():
        assert getattr(error, name) == value
    again = through(error)
    assert type(again) is cls
    assert again is not error
    assert again.args == error.args
    assert vars(again) == vars(error)
    assert str(again) == str(error)
    assert str(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_can_be_rebuilt_from_its_args(cls):
    """SimPy does so; what only ``__dict__`` held would be lost."""
    error = _made(cls)
    again = type(error)(*error.args)
    assert vars(again) == vars(error)


@pytest.mark.parametrize("cls", REQUEST_CLASSES)
def test_a_request_error_shows_all_that_it_knows(cls):
    text = str(_made(cls))
    assert text.startswith("it broke [")
    for fact in (cls.grpc, "phase submit", "CalRT code 17", "job 5", "sequence 3", "generation 2"):
        assert fact in text


@pytest.mark.parametrize("cls", REQUEST_CLASSES)
def test_what_is_not_known_is_not_shown(cls):
    text = str(cls("it broke"))
    assert "phase admission" in text
    for absent in ("code", "job", "sequence", "generation", "-1", "retry"):
        assert absent not in text.replace("it broke", "")


def test_job_0_of_sequence_0_is_shown():
    text = str(DeviceFailed("it broke", "execute", 0, 0, 0, 1))
    assert "job 0" in text
    assert "sequence 0" in text
    assert "code" not in text


def test_every_request_error_has_a_status_of_its_own_pair():
    allowed = {
        "UNKNOWN": {500}, "INVALID_ARGUMENT": {400}, "RESOURCE_EXHAUSTED": {429},
        "DEADLINE_EXCEEDED": {504}, "UNAVAILABLE": {503}, "CANCELLED": {499},
        "FAILED_PRECONDITION": {400}, "UNIMPLEMENTED": {501}, "INTERNAL": {500},
    }  # fmt: skip
    for cls in REQUEST_CLASSES:
        assert cls.http in allowed[cls.grpc], cls


def test_retry_after():
    assert str(Unavailable("busy", retry_after_ns=1_500_000)).endswith("; retry after 1.50 ms]")
    assert "retry" not in str(Unavailable("busy"))
    assert Unavailable("busy").retry_after_ns == -1


def test_the_eight_checks_have_eight_classes():
    checks = [
        "EmptyJob", "SequenceTooLong", "BatchTooLarge", "InputMismatch",
        "TensorMismatch", "SliceOutOfRange", "CsrRejected", "MapRejected",
    ]  # fmt: skip
    classes = [next(cls for cls in CLASSES if cls.__name__ == name) for name in checks]
    assert len(set(classes)) == 8
    for one in classes:  # none is caught by the name of another
        assert not any(issubclass(one, other) for other in classes if other is not one)
    assert [cls.http for cls in classes] == [400] * 4 + [500] * 4


def test_service_failed_says_what_to_do():
    restart, repair = ServiceFailed("the reset returned 25"), ServiceFailed("driver too old", 78)
    assert restart.exit_code == 75
    assert str(restart) == "the executor has failed: the reset returned 25; restart the process"
    assert str(repair).startswith("the executor has failed: driver too old; ")
    assert "a restart will not help" in str(repair)
    assert "restart the process" not in str(repair)


def test_an_input_error_is_one_line():
    error = InputError("a.toml", "x.y", "is\n'3\n4'", "give\ta time")
    assert str(error) == "a.toml: x.y: is '3 4'; give a time"
    assert str(InputError("a.toml", "", "is empty")) == "a.toml: is empty"


def test_cancelled_and_failed_are_not_each_other():
    assert not issubclass(JobCancelled, DeviceFailed)
    assert not issubclass(ServiceFailed, RequestError)  # no request's: whoever catches those lives on

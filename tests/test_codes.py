"""The table of specification §8, written down here a second time, from its text."""

import pytest

from caltrio.codes import (
    CCU_EXCEPTION,
    VERDICTS,
    Action,
    Admission,
    CalrtCode,
    Category,
    code_name,
    verdict,
)

REQUEST, LIFECYCLE, ARTIFACT = "Request/Artifact", "Lifecycle", "Artifact"
COMPATIBILITY, TRANSIENT, DEVICE = "Compatibility", "Transient/Unknown", "Device"
PROGRAMMING, UNKNOWN = "Programming", "Unknown"

INVALID, EXHAUSTED = ("INVALID_ARGUMENT", 400), ("RESOURCE_EXHAUSTED", 429)
DEADLINE, UNAVAILABLE = ("DEADLINE_EXCEEDED", 504), ("UNAVAILABLE", 503)
INTERNAL, UNIMPLEMENTED, UNKNOWN_STATUS = ("INTERNAL", 500), ("UNIMPLEMENTED", 501), ("UNKNOWN", 500)

TABLE = [
    (1, REQUEST, EXHAUSTED),
    (14, REQUEST, INVALID),
    (21, REQUEST, INTERNAL),
    (22, REQUEST, INTERNAL),
    (2, LIFECYCLE, INTERNAL),
    (7, LIFECYCLE, INTERNAL),
    (16, LIFECYCLE, INTERNAL),
    (4, ARTIFACT, INTERNAL),
    (5, ARTIFACT, INTERNAL),
    (19, ARTIFACT, INTERNAL),
    (10, ARTIFACT, INTERNAL),
    (11, ARTIFACT, INTERNAL),
    (12, ARTIFACT, INTERNAL),
    (8, COMPATIBILITY, INTERNAL),
    (9, COMPATIBILITY, INTERNAL),
    (23, COMPATIBILITY, INTERNAL),
    (13, TRANSIENT, DEADLINE),
    (17, TRANSIENT, UNAVAILABLE),
    (18, DEVICE, UNAVAILABLE),
    (24, DEVICE, INTERNAL),
    (25, DEVICE, INTERNAL),
    (28, DEVICE, INTERNAL),
    (27, PROGRAMMING, UNIMPLEMENTED),
    (29, PROGRAMMING, UNIMPLEMENTED),
    (15, UNKNOWN, UNKNOWN_STATUS),
    (20, UNKNOWN, UNKNOWN_STATUS),
]
NAMED = {code for code, _, _ in TABLE}

# category -> (new admission, automatic action), columns 4 and 5 of the table
LEADS_TO = {
    REQUEST: (Admission.CONTINUE, Action.RECORD),
    LIFECYCLE: (Admission.PAUSE, Action.RECONFIGURE),
    ARTIFACT: (Admission.REFUSE_GENERATION, Action.ROLL_BACK),
    COMPATIBILITY: (Admission.STOP, Action.STOP),
    TRANSIENT: (Admission.REDUCE, Action.BACK_OFF),
    DEVICE: (Admission.STOP, Action.RECOVER),
    PROGRAMMING: (Admission.CLOSE_FEATURE, Action.CLOSE_FEATURE),
    UNKNOWN: (Admission.PAUSE, Action.DISTRUST),
}


@pytest.mark.parametrize(("code", "category", "status"), TABLE)
def test_each_code_of_the_table(code, category, status):
    row = verdict(code)
    assert row.category.value == category
    assert (row.admission, row.action) == LEADS_TO[category]
    assert (row.grpc, row.http) == status


def test_the_table_has_these_codes_and_no_others():
    assert set(map(int, VERDICTS)) == NAMED
    assert set(map(int, CalrtCode)) == NAMED | {0}
    assert {category.value for category in Category} == set(LEADS_TO)


@pytest.mark.parametrize("code", [*sorted(set(range(1, 256)) - NAMED), -1, 2**31 - 1])
def test_a_code_without_a_row_is_unknown(code):
    row = verdict(code)
    assert row.category is Category.UNKNOWN
    assert (row.admission, row.action) == LEADS_TO[UNKNOWN]
    assert (row.grpc, row.http) == UNKNOWN_STATUS


@pytest.mark.parametrize("success", [0, CalrtCode.SUCCESS])
def test_success_is_not_judged(success):
    with pytest.raises(ValueError, match="success"):
        verdict(success)


def test_a_ccu_exception_is_the_devices_fault():
    assert CCU_EXCEPTION.category is Category.DEVICE
    assert CCU_EXCEPTION.action is Action.RECOVER
    assert (CCU_EXCEPTION.grpc, CCU_EXCEPTION.http) == INTERNAL


def test_the_table_cannot_be_changed():
    with pytest.raises(TypeError):
        VERDICTS[CalrtCode.BUSY] = CCU_EXCEPTION


@pytest.mark.parametrize(
    ("code", "name"),
    [(17, "17 BUSY"), (28, "28 CRASHED"), (0, "0 SUCCESS"), (3, "3"), (255, "255"), (-1, "-1")],
)
def test_code_name(code, name):
    assert code_name(code) == name
    assert code_name(CalrtCode(code)) == name if code in NAMED else True

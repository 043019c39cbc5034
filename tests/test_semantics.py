import pytest
from attrs import asdict, evolve

from caltrio.semantics import PRESETS, EngineSemantics, SubmitWhenFull


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("engines", 0, "engines is 0; give 1 to 64"),
        ("engines", 65, "engines is 65; give 1 to 64"),
        ("compute_stages", (), r"compute_stages is \[\]; give fractions above 0"),
        ("compute_stages", (0.5, 0.4), "its fractions must sum to 1"),
        ("compute_stages", (0.0, 1.0), "give fractions above 0"),
        ("compute_stages", (0.3333, 0.6667), "in steps of 0.001"),
        ("compute_stages", (float("nan"),), "give fractions above 0"),
        ("compute_sharing", (), "one job alone, must be 1.0"),
        ("compute_sharing", (0.5,), "one job alone, must be 1.0"),
        ("compute_sharing", (1.0, 1.1), "give speeds above 0 to 1"),
        ("compute_sharing", (1.0, 0.0), "give speeds above 0 to 1"),
        ("compute_sharing", (1.0, 0.3333), "in steps of 0.001"),
    ],
)
def test_bounds(field, value, problem):
    with pytest.raises(ValueError, match=problem):
        EngineSemantics(**{field: value})


def test_fractions_are_kept_in_exact_thousandths():
    semantics = EngineSemantics(compute_stages=(0.1, 0.2, 0.7), compute_sharing=(1.0, 0.55))
    assert semantics.stage_permille == (100, 200, 700)
    assert semantics.sharing_permille == (1_000, 550)


def test_more_in_flight_than_slots_needs_semantics_that_block():
    two = EngineSemantics()
    two.check_in_flight(1)
    two.check_in_flight(2)
    with pytest.raises(ValueError, match="3 jobs in flight is above the 2 engine slots.*use at most 2"):
        two.check_in_flight(3)
    evolve(two, engines=3).check_in_flight(3)
    evolve(two, submit_when_full=SubmitWhenFull.BLOCK).check_in_flight(3)


def test_each_preset_is_another_reading_with_a_meaning():
    assert list(PRESETS) == [
        "serial", "half-duplex", "full-duplex", "die-pipelined", "shared-compute", "coalesced",
    ]  # fmt: skip
    assert all(name == preset.name and preset.meaning.endswith(".") for name, preset in PRESETS.items())
    assert len({preset.semantics for preset in PRESETS.values()}) == 6
    base = asdict(PRESETS["full-duplex"].semantics)
    for name, preset in PRESETS.items():
        changed = [key for key, value in asdict(preset.semantics).items() if value != base[key]]
        assert len(changed) == (name != "full-duplex"), name

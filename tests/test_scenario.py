import pytest

from caltrio.errors import InputError
from caltrio.scenario import Scenario, load_scenario, preset, semantics_from
from caltrio.semantics import Dma
from caltrio.timing import load_timing
from caltrio.tomlfile import converter
from sim.plan import DEFAULT_SCENARIO


def load(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return load_scenario(path)


def test_an_empty_scenario_is_the_defaults(tmp_path):
    read = load(tmp_path, "schema = 1\n")
    assert read.seed == 0
    assert read.semantics == preset("full-duplex")
    assert read.timing == load_timing("qwen3-8b")
    assert read.workload == Scenario().workload
    assert read.executor == Scenario().executor


def test_the_shipped_scenario_reads():
    read = load_scenario(DEFAULT_SCENARIO)
    assert read.plan.max_inflight == (1, 2, 4)
    assert len(read.plan.hypotheses) == 7
    assert read.workload.clients == 4


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("sede = 3", "unknown key 'sede'; did you mean 'seed'?"),
        ("seed = -1", "seed: seed is -1; give 0 to 2**63 - 1"),
        ("seed = 1.0", "seed: 1.0 is not a whole number"),
        ('seed = "1"', "seed: '1' is not a whole number"),
        ("workload = 3", "workload: 3 is not a table; known keys: trace, format,"),
        ("[workload]\nreqests = 3", "workload: unknown key 'reqests'; did you mean 'requests'?"),
        ("[workload]\nrequests = 0", "workload: requests is 0; give a number above 0"),
        ('[workload]\nformat = "azur"', "workload: format 'azur' is unknown; did you mean 'azure'?"),
        (
            '[workload.arrivals]\nkind = "poison"',
            "workload.arrivals.kind: ArrivalKind 'poison' is unknown; did you mean 'poisson'?",
        ),
        ('[workload.arrivals]\nkind = "poisson"', "workload.arrivals: poisson arrivals need a rate"),
        (
            '[workload.arrivals]\nkind = "poisson"\nrate = nan',
            "workload.arrivals.rate: nan is not a finite number",
        ),
        (
            '[workload.arrivals]\nkind = "poisson"\nrate = "3"',
            "workload.arrivals.rate: '3' is not a number",
        ),
        ("[workload.lengths]\nprompt_cv = 1e300", "workload.lengths: prompt_cv is 1e+300; give 0.001"),
        ("[workload.lengths]\noutput_tokens = -1", "workload.lengths: output_tokens is -1; give 0 to"),
        ('[executor]\ngrace = "-1s"', "executor.grace: '-1s' is negative; a duration is 0 or more"),
        ('[executor]\ngrace = "0s"', "executor: grace is 0; give 1 or more"),
        ("[executor]\nmax_inflight = 0", "executor: max_inflight is 0; give 1 or more"),
        ("[executor]\nmax_inflight = 3", "semantics: 3 jobs in flight is above the 2 engine slots"),
        (
            'semantics = "full-dublex"',
            "semantics: semantics preset 'full-dublex' is unknown; did you mean 'full-duplex'? use one",
        ),
        ("semantics = 3", "semantics: 3 is not a table; known keys: engines, overlap,"),
        ('[semantics]\npreset = "seriel"', "semantics: semantics preset 'seriel' is unknown; did you"),
        (
            '[semantics]\npreset = "serial"\nengnes = 3',
            "semantics: unknown key 'engnes'; did you mean 'engines'?",
        ),
        ("[semantics]\nengines = 0", "semantics: engines is 0; give 1 to 64"),
        ("[semantics]\ncompute_stages = 0.5", "semantics.compute_stages: 0.5 is not a list"),
        ('[plan]\nhypotheses = ["serail"]', "plan: semantics preset 'serail' is unknown; did you mean"),
        ('[plan]\nhypotheses = "serial"', "plan.hypotheses: 'serial' is not a list"),
        ('[plan]\nmax_inflight = ["1"]', "plan.max_inflight.0: '1' is not a whole number"),
        ("[plan]\nmax_inflight = [0, 1]", "plan: max_inflight is 0; give 1 to 4096"),
        ("[plan]\nmax_inflight = [2]", "plan: max_inflight must hold 1"),
        ("[plan]\nmax_inflight = []", "plan: hypotheses and max_inflight each need at least one"),
    ],
)
def test_a_bad_scenario_is_one_line_that_names_file_key_and_value(tmp_path, body, text):
    with pytest.raises(InputError) as caught:
        load(tmp_path, f"schema = 1\n{body}\n")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{tmp_path / 'mine.toml'}: {text}")


def test_schema_is_needed_and_known(tmp_path):
    with pytest.raises(InputError, match="key 'schema' is missing; add it"):
        load(tmp_path, "seed = 1\n")
    with pytest.raises(InputError, match="schema is 2; this version reads 1"):
        load(tmp_path, "schema = 2\n")


def test_an_unknown_profile_names_those_that_ship(tmp_path):
    with pytest.raises(InputError, match="timing profile 'qwen': .*; shipped: quick, qwen3-8b"):
        load(tmp_path, 'schema = 1\ntiming = "qwen"\n')


def test_semantics_by_name_by_change_and_by_fields():
    made = converter()
    half = preset("half-duplex")
    assert semantics_from("half-duplex", made, "here") == half
    assert semantics_from({"dma": "half_duplex"}, made, "here") == half
    changed = semantics_from({"preset": "half-duplex", "engines": 3}, made, "here")
    assert (changed.dma, changed.engines) == (Dma.HALF_DUPLEX, 3)


def test_metadata_names_no_folder(tmp_path):
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n", encoding="utf-8")
    text = f'schema = 1\n[workload]\ntrace = "{tmp_path / "t.csv"}"\narrivals.kind = "trace"\n'
    read = load(tmp_path, text)
    plain = read.to_json()
    assert plain["workload"]["trace"] == "t.csv"
    assert str(tmp_path) not in str(plain)


def test_a_relative_trace_is_from_the_folder_of_the_scenario(tmp_path):
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,7,1\n", encoding="utf-8")
    read = load(
        tmp_path,
        'schema = 1\n[workload]\ntrace = "t.csv"\narrivals.kind = "trace"\nlengths.kind = "trace"\n',
    )
    assert [request.prompt_tokens for request in read.workload.build(0, read.base)] == [7]

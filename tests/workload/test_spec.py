import numpy as np
import pytest

from caltrio.errors import InputError
from caltrio.workload.requests import Request, stream, stream_seed
from caltrio.workload.spec import ArrivalKind, Arrivals, LengthKind, Lengths, Workload

TRACE = "arrival_s,prompt_tokens,output_tokens\n0,10,1\n1,20,2\n3,30,3\n6,40,4\n"
COUNT = 20_000


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(TRACE, encoding="utf-8")
    return path


def build(arrivals=None, lengths=None, *, seed=1, count=COUNT, **rest):
    parts = {"arrivals": arrivals or Arrivals(), "lengths": lengths or Lengths()}
    return Workload(**parts, requests=count, **rest).build(seed)


def gaps_s(requests):
    return np.diff([request.arrival_ns for request in requests]) / 1e9


def test_constant_arrivals_are_evenly_spaced():
    assert [request.arrival_ns for request in build(Arrivals("constant", rate=4.0), count=4)] == [
        0, 250_000_000, 500_000_000, 750_000_000,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        (Arrivals("poisson", rate=5.0), 1.0),
        (Arrivals("gamma", rate=5.0, cv=0.5), 0.5),
        (Arrivals("gamma", rate=5.0, cv=1.0), 1.0),
        (Arrivals("gamma", rate=5.0, cv=2.0), 2.0),
    ],
)
def test_random_arrivals_have_their_rate_and_cv(arrivals, cv):
    requests = build(arrivals)
    gaps = gaps_s(requests)
    assert requests[0].arrival_ns == 0
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.2, rel=5 * cv / COUNT**0.5)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)


def test_poisson_gaps_are_exponential():
    gaps = np.sort(gaps_s(build(Arrivals("poisson", rate=5.0))))
    theory = 1 - np.exp(-5.0 * gaps)
    assert np.abs(theory - (np.arange(len(gaps)) + 0.5) / len(gaps)).max() < 1.95 / len(gaps) ** 0.5


def test_closed_arrivals_are_all_there_at_once():
    workload = Workload(arrivals=Arrivals(clients=3), requests=5)
    assert {request.arrival_ns for request in workload.build(0)} == {0}
    assert workload.clients == 3
    assert Workload(arrivals=Arrivals("poisson", rate=1.0)).clients is None


def test_lognormal_lengths_have_their_means_and_cvs():
    lengths = Lengths("lognormal", prompt_tokens=1_000, output_tokens=200, prompt_cv=0.5, output_cv=0.3)
    requests = build(lengths=lengths)
    for name, mean, cv in (("prompt_tokens", 1_000, 0.5), ("output_tokens", 200, 0.3)):
        values = np.array([getattr(request, name) for request in requests])
        assert values.mean() == pytest.approx(mean, rel=5 * cv / COUNT**0.5)
        assert values.std() / values.mean() == pytest.approx(cv, rel=0.06)


def test_lognormal_lengths_stay_within_one_and_max_tokens():
    lengths = Lengths("lognormal", prompt_tokens=50, output_tokens=2, prompt_cv=2.0, output_cv=2.0)
    requests = build(lengths=lengths, max_tokens=60)
    prompts = {request.prompt_tokens for request in requests}
    assert (min(prompts), max(prompts)) == (1, 60)
    assert min(request.output_tokens for request in requests) == 1


def test_a_mean_of_no_output_gives_no_output():
    requests = build(lengths=Lengths("lognormal", output_tokens=0), count=10)
    assert {request.output_tokens for request in requests} == {0}


def test_fixed_lengths():
    assert build(lengths=Lengths(prompt_tokens=7, output_tokens=3), count=2) == [
        Request(0, 0, 7, 3),
        Request(1, 0, 7, 3),
    ]


def test_other_arrivals_leave_the_lengths_as_they_were():
    lengths = Lengths("lognormal")
    sizes = [
        [(r.prompt_tokens, r.output_tokens) for r in build(arrivals, lengths, count=50)]
        for arrivals in (
            Arrivals(),
            Arrivals("poisson", rate=1.0),
            Arrivals("poisson", rate=9.0),
            Arrivals("gamma", rate=1.0, cv=3.0),
        )
    ]
    assert sizes[0] == sizes[1] == sizes[2] == sizes[3]


def test_other_lengths_leave_the_arrivals_as_they_were():
    arrivals = Arrivals("poisson", rate=1.0)
    times = [
        [r.arrival_ns for r in build(arrivals, lengths, count=50)]
        for lengths in (Lengths(), Lengths("lognormal"), Lengths("lognormal", prompt_cv=3.0))
    ]
    assert times[0] == times[1] == times[2]


def test_a_seed_gives_one_workload_and_another_seed_another():
    spec = Arrivals("poisson", rate=1.0), Lengths("lognormal")
    assert build(*spec, seed=3, count=50) == build(*spec, seed=3, count=50)
    first, second = build(*spec, seed=3, count=50), build(*spec, seed=4, count=50)
    assert [r.arrival_ns for r in first] != [r.arrival_ns for r in second]
    assert [r.prompt_tokens for r in first] != [r.prompt_tokens for r in second]


def test_a_longer_workload_begins_like_a_shorter_one():
    spec = Arrivals("poisson", rate=1.0), Lengths()
    assert build(*spec, count=50)[:20] == build(*spec, count=20)


def test_named_streams_are_independent():
    first, second = (stream(1, name).random(COUNT) for name in ("arrivals", "lengths"))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.04
    assert stream_seed(1, "jitter") == stream_seed(1, "jitter")
    assert len({stream_seed(1, "jitter"), stream_seed(2, "jitter"), stream_seed(1, "lengths")}) == 3


def test_a_trace_with_its_own_times(trace):
    requests = Workload().with_trace(str(trace)).build(0)
    assert [(r.arrival_ns, r.prompt_tokens, r.output_tokens) for r in requests] == [
        (0, 10, 1), (10**9, 20, 2), (3 * 10**9, 30, 3), (6 * 10**9, 40, 4),
    ]  # fmt: skip


def replayed(trace, count=None, **arrivals):
    spec = Arrivals("trace", **arrivals)
    workload = Workload(trace=str(trace), arrivals=spec, lengths=Lengths("trace"), requests=count)
    return [request.arrival_ns for request in workload.build(0)]


def test_scale_lets_a_trace_arrive_faster(trace):
    assert replayed(trace, scale=2.0) == [0, 500_000_000, 1_500_000_000, 3_000_000_000]
    assert replayed(trace, scale=0.1) == [0, 10**10, 3 * 10**10, 6 * 10**10]


def test_rate_sets_the_mean_rate_of_a_trace(trace):
    assert replayed(trace, rate=1.0) == [0, 500_000_000, 1_500_000_000, 3_000_000_000]
    assert replayed(trace, count=3, rate=1.0) == [0, 666_666_667, 2_000_000_000]


def test_requests_limits_a_trace(trace):
    assert replayed(trace, count=2) == [0, 10**9]
    assert len(replayed(trace, count=100)) == 4


def test_lengths_of_a_trace_may_arrive_by_another_process(trace):
    workload = Workload(
        trace=str(trace),
        arrivals=Arrivals("constant", rate=1.0),
        lengths=Lengths("trace"),
        requests=200,
    )
    drawn = workload.build(0)
    assert len(drawn) == 200
    assert {(r.prompt_tokens, r.output_tokens) for r in drawn} == {(10, 1), (20, 2), (30, 3), (40, 4)}
    assert drawn[2].arrival_ns == 2 * 10**9


def test_a_trace_may_have_other_lengths(trace):
    workload = Workload(trace=str(trace), arrivals=Arrivals("trace"), lengths=Lengths(prompt_tokens=5))
    assert [(r.arrival_ns, r.prompt_tokens) for r in workload.build(0)][1] == (10**9, 5)


def test_a_trace_of_one_instant_has_no_rate(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n1,1,1\n1,1,1\n", encoding="utf-8")
    assert replayed(path) == [0, 0]
    with pytest.raises(InputError, match="all requests arrive at once, so it has no rate"):
        replayed(path, rate=1.0)


@pytest.mark.parametrize(
    "arrivals",
    [
        Arrivals("poisson", rate=1e-300),
        Arrivals("gamma", rate=1e-10),
        Arrivals("constant", rate=1e-10),
    ],
)
def test_arrivals_that_never_come_are_an_error(arrivals):
    with pytest.raises(InputError, match=r"workload\.arrivals: with rate 1e-.* after 146 years"):
        build(arrivals, count=10)


@pytest.mark.parametrize("name", ["scale", "rate"])
def test_a_trace_slowed_beyond_the_clock_is_an_error(trace, name):
    with pytest.raises(InputError, match=f"with {name} 1e-10 the last request comes after 146 years"):
        replayed(trace, **{name: 1e-10})


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Arrivals("poisson"), "poisson arrivals need a rate"),
        (lambda: Arrivals("closed", rate=1.0), "closed arrivals have no rate"),
        (lambda: Arrivals("poisson", rate=1.0, scale=2.0), "scale is for trace arrivals"),
        (lambda: Arrivals("trace", rate=1.0, scale=2.0), "give rate or scale, not both"),
        (lambda: Arrivals("poisson", rate=0.0), "rate is 0.0; give a number above 0"),
        (lambda: Arrivals("poisson", rate=float("nan")), "rate is nan; give a number above 0"),
        (lambda: Arrivals("trace", scale=float("inf")), "scale is inf; give a number above 0"),
        (lambda: Arrivals("gamma", rate=1.0, cv=1e-4), "cv is 0.0001; give 0.001 to 1000"),
        (lambda: Arrivals("gamma", rate=1.0, cv=1e300), "cv is 1e"),
        (lambda: Arrivals(clients=0), "clients is 0; give a number above 0"),
        (lambda: Lengths(prompt_tokens=0), "prompt_tokens is 0; give 1 to 1000000000"),
        (lambda: Lengths(output_tokens=-1), "output_tokens is -1; give 0 to 1000000000"),
        (lambda: Lengths(prompt_cv=0.0), "prompt_cv is 0.0; give 0.001 to 1000"),
        (lambda: Workload(requests=0), "requests is 0; give a number above 0"),
        (lambda: Workload(requests=10**9), "requests is 1000000000; give at most 100000000"),
        (lambda: Workload(max_tokens=0), "max_tokens is 0; give 1 to"),
        (lambda: Workload(format="azur"), "format 'azur' is unknown; did you mean 'azure'"),
        (lambda: Workload(arrivals=Arrivals("trace")), "name a trace file"),
        (lambda: Workload(lengths=Lengths("trace")), "name a trace file"),
    ],
)
def test_bounds(make, problem):
    with pytest.raises(ValueError, match=problem):
        make()


def test_kinds_are_enums_however_they_are_given():
    assert Arrivals("poisson", rate=1.0).kind is ArrivalKind.POISSON
    assert Lengths("lognormal").kind is LengthKind.LOGNORMAL


def test_arrivals_and_lengths_are_drawn_from_streams_of_their_own(monkeypatch):
    drawn = []

    def spy(seed, name):
        drawn.append((seed, name))
        return stream(seed, name)

    monkeypatch.setattr("caltrio.workload.spec.stream", spy)
    build(Arrivals("poisson", rate=1.0), Lengths("lognormal"), seed=9, count=5)
    assert sorted(drawn) == [(9, "arrivals"), (9, "lengths")]

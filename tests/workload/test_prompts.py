"""Prompts of a replay: of one seed always the same, whoever sends them and when."""

import numpy as np

from caltrio.workload.requests import Request, prompt_of


def request(index=0, tokens=50):
    return Request(index, 0, tokens, 1)


def test_a_prompt_is_the_seeds_and_the_requests():
    first = prompt_of(request(), 1, 1000, 100)
    assert first.dtype == np.int32
    assert first.shape == (50,)
    assert first.min() >= 0
    assert first.max() < 1000
    assert prompt_of(request(), 1, 1000, 100).tolist() == first.tolist()
    assert prompt_of(Request(0, 10**9, 50, 7), 1, 1000, 100).tolist() == first.tolist()
    assert prompt_of(request(), 2, 1000, 100).tolist() != first.tolist()
    assert prompt_of(request(1), 1, 1000, 100).tolist() != first.tolist()


def test_a_prompt_that_no_model_takes_costs_no_memory():
    assert len(prompt_of(request(tokens=10**9), 1, 1000, 100)) == 100


def test_every_token_of_the_vocabulary_comes():
    assert set(prompt_of(request(tokens=500), 1, 4, 1000).tolist()) == {0, 1, 2, 3}

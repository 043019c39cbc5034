"""The reference token model against its definition, written down a second time and naively."""

from collections import Counter
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caltrio.tokens import (
    MULTIPLIER,
    TOP_LOGITS,
    ReferenceSequence,
    bf16_bits,
    generate,
    noise_table,
)

VOCAB = 151_936
VOCABS = st.sampled_from([1, 2, 3, 7, 64, 1000])
HISTORIES = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def scatter(value):
    """SplitMix64's finaliser as published (Steele, Lea and Flood, 2014), on Python's integers."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ value // 2**30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value // 2**27) * 0x94D049BB133111EB % 2**64
    return value ^ value // 2**31


def seed_of(history):
    digest = sum((token + 1) * 0x9E3779B97F4A7C15**place for place, token in enumerate(history))
    return scatter(digest % 2**64 ^ len(history))


@cache
def noises(vocab):
    return [scatter(entry) % 256 / 16 - 8 for entry in range(vocab)]


def logits_of(history, vocab):
    """Entry by entry, as floats: a dictionary decides who wins a place."""
    x = seed_of(history)
    turn = scatter(x ^ 1) % vocab
    noise = noises(vocab)
    logits = [noise[(turn + entry) % vocab] for entry in range(vocab)]
    places = {}
    for value in (24.0, 23.0, 22.0, 21.0, 20.0):
        places.setdefault(x % vocab, value)  # the likelier came first, and stays
        x = scatter(x)
    for place, value in places.items():
        logits[place] = value
    return logits


def floats(bits):
    return np.array(bits, np.uint16).view(ml_dtypes.bfloat16).astype(np.float64).tolist()


def test_the_finaliser_is_splitmix64():
    # The first outputs of SplitMix64 from seed 1234567, as its authors' C program prints them.
    state, said = 1234567, []
    for _ in range(5):
        said.append(scatter(state))
        state = (state + 0x9E3779B97F4A7C15) % 2**64
    assert said == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
        16408922859458223821,
    ]  # fmt: skip
    assert MULTIPLIER == 0x9E3779B97F4A7C15
    assert TOP_LOGITS == (24.0, 23.0, 22.0, 21.0, 20.0)


@given(VOCABS, HISTORIES)
def test_the_reference_is_the_definition(vocab, history):
    sequence = ReferenceSequence(vocab, history)
    assert sequence.length == len(history)
    assert sequence.next_token() == seed_of(history) % vocab
    assert floats(sequence.logits()) == logits_of(history, vocab)


@given(VOCABS, HISTORIES, st.integers(0, 40))
def test_feeding_is_the_same_as_beginning_with(vocab, history, cut):
    sequence = ReferenceSequence(vocab, history[:cut])
    for token in history[cut:]:
        sequence.logits()  # asking changes nothing
        sequence.next_token()
        sequence.feed(token)
    whole = ReferenceSequence(vocab, history)
    assert sequence.next_token() == whole.next_token()
    assert sequence.logits() == whole.logits()
    assert sequence.length == whole.length


@given(VOCABS, HISTORIES)
def test_the_likeliest_logit_is_that_of_the_next_token(vocab, history):
    sequence = ReferenceSequence(vocab, history)
    values = np.array(floats(sequence.logits()))
    assert values.argmax() == sequence.next_token()
    assert values.max() == 24
    assert (values == 24).sum() == 1


def test_the_vocabulary_of_the_product():
    history = [0, VOCAB - 1, 77_777, 5]
    sequence = ReferenceSequence(VOCAB, history)
    values = floats(sequence.logits())
    assert len(values) == VOCAB
    assert values == logits_of(history, VOCAB)
    assert sorted(values)[-6:] == [7.9375, *reversed(TOP_LOGITS)]


@pytest.mark.parametrize("change", ["lost", "swapped", "other", "doubled", "first lost", "zero added"])
def test_every_change_of_the_history_shows(change):
    """The 9th token has changed in all 200 histories: nearly always another next token."""
    told = 0
    for number in range(200):
        history = [scatter(number * 100 + place) % VOCAB for place in range(30)]
        other = list(history)
        if change == "lost":
            del other[9]
        elif change == "swapped":
            other[9], other[10] = other[10], other[9]
        elif change == "other":
            other[9] ^= 1
        elif change == "doubled":
            other.insert(9, other[9])
        elif change == "first lost":
            other[0] = -1  # what a cell holds that nobody wrote
        else:
            other.append(0)
        ours, theirs = ReferenceSequence(VOCAB, history), ReferenceSequence(VOCAB, other)
        told += ours.next_token() != theirs.next_token()
    assert told == 200


def test_the_noise_is_a_turned_table_of_256_steps():
    vocab = 4096
    table = noise_table(vocab)
    assert len(table) == 2 * vocab
    assert table[:vocab] == table[vocab:]
    values = floats(table[:vocab])
    assert values == noises(vocab)
    assert set(values) == {step / 16 - 8 for step in range(256)}
    assert max(Counter(values).values()) < 45  # 16 of each on average
    assert noise_table(vocab) is table  # made once


def test_turns_of_different_histories_differ():
    vocab = 1000
    rows = [ReferenceSequence(vocab, [token]).logits() for token in range(20)]
    assert len({row.tobytes() for row in rows}) == 20
    table = noise_table(vocab).tobytes()
    for row in rows:
        # Long stretches without one of the five are slices of the table.
        pieces = [row[place : place + 100].tobytes() for place in range(0, vocab, 100)]
        assert sum(piece in table for piece in pieces) >= 5


def test_asking_does_not_write_into_the_table():
    before = noise_table(64).tobytes()
    for token in range(50):
        ReferenceSequence(64, [token]).logits()
    assert noise_table(64).tobytes() == before


def test_all_values_are_exact_in_bf16():
    for value in (*TOP_LOGITS, *(step / 16 - 8 for step in range(256))):
        bits = bf16_bits(value)
        assert np.array([value], np.float32).view(np.uint32)[0] == bits << 16  # no bit was cut off
        assert bits == int(np.array([value], ml_dtypes.bfloat16).view(np.uint16)[0])


def coincidences(vocab, first, second):
    """Histories of one token whose places of that rank fall together."""
    for token in range(5000):
        x, places = seed_of([token]), []
        for _ in range(5):
            places.append(x % vocab)
            x = scatter(x)
        if places[first] == places[second]:
            yield token, places


@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 4), (1, 2), (3, 4)])
def test_where_two_places_coincide_the_likelier_wins(first, second):
    token, places = next(coincidences(64, first, second))
    values = floats(ReferenceSequence(64, [token]).logits())
    assert values[places[first]] == TOP_LOGITS[places.index(places[first])] > TOP_LOGITS[second]
    assert TOP_LOGITS[second] not in values


def test_with_one_entry_there_is_one_token():
    assert floats(ReferenceSequence(1, [5, 6]).logits()) == [24]
    assert generate(1, [5], 3) == [0, 0, 0]


@given(VOCABS, HISTORIES, st.integers(0, 20))
def test_generate_is_greedy(vocab, prompt, count):
    history = list(prompt)
    for _ in range(count):
        values = logits_of(history, vocab)
        history.append(values.index(max(values)))
    assert generate(vocab, iter(prompt), count) == history[len(prompt) :]


def test_generated_tokens_use_the_whole_vocabulary():
    said = Counter(generate(64, [1], 2000))
    assert set(said) == set(range(64))
    assert max(said.values()) < 65  # 31 of each on average

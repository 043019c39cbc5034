from enum import StrEnum

import pytest
from attrs import field, frozen

from caltrio.errors import InputError
from caltrio.tomlfile import (
    Bandwidth,
    Ns,
    Ps,
    converter,
    known_keys,
    one_of,
    parse_toml,
    read_text,
    read_toml,
    structure,
)


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"


@frozen
class Inner:
    depth: int = 0
    wait_ns: Ns = field(default=Ns(0), metadata={"toml": "wait"})


@frozen
class Outer:
    count: int
    name: str = "plain"
    share: float = 1.0
    flag: bool = False
    colour: Colour = Colour.RED
    limit: int | None = None
    rate: float | None = None
    time: Ns = Ns(1)
    slope: Ps = Ps(1)
    width: Bandwidth = Bandwidth(1)
    numbers: tuple[int, ...] = ()
    words: tuple[str, ...] = ()
    inner: Inner = field(factory=Inner)


def made(**table):
    return structure({"count": 1, **table}, Outer, "some.toml", converter())


def fault(**table):
    with pytest.raises(InputError) as caught:
        made(**table)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("some.toml: ")
    return text.removeprefix("some.toml: ")


def test_a_full_table_is_read_with_its_units():
    read = made(
        name="a", share=2, flag=True, colour="green", limit=3, rate=0.5, time="40ms", slope="5.9ns",
        width="2kB/s", numbers=[1, 2], words=["a"], inner={"depth": 4, "wait": "1us"},
    )  # fmt: skip
    assert read == Outer(
        1, "a", 2.0, flag=True, colour=Colour.GREEN, limit=3, rate=0.5, time=40_000_000, slope=5_900,
        width=2_000, numbers=(1, 2), words=("a",), inner=Inner(4, 1_000),
    )  # fmt: skip
    assert isinstance(read.share, float)


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"count": "1"}, "count: '1' is not a whole number"),
        ({"count": True}, "count: True is not a whole number"),
        ({"count": 1.0}, "count: 1.0 is not a whole number"),
        ({"name": 3}, "name: 3 is not text in quotes"),
        ({"share": "1"}, "share: '1' is not a number"),
        ({"share": True}, "share: True is not a number"),
        ({"share": float("nan")}, "share: nan is not a finite number"),
        ({"share": float("inf")}, "share: inf is not a finite number"),
        ({"flag": 1}, "flag: 1 is not true or false"),
        ({"flag": "true"}, "flag: 'true' is not true or false"),
        ({"limit": "1"}, "limit: '1' is not a whole number"),
        ({"rate": "1"}, "rate: '1' is not a number"),
        ({"time": 40}, 'time: 40 has no unit; write it as text with one, as in "40ms"'),
        ({"time": "-1ms"}, "time: '-1ms' is negative; a duration is 0 or more"),
        (
            {"width": "0B/s"},
            "width: '0B/s' is a bandwidth of 0, over which nothing ever arrives; give more",
        ),
        ({"numbers": [1, "2"]}, "numbers.1: '2' is not a whole number"),
        ({"numbers": "12"}, "numbers: '12' is not a list; write it in brackets"),
        ({"words": "ab"}, "words: 'ab' is not a list; write it in brackets"),
        ({"words": [1]}, "words.0: 1 is not text in quotes"),
        ({"inner": 3}, "inner: 3 is not a table; known keys: depth, wait"),
        ({"inner": {"depth": "x"}}, "inner.depth: 'x' is not a whole number"),
        ({"inner": {"wait": "-1s"}}, "inner.wait: '-1s' is negative; a duration is 0 or more"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(table, text):
    assert fault(**table) == text


def test_a_wrong_choice_names_the_nearest_and_all():
    assert fault(colour="gren") == (
        "colour: Colour 'gren' is unknown; did you mean 'green'? use one of red, green"
    )


def test_an_unknown_key_names_the_nearest_and_all():
    assert fault(inner={"dept": 1}) == (
        "inner: unknown key 'dept'; did you mean 'depth'? known keys: depth, wait"
    )
    assert fault(inner={"wait_ns": 1}).startswith("inner: unknown key 'wait_ns'")


def test_a_misspelt_key_is_reported_rather_than_the_one_it_leaves_missing():
    with pytest.raises(InputError, match="unknown key 'cuont'; did you mean 'count'"):
        structure({"cuont": 1}, Outer, "some.toml", converter())


def test_a_missing_key_is_named():
    with pytest.raises(InputError, match="key 'count' is missing; add it"):
        structure({}, Outer, "some.toml", converter())


def test_known_keys_are_those_of_the_file():
    assert known_keys(Inner) == ["depth", "wait"]


def test_one_of():
    assert one_of("a", ["a", "b"], "letter") == "a"
    with pytest.raises(ValueError, match="letter 'z' is unknown; use one of a, b"):
        one_of("z", ["a", "b"], "letter")


def test_bad_toml_is_named_with_line_and_column():
    with pytest.raises(InputError, match=r"some\.toml: is not valid TOML: .*line 2, column 6"):
        parse_toml('a = 1\nb = "\n', "some.toml")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_toml(tmp_path)
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"name = '\xe9'")
    with pytest.raises(InputError, match="is not a UTF-8 text file"):
        read_toml(latin)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    path = tmp_path / "bom.toml"
    path.write_bytes(b"\xef\xbb\xbfa = 1\n")
    assert read_text(path) == "a = 1\n"
    assert read_toml(path) == {"a": 1}

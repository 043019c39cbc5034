import json
from pathlib import Path

import pytest

from caltrio.errors import InputError
from caltrio.workload.requests import Request
from caltrio.workload.traces import read_trace

PUBLIC = Path(__file__).parents[2].parent / "shared" / "traces"

CSV = "arrival_s,prompt_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURST_SESSIONS = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
)


@pytest.fixture
def read(tmp_path):
    def read(text, *arguments):
        path = tmp_path / "trace"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_trace(path, *arguments)

    return read


@pytest.fixture
def fault(read, tmp_path):
    def fault(text, *arguments):
        with pytest.raises(InputError) as caught:
            read(text, *arguments)
        message = str(caught.value)
        assert "\n" not in message
        assert message.startswith(f"{tmp_path / 'trace'}: ")
        return message.removeprefix(f"{tmp_path / 'trace'}: ")

    return fault


def rows(count, **wrong):
    lines = [f"{index},10,5" for index in range(1, count + 1)]
    for number, line in wrong.items():
        lines[int(number.removeprefix("row")) - 1] = line
    return CSV + "\n".join(lines) + "\n"


FORMATS = {
    "csv": CSV + "5,374,44\n6.25,396,109\n",
    "azure": AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47.9305900,396,109\n",
    "burstgpt": BURST + "5,ChatGPT,374,44,418,Conversation log\n6.25,GPT-4,396,109,505,API log\n",
    "burstgpt with sessions": BURST_SESSIONS
    + "5,1,2.5,ChatGPT,374,44,418,Conversation log\n6.25,,,GPT-4,396,109,505,API log\n",
    "mooncake": '{"timestamp": 5000, "input_length": 374, "output_length": 44, "hash_ids": [0]}\n'
    '{"timestamp": 6250, "input_length": 396, "output_length": 109, "hash_ids": []}\n',
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dress", ["plain", "crlf", "bom", "no last newline", "blank lines"])
def test_every_format_in_every_dress(read, name, dress):
    text = FORMATS[name]
    data = {
        "plain": text.encode(),
        "crlf": text.replace("\n", "\r\n").encode(),
        "bom": text.encode("utf-8-sig"),
        "no last newline": text.rstrip("\n").encode(),
        "blank lines": text.replace("\n", "\n\n").encode(),
    }[dress]
    wanted = [Request(0, 0, 374, 44), Request(1, 1_250_000_000, 396, 109)]
    assert read(data) == wanted
    assert read(data, name.split()[0]) == wanted


def test_columns_are_found_by_name_and_cells_may_be_quoted(read):
    text = ' output_tokens , note,arrival_s,prompt_tokens\n5,"a, b",0,"7"\n'
    assert read(text) == [Request(0, 0, 7, 5)]


def test_azure_fractions_of_seven_digits_are_exact(read):
    text = (
        AZURE + "2023-11-16 18:17:03.9799600,1,1\n2023-11-16 18:17:03.9799601,1,1\n"
        "2023-11-16 18:17:04.0000009,1,1\n2023-11-17 00:00:00,1,1\n"
    )
    assert [request.arrival_ns for request in read(text)] == [0, 100, 20_040_900, 20_576_020_040_000]


def test_azure_with_a_time_zone(read):
    text = AZURE + "2024-05-10 00:00:00.009930+00:00,1,1\n2024-05-10 02:00:00.009931+02:00,1,1\n"
    assert [request.arrival_ns for request in read(text)] == [0, 1_000]


def test_mooncake_floats_are_exact(read):
    lines = [
        f'{{"timestamp": {at}, "input_length": 1, "output_length": 1}}\n'
        for at in ("0.1", "0.3", "1e3")
    ]
    assert [request.arrival_ns for request in read("".join(lines))] == [0, 200_000, 999_900_000]


def test_a_line_separator_inside_json_text_ends_no_line(read):
    text = '{"timestamp": 0, "input_length": 1, "output_length": 1, "note": "a\u2028b"}\n'
    assert read(text) == [Request(0, 0, 1, 1)]


def test_decimal_seconds_are_exact(read):
    assert read(CSV + "0.1,1,1\n0.3,1,1\n")[1].arrival_ns == 200_000_000


def test_limit_reads_no_further(read):
    text = rows(5, row4="broken")
    assert len(read(text, "auto", 3)) == 3
    with pytest.raises(InputError, match="row 4"):
        read(text, "auto", 4)


@pytest.mark.parametrize(
    ("cells", "column", "value"),
    [
        ("17,many,5", "prompt_tokens", "'many' is not a token count; give a whole number, 0 or more"),
        ("17,10,4.5", "output_tokens", "'4.5' is not a token count"),
        ("17,-1,5", "prompt_tokens", "'-1' is not a token count"),
        ("17,1_0,5", "prompt_tokens", "'1_0' is not a token count"),
        ("17,１０,5", "prompt_tokens", "'１０' is not a token count"),
        ("17,9999999999,5", "prompt_tokens", "'9999999999' is not a token count"),
        ("17,,5", "prompt_tokens", "'' is not a token count"),
        ("soon,10,5", "arrival_s", "'soon' is not an arrival time"),
        ("nan,10,5", "arrival_s", "'nan' is not an arrival time"),
        ("inf,10,5", "arrival_s", "'inf' is not an arrival time"),
        ("-Infinity,10,5", "arrival_s", "'-Infinity' is not an arrival time"),
        ("1_7,10,5", "arrival_s", "'1_7' is not an arrival time"),
        ("１７,10,5", "arrival_s", "'１７' is not an arrival time"),
        ("1e9999999,10,5", "arrival_s", "'1e9999999' is not an arrival time"),
        ("1e30,10,5", "arrival_s", "'1e30' is not an arrival time"),
        (",10,5", "arrival_s", "'' is not an arrival time"),
    ],
)
def test_row_17_is_named_with_its_column_and_value(fault, cells, column, value):
    assert fault(rows(20, row17=cells)).startswith(f"row 17 (line 18), column {column!r}: {value}")


def test_blank_lines_count_as_lines_and_not_as_rows(fault):
    assert fault(rows(20, row17="\n17,many,5")).startswith("row 17 (line 19), column 'prompt_tokens'")


@pytest.mark.parametrize(("cells", "count"), [("17,10", 2), ("17,10,5,6", 4), ("17", 1)])
def test_a_ragged_row_is_an_error(fault, cells, count):
    text = fault(rows(20, row17=cells))
    assert text == f"row 17 (line 18): has {count} cells, the header 3; mend the row"


def test_an_open_quote_is_an_error(fault):
    assert "is not valid CSV" in fault(rows(3, row2='"2,10,5'))


def test_arrivals_that_go_backwards(fault):
    assert fault(rows(20, row17="15.5,10,5")) == (
        "row 17 (line 18): arrival time goes backwards by 0.5 s; sort the trace by arrival"
    )


@pytest.mark.parametrize(
    ("header", "form", "column"),
    [
        ("arrival_s,output_tokens\n0,1\n", "auto", "prompt_tokens"),
        ("TIMESTAMP,ContextTokens\n0,1\n", "auto", "GeneratedTokens"),
        ("Timestamp,Model,Request tokens,Total tokens,Log Type\n", "auto", "Response tokens"),
        (FORMATS["csv"], "azure", "TIMESTAMP"),
    ],
)
def test_a_missing_column_is_named(fault, header, form, column):
    assert fault(header, form).startswith(f"line 1: column {column!r} is missing; the header has ")


def test_an_unknown_header_names_the_known_ones(fault):
    text = fault("a,b,c\n1,2,3\n")
    assert text.startswith("line 1: header 'a,b,c' is of no known format; known: ")
    assert "arrival_s,prompt_tokens,output_tokens" in text


@pytest.mark.parametrize("text", ["", "\n \n", b"\xef\xbb\xbf"])
def test_an_empty_file(fault, text):
    assert fault(text) == "is empty; give a trace with a header and at least one row"


@pytest.mark.parametrize("text", [CSV, AZURE, BURST, CSV + "\n\n"])
def test_a_header_alone(fault, text):
    assert fault(text) == "has a header but no rows; give at least one request"


@pytest.mark.parametrize(
    "text", ["2023-13-16 18:17:03,1,1", "yesterday,1,1", "2023-11-16 18:17:03.,1,1"]
)
def test_a_date_that_is_none(fault, text):
    assert fault(AZURE + text).startswith("row 1 (line 2), column 'TIMESTAMP': ")


def mooncake(**changes):
    row = {"timestamp": 0, "input_length": 1, "output_length": 1, **changes}
    return json.dumps({key: value for key, value in row.items() if value is not ...}) + "\n"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "row 2 (line 2): is not valid JSON"),
        ("[1, 2]", "row 2 (line 2): is not a JSON object: '[1, 2]'"),
        (mooncake(timestamp=...), "row 2 (line 2): key 'timestamp' is missing; add it"),
        (mooncake(output_length=...), "row 2 (line 2): key 'output_length' is missing; add it"),
        (mooncake(timestamp="1"), "row 2 (line 2), key 'timestamp': \"1\" is not a number"),
        (mooncake(timestamp=None), "row 2 (line 2), key 'timestamp': null is not a number"),
        (mooncake(timestamp=True), "row 2 (line 2), key 'timestamp': true is not a number"),
        (
            mooncake(timestamp=float("nan")),
            "row 2 (line 2), key 'timestamp': 'nan' is not a time in ms",
        ),
        (
            mooncake(timestamp=float("inf")),
            "row 2 (line 2), key 'timestamp': 'inf' is not a time in ms",
        ),
        (mooncake(timestamp=1e300), "row 2 (line 2), key 'timestamp': '1E+300' is not a time in ms"),
        (mooncake(input_length="7"), "row 2 (line 2), key 'input_length': \"7\" is not a number"),
        (mooncake(input_length=1.5), "row 2 (line 2), key 'input_length': '1.5' is not a token count"),
        (mooncake(input_length=-1), "row 2 (line 2), key 'input_length': '-1' is not a token count"),
        (mooncake(timestamp=-1), "row 2 (line 2): arrival time goes backwards by 0.001 s"),
    ],
)
def test_a_bad_json_line_is_named(fault, line, text):
    assert fault(mooncake() + line).startswith(text)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("name", "count", "first", "last_ns"),
    [
        ("AzureLLMInferenceTrace_code.csv", 8_819, (4_808, 10), 3_435_948_056_000),
        ("AzureLLMInferenceTrace_conv.csv", 19_366, (374, 44), 3_501_721_937_000),
        ("mooncake_conversation_head3000.jsonl", 3_000, (6_758, 500), 987 * 10**9),
    ],
)
def test_public_traces_are_read_whole(name, count, first, last_ns):
    path = PUBLIC / name
    if not path.exists():
        pytest.skip("the public traces are not here")
    read = read_trace(path)
    assert len(read) == count
    assert (read[0].prompt_tokens, read[0].output_tokens) == first
    assert (read[0].arrival_ns, read[-1].arrival_ns) == (0, last_ns)

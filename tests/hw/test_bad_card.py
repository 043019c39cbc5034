"""Files that are no card: one error that says what and where, and nothing is left behind."""

import time
from importlib.resources import files
from pathlib import Path

import pytest
import trio
from attrs import evolve
from emulated import MANIFEST, driven, say
from support import US, card, needs_emulator, opener, profile

from caltrio.cli import run
from caltrio.errors import InputError
from caltrio.semantics import EngineSemantics
from hw.emulator import card_file, write_card

pytestmark = needs_emulator

QUICK = profile(h2d=10 * US, compute=50 * US, d2h=10 * US)
FULL = EngineSemantics()


def threads():
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def opens(open_device):
    async def main():
        async with driven(open_device) as executor:
            await say(executor)

    trio.run(main)


@pytest.fixture(scope="module", autouse=True)
def once(tmp_path_factory):
    """A device was open: what stays for the life of the process is there."""
    opens(card(tmp_path_factory.mktemp("once"), FULL, QUICK, MANIFEST))


@pytest.fixture
def folder(tmp_path):
    """With a card, and the manifest of it."""
    write_card(tmp_path, MANIFEST, QUICK, FULL)
    text = (files("caltrio") / "manifests" / "qwen3-8b.toml").read_text(encoding="utf-8")
    text = text.replace("151936", "64").replace("303872", "128").replace('"qwen3-8b"', '"small"')
    (tmp_path / "small.toml").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.fixture
def refused(folder, capfd):
    """Try to open the card as it is now; the error, and what the runtime said of the file.

    The card that was there works again afterwards.
    """
    good = {path: path.read_bytes() for path in folder.iterdir()}
    calbin = folder / "model.calbin"

    def refused(exit_code=2):
        before = threads(), descriptors()
        capfd.readouterr()
        code = run(["replay", "--device", "emulator", "--manifest", str(folder / "small.toml"),
                    "--calbin", str(calbin), "--limit", "1", "--no-warm-up"])  # fmt: skip
        out, err = capfd.readouterr()
        assert (code, out) == (exit_code, ""), err
        said = [line for line in err.splitlines() if line.startswith("calrt emulator: ")]
        told = [line for line in err.splitlines() if line not in said]
        assert len(told) == 1, err  # one line, and no traceback
        assert told[0].startswith("caltrio: ")
        assert str(calbin) in told[0] or exit_code == 1
        assert len(said) <= 1
        until = time.monotonic() + 5  # a thread that was joined may be listed a moment longer
        while (threads(), descriptors()) != before and time.monotonic() < until:
            time.sleep(0.01)
        assert (threads(), descriptors()) == before
        for path, content in good.items():
            if path.is_dir():
                path.rmdir()
            path.write_bytes(content)
        opens(opener(calbin, FULL))
        return told[0], said[0] if said else ""

    return refused


def lines_of(path):
    return path.read_text(encoding="utf-8").splitlines()


# --- the calbin -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "holds no graph"),
        (b"\n \n# a comment\n", "holds no graph"),
        (b"nonsense\n", ":1: this is no emulated calbin"),
        (b"calbin\n", ":1: the line ends too early"),
        (b"calbin 2\n", ":1: '2' is not a whole number of 1 to 1"),
        (b"calbin 1 2\n", ":1: '2' is too much"),
        (b"calbin 1\n", "holds no graph"),
        (b"calbin 1\ntensor tokens a s32 1\n", ":2: 'tensor' comes before any graph"),
        (b"calbin 1\ngraph one\n", ":2: the line ends too early"),
        (b"calbin 1\ngraph one decode\n", "graph 'one' needs"),
        (b"calbin 1\ngraph one decode\nfoo 1\n", ":3: 'foo' is no key of a calbin"),
        (b"calbin 1\ngraph one decode\ntensor tokens a s16 1\n", ":3: 's16' is not a value"),
        (b"calbin 1\ngraph one decode\ntensor what a s32 1\n", ":3: 'what' is not a value"),
        (b"calbin 1\ngraph one decode\ntensor tokens a s32\n", ":3: the tensor has no shape"),
        (b"calbin 1\ngraph one decode\ntensor tokens a s32 0\n", ":3: '0' is not a whole number"),
        (b"calbin 1\ngraph one decode\ntensor tokens a s32 -1\n", ":3: '-1' is not a whole"),
        (b"calbin 1\ngraph one decode\ntensor tokens a s32 1e3\n", ":3: '1e3' is not a whole"),
        (b"calbin 1\ngraph one decode\ntensor tokens a s32 99999999999999999999\n", ":3: '9999"),
        (b"calbin 1\ngraph one decode\ntensor tokens a s32 100000 100000\n", "too large"),
        (b"calbin 1\ngraph one decode\ncsr other x\n", ":3: 'other' is not a value"),
        (b"calbin 1\ngraph one decode\nmeta logits_tile_d0 0\n", ":3: '0' is not a whole number"),
        (bytes(range(256)) * 40, "model.calbin"),
        (b"\0" * 100_000, "model.calbin"),
        (b"x" * 20_000_000, "this is no emulated calbin"),  # one long line
        (b"calbin 1\n" + b"graph a decode\n" * 200_000, "graph 'a' needs"),
    ],
    ids=lambda value: value[:60].decode("latin-1") if isinstance(value, bytes) else None,
)
def test_a_calbin_that_is_none(folder, refused, content, told):
    (folder / "model.calbin").write_bytes(content)
    complaint, said = refused()
    assert "cannot be loaded: CalRT code 12 FILE_DAMAGED" in complaint
    assert told in said


def test_a_calbin_that_ends_early(folder, refused):
    """Within a graph it is damaged; after one it is whole, and another model than was asked for."""
    calbin = folder / "model.calbin"
    lines = lines_of(calbin)
    graphs = [number for number, line in enumerate(lines) if line.startswith("graph")]
    for count in range(1, len(lines)):
        calbin.write_text("\n".join(lines[:count]) + "\n", encoding="utf-8")
        begun = max((start for start in graphs if start < count), default=0)
        if count - begun >= 6:  # its line, three tensors, two CSRs
            complaint, said = refused(1)
            assert said == ""
        else:
            complaint, said = refused()
            assert "12 FILE_DAMAGED" in complaint
            assert "needs tensors tokens, position, logits and two CSRs" in said or count == 1


@pytest.mark.parametrize("again", ["tensor tokens", "csr cur", "meta", "calbin"])
def test_a_line_that_a_graph_has_twice(folder, refused, again):
    calbin = folder / "model.calbin"
    lines = lines_of(calbin)
    index = next(number for number, line in enumerate(lines) if line.startswith(again))
    lines.insert(index + 1, lines[index])
    calbin.write_text("\n".join(lines) + "\n", encoding="utf-8")
    complaint, said = refused()
    assert "12 FILE_DAMAGED" in complaint
    assert f"calbin:{index + 2}: " in said


def test_a_folder_and_a_file_that_is_not_there(folder, refused, capfd):
    calbin = folder / "model.calbin"
    calbin.unlink()
    complaint, _ = refused()
    assert "is not a file" in complaint
    calbin.unlink()
    calbin.mkdir()
    complaint, _ = refused()
    assert "is not a file" in complaint


def test_the_library_is_given_what_is_no_file(folder):
    """As above, below the command's own look at it."""
    calbin = folder / "model.calbin"
    for make, code in ((lambda: None, "10 FILE_MISSING"), (calbin.mkdir, "12 FILE_DAMAGED")):
        open_device = card(folder, FULL, QUICK, MANIFEST)
        before = threads(), descriptors()
        calbin.unlink()
        make()
        with pytest.raises(InputError, match=f"cannot be loaded: CalRT code {code}"):
            opens(open_device)
        until = time.monotonic() + 5  # a thread that was joined may be listed a moment longer
        while (threads(), descriptors()) != before and time.monotonic() < until:
            time.sleep(0.01)
        assert (threads(), descriptors()) == before
        if calbin.is_dir():
            calbin.rmdir()
    opens(card(folder, FULL, QUICK, MANIFEST))


def test_names_that_are_no_text(folder, refused):
    calbin = folder / "model.calbin"
    content = calbin.read_bytes()
    name = MANIFEST.submodels[0].exact_name.encode()
    calbin.write_bytes(content.replace(name, b"\xff\xfe\xfd"))
    complaint, _ = refused(1)
    assert "xff" in complaint


@pytest.mark.parametrize("name", ["ümläut", "a\udcffb", "with space", "-", "a" * 200])
def test_a_path_of_any_name(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    opens(card(folder, FULL, QUICK, MANIFEST))
    (folder / "model.calbin").unlink()
    with pytest.raises(InputError, match="10 FILE_MISSING"):
        opens(opener(folder / "model.calbin", FULL))


# --- the card file --------------------------------------------------------------------------------

CARD_LINES = [
    ("nonsense 1", "'nonsense' is no key of a card file"),
    ("engines", "the line ends too early"),
    ("engines 0", "'0' is not a whole number of 1 to 64"),
    ("engines 65", "'65' is not"),
    ("engines two", "'two' is not"),
    ("engines 2.0", "'2.0' is not"),
    ("engines 2 3", "'3' is too much"),
    ("overlap yes", "'yes' is not"),
    ("dma both", "'both' is not a value of this key"),
    ("dma_order ", "the line ends too early"),
    ("compute_stages", "give 1 to 8 numbers"),
    ("compute_stages 500 400", "the parts do not sum to 1000"),
    ("compute_stages 200 100 100 100 100 100 100 100 100", "give 1 to 8 numbers"),
    ("compute_sharing 1000 0", "'0' is not"),
    ("compute_sharing 1000 1001", "'1001' is not"),
    ("slot_release never", "'never' is not a value"),
    ("completion_signal all", "'all' is not a value"),
    ("completion_order none", "'none' is not a value"),
    ("submit_when_full wait", "'wait' is not a value"),
    ("kv_after_failed_wait gone", "'gone' is not a value"),
    ("reset_scope all", "'all' is not a value"),
    ("submit_ns -1", "'-1' is not"),
    ("reset_ns 9223372036854775808", "is not a whole number"),
    ("h2d 1", "the line ends too early"),
    ("d2h 1 0", "'0' is not"),
    ("compute decode 1 2", "the line ends too early"),
    ("jitter gauss 1 2", "'gauss' is not a value"),
    ("jitter uniform 1 2 client", "'client' is not a value"),
    ("kv_tokens many", "'many' is not"),
    ("report_stages 2", "'2' is not"),
    ("fault", "the line ends too early"),
    ("fault fire", "'fire' is no point of a fault"),
    ("fault wait 13", "'13' is not KEY=NUMBER"),
    ("fault wait code=x", "'x' is not"),
    ("fault wait code=", "'' is not"),
    ("fault wait code=-1", "'-1' is not"),
    ("fault wait when=3", "'when' is no key of a fault"),
    ("card 1", "'card' is no key of a card file"),
]


@pytest.mark.parametrize(("line", "told"), CARD_LINES, ids=[line for line, _ in CARD_LINES])
def test_a_card_file_with_a_wrong_line(folder, refused, line, told):
    file = card_file(folder / "model.calbin")
    key = line.split()[0]
    lines = [kept for kept in lines_of(file) if key == "card" or not kept.startswith(f"{key} ")]
    file.write_text("\n".join([*lines, line]) + "\n", encoding="utf-8")
    complaint, said = refused()
    assert "cannot be loaded: CalRT code 12 FILE_DAMAGED" in complaint
    assert f"model.calbin.card:{len(lines) + 1}: " in said
    assert told in said


@pytest.mark.parametrize("again", ["engines", "h2d", "compute decode", "compute_stages", "reset_ns"])
def test_a_key_that_is_there_twice(folder, refused, again):
    file = card_file(folder / "model.calbin")
    lines = lines_of(file)
    line = next(line for line in lines if line.startswith(again))
    file.write_text("\n".join([*lines, line]) + "\n", encoding="utf-8")
    complaint, said = refused()
    assert "12 FILE_DAMAGED" in complaint
    assert f"model.calbin.card:{len(lines) + 1}: " in said


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"", "is empty"), (b"# nothing\n", "is empty"), (b"engines 2\n", ":1: this is no card file"),
     (b"card 2\n", ":1: '2' is not a whole number"), (b"\0\xff\1" * 9_000, "no card file")],
)  # fmt: skip
def test_a_card_file_that_is_none(folder, refused, content, told):
    card_file(folder / "model.calbin").write_bytes(content)
    assert told in refused()[1]


def test_no_card_file(folder, refused):
    card_file(folder / "model.calbin").unlink()
    complaint, said = refused()
    assert "10 FILE_MISSING" in complaint
    assert said.endswith("model.calbin.card: cannot be opened")


# --- what the format cannot say -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["two words", "", "a#b", "tab\tbed", "line\nbreak"])
def test_names_that_are_no_single_word(tmp_path, name):
    first, *others = MANIFEST.submodels
    for graph in (
        evolve(first, exact_name=name),
        evolve(first, csr_cur_seq=name),
        evolve(first, logits=evolve(first.logits, name=name)),
    ):
        with pytest.raises(InputError, match="no single word"):
            write_card(tmp_path, evolve(MANIFEST, submodels=(graph, *others)), QUICK, FULL)


def test_more_stages_or_sharers_than_there_can_be(tmp_path):
    many = {"compute_stages": (0.1,) * 10, "compute_sharing": (1.0,) * 9}
    for name, value in many.items():
        with pytest.raises(InputError, match="at most 8"):
            write_card(tmp_path, MANIFEST, QUICK, evolve(FULL, **{name: value}))
    assert list(Path(tmp_path).iterdir()) == []


def test_a_fault_that_is_none(folder):
    """Lines of faults are checked where they are read."""
    open_device = card(folder, FULL, QUICK, MANIFEST, faults=["fire at=1"])
    with pytest.raises(InputError, match="12 FILE_DAMAGED"):
        opens(open_device)

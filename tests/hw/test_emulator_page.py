"""docs/emulator.md: it names every key and fault that there is, and its example does what it says."""

import re
from pathlib import Path

import pytest
from support import needs_emulator

from caltrio.cli import run
from hw.build import SOURCES

PAGE = (Path(__file__).parents[2] / "docs" / "emulator.md").read_text(encoding="utf-8")
READER = (SOURCES / "emulator" / "card_file.cpp").read_text(encoding="utf-8")


def section(heading):
    """The text below a heading, up to the next one."""
    return re.split(r"\n#+ (?=[A-Z])", PAGE.split(f"# {heading}\n")[1])[0]


def words(text):
    """The first word of each code in the first column of the tables."""
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    return {code.split("=")[0].split()[0] for cell in cells for code in re.findall(r"`(.+?)`", cell)}


def test_every_key_is_there():
    reads_calbin, reads_card = READER.split("CardFile read_card(")
    calbin = set(re.findall(r'key [=!]= "(\w+)"', reads_calbin.split("CalbinFile read_calbin(")[1]))
    card = set(re.findall(r'key [=!]= "(\w+)"', reads_card))
    assert len(card) > 20
    assert words(section("The calbin")) == calbin
    assert words(section("The card file")) == card


def test_every_fault_is_there():
    points = set(re.findall(r'"(\w+)"', READER.split("kPoints{")[1].split("}")[0]))
    keys = set(re.findall(r'key == "(\w+)"', READER.split("FaultLine fault(")[1].split("\n}\n")[0]))
    assert len(points) > 10
    assert words(section("Faults")) == points | keys


CAPABILITIES = """
schema = 1
calrt_version = "0.7.6"
[reset]
scope = "device"
[reset.evidence]
runner_output = "e"
timeline = "e"
fault_injection = "e"
golden_after_recovery = "e"
"""


@needs_emulator
@pytest.mark.parametrize(("more", "code"), [((), 75), (("--capabilities", "caps.toml"), 0)])
def test_the_example(tmp_path, monkeypatch, capsys, more, code):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    blocks = re.findall(r"```\n(.*?)```", section("An example"), re.DOTALL)
    calbin, card, command = blocks
    for block in (calbin, card):
        name = block.splitlines()[0].removeprefix("# ")
        Path(name).write_text(block, encoding="utf-8")
    Path("caps.toml").write_text(CAPABILITIES, encoding="utf-8")
    Path("e").touch()
    _, *arguments = command.split()
    assert run([*arguments, *more]) == code
    out, err = capsys.readouterr()
    assert "failed: 1 ×" in out
    assert "Wait() returned 28 CRASHED" in " ".join(out.split())
    assert ("restart the process" in err) == (code == 75)
    assert ("completed" in out) == (code == 0)

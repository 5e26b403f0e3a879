"""A corpus of broken configurations: each fault is told at its line and column, all of a file in one run.

A broken file is the sound one with some of it replaced; ``^`` stands where a fault is expected, and is taken away.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from broken_configurations import ADMISSION, CORPUS, SOUND, Expected, Replacement

from aiogw import cli, config
from aiogw.config import ConfigError, Finding


def broken(replacements: list[Replacement]) -> tuple[str, list[tuple[int, int]]]:
    """The text, and the places that were marked in it."""
    text = SOUND
    for old, new in replacements:
        assert old in text, old
        text = text.replace(old, new, 1)
    places = []
    while (at := text.find("^")) != -1:
        text = text[:at] + text[at + 1 :]
        lines = text[:at].split("\n")
        places.append((len(lines), len(lines[-1]) + 1))
    return text, places


def test_what_is_broken_was_sound() -> None:
    """Nothing but what is replaced is wrong with the files."""
    config.loads(SOUND)
    assert 60 <= len({name for name, _, _ in CORPUS}) == len(CORPUS)


@pytest.mark.parametrize(("replacements", "expected"), [case[1:] for case in CORPUS], ids=[case[0] for case in CORPUS])
def test_every_fault_has_its_line_and_column(
    tmp_path: Path, replacements: list[Replacement], expected: list[Expected]
) -> None:
    """Exactly the expected faults, each at its place, in the order of the file, with its key and what is right."""
    text, places = broken(replacements)
    file = tmp_path / "gateway.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load(file)
    heads = [
        f"{file}:{line}:{column}: {key}".removesuffix(": ") + ": "
        for (line, column), (key, _) in zip(places, expected, strict=True)
    ]
    assert heads == [
        next((head for head in heads if fault.startswith(head)), fault) for fault in caught.value.faults
    ], caught.value.faults
    for fault, (_, words) in zip(caught.value.faults, expected, strict=True):
        assert words in fault


@pytest.mark.parametrize("command", ["check", "show", "run"])
def test_a_fault_is_told_as_compilers_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    """Editors and terminals find the place by themselves: the line begins with file, line and column."""
    (tmp_path / "alice").write_text("k" * 40)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    file = tmp_path / "gateway.toml"
    file.write_text(broken([("cap = 6", "cap = 9")])[0])
    assert 2 == cli.main([command, "--config", str(file)])
    out, err = capsys.readouterr()
    assert "" == out
    assert re.fullmatch(rf"{re.escape(f'{file}:41:7: {ADMISSION}.cap:')} expected less than .*\n", err)


@pytest.mark.parametrize("text", ["a = " + "1" * 5000, "a = " + "[" * 50_000], ids=["digits", "depth"])
def test_what_tomllib_has_no_place_for(tmp_path: Path, text: str) -> None:
    """The file alone is named, where nobody knows more."""
    file = tmp_path / "gateway.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load(file)
    (fault,) = caught.value.faults
    assert fault.startswith(f"{file}: not valid TOML: ")


def test_a_fault_outlives_its_file(tmp_path: Path) -> None:
    """A file that has gone since it was read gives no place, and takes none of the faults away."""
    error = ConfigError([Finding(key=("server", "listen"), text="no")])
    assert ["server.listen: no"] == config.place(error, tmp_path / "gateway.toml").faults
    (tmp_path / "gateway.toml").write_text(SOUND)
    placed = config.place(error, tmp_path / "gateway.toml")
    assert [f"{tmp_path}/gateway.toml:3:10: server.listen: no"] == placed.faults
    assert placed is config.place(placed, tmp_path / "nowhere")


def test_a_mark_of_byte_order_is_no_part_of_a_file(tmp_path: Path) -> None:
    """Editors of Windows write one before UTF-8 text; columns are those without it, as editors count them."""
    file = tmp_path / "gateway.toml"
    file.write_bytes(b"\xef\xbb\xbf" + SOUND.encode())
    assert config.loads(SOUND) == config.load(file)
    file.write_bytes(b"\xef\xbb\xbfa = 1 2")
    with pytest.raises(ConfigError) as caught:
        config.load(file)
    assert [f"{file}:1:7: not valid TOML: expected the end of the line"] == caught.value.faults

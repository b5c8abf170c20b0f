"""Text that others have written is shown as text and cannot control the terminal."""

from __future__ import annotations

import pytest

from elastic.cli.formats import print_table, printable


def test_control_sequences_are_shown_as_text() -> None:
    title, clear = "\x1b]0;owned\x07", "\x1b[2J\x1b[H"
    assert printable(f"a{title}b{clear}c\td") == r"a\x1b]0;owned\x07b\x1b[2J\x1b[Hc" + "\td"
    assert printable("\x9b2J \x08\x7f é 日本 ✓") == r"\x9b2J \x08\x7f é 日本 ✓"


def test_colours_are_kept_only_when_asked_for() -> None:
    red = "\x1b[31mred\x1b[0m"
    assert printable(red + "\x1b[2J", colours=True) == red + r"\x1b[2J"
    assert printable(red) == r"\x1b[31mred\x1b[0m"


def test_a_table_shows_its_cells_literally(capsys: pytest.CaptureFixture[str]) -> None:
    reason = "disk [/dev/nvme0n1] is [bold]bad"
    print_table(("node", "reason"), [["n1", reason], ["n2", "\x1b[2Jx"]])
    shown = capsys.readouterr().out
    assert reason in shown
    assert r"\x1b[2Jx" in shown


def test_table_cells_are_not_cut_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("job", "run"), [["j" * 200, "r" * 253], ["short", "x"]])
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["j" * 200, "r" * 253]
    assert second.split() == ["short", "x"]

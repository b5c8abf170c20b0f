"""Texts from outside cannot command the terminal, nor look like lines of elastic's own."""

from __future__ import annotations

import unicodedata

import pytest

from elastic.core.legible import printable


@pytest.mark.parametrize(
    "text",
    [
        "\x1b[2Jshard-0",
        "\x1b]0;title\x07",
        "a\rb",
        "a\x9b2J",
        "a\u2028b",
        "a\u202egnp.exe",
        "a\x85b",
        "a\x0cb",
        "a\x00b",
    ],
)
def test_characters_that_command_a_terminal_are_escaped(text: str) -> None:
    shown = printable(text)
    assert shown.splitlines() == [shown]
    assert not any(unicodedata.category(c) in ("Cc", "Zl", "Zp") for c in shown)
    assert "\u202e" not in shown
    assert "\\" in shown


def test_later_lines_are_indented() -> None:
    shown = printable("ValueError: x\n12:00:00 job_succeeded: all good\r\n\nend")
    first, *others = shown.split("\n")
    assert first == "ValueError: x"
    assert all(line.startswith("    ") for line in others)


def test_colours_are_kept_where_they_are_wanted() -> None:
    assert printable("\x1b[31mred\x1b[0m\x1b[2J", colours=True) == "\x1b[31mred\x1b[0m\\x1b[2J"
    assert "\x1b" not in printable("\x1b[31mred")


def test_ordinary_text_of_any_language_is_unchanged() -> None:
    text = "größe: 3 µs\t日本語 😀"
    assert printable(text) == text

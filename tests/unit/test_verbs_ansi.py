"""What a rank printed, made safe to show."""

from __future__ import annotations

import html
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_torchdist.verbs import ansi

ANY_OUTPUT = st.text(st.sampled_from("ab<>&\x1b[]0m1;3\x07\r\n\t\\\x9b\x00é"), max_size=60)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain\n", "plain"),
        (" 10%|#   \r 20%|##  \r", " 20%|##  "),
        ("windows\r\n", "windows"),
        ("\r", ""),
    ],
)
def test_a_line_is_what_was_written_last(line: str, shown: str) -> None:
    assert ansi.fold(line) == shown


def test_colours_stay_and_everything_that_moves_goes() -> None:
    text = "a\x1b[31mred\x1b[0m\x1b[2J\x1b[5A\x1b]0;title\x07b\x07\n"
    assert ansi.safe(text) == "a\x1b[31mred\x1b[0mb\n"
    assert ansi.plain(text) == "aredb "


def test_html_is_escaped_and_coloured() -> None:
    assert ansi.to_html("<script>") == "&lt;script&gt;"
    assert ansi.to_html("\x1b[1;31mno\x1b[0m yes") == '<span style="font-weight:bold;color:#e75c58">no</span> yes'
    assert ansi.to_html("\x1b[38;5;31mx\x1b[39m") == "x"


@given(ANY_OUTPUT)
def test_nothing_printed_can_become_markup(text: str) -> None:
    shown = ansi.to_html(text)
    bare = re.sub(r'<span style="[a-z0-9:;#-]*">|</span>', "", shown)
    assert "<" not in bare and ">" not in bare
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", html.unescape(bare))


@given(ANY_OUTPUT)
def test_only_colours_are_left_for_a_terminal(text: str) -> None:
    shown = re.sub(r"\x1b\[[0-9;]*m", "", ansi.safe(text))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)


@given(ANY_OUTPUT)
def test_lines_stay_lines(text: str) -> None:
    assert ansi.safe(text).count("\n") == text.count("\n")


def test_a_colour_ends_with_its_text() -> None:
    assert ansi.safe("\x1b[8mhidden\n") == "\x1b[8mhidden\x1b[0m\n"
    assert ansi.safe("\x1b[31ma\x1b[m\n") == "\x1b[31ma\x1b[m\n"

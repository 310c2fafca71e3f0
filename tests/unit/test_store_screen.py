"""Lines as a terminal shows them: whole lines once, and one line for each of tqdm's nested bars."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from jupyter_torchdist.store import logs
from jupyter_torchdist.store.logs import LINE_LIMIT
from jupyter_torchdist.store.screen import Screen, settled
from jupyter_torchdist.verbs import ansi

FEW = settings(max_examples=60, deadline=None)


def bars(depth: int, leave: bool = False, end: int = 4) -> str:
    """What tqdm writes for loops inside one another."""
    file = io.StringIO()

    def loop(level: int) -> None:
        for _ in tqdm(range(end), f"level {level}", leave=leave or level == 0, file=file, mininterval=0, ascii=True):
            if level + 1 < depth:
                loop(level + 1)

    loop(0)
    return file.getvalue()


def shown(text: str) -> list[str]:
    return [line[:12].rstrip() for line in ansi.safe(text).splitlines()]


@FEW
@given(st.lists(st.text(st.sampled_from("ab\n\r"), max_size=8), max_size=8))
def test_no_line_is_lost_or_doubled(pieces: list[str]) -> None:
    screen = Screen()
    whole = ""
    for piece in pieces:
        lines = screen.write(piece)
        assert lines == "" or lines.endswith("\n")
        whole += lines
    assert whole + screen.end() == "".join(pieces)


def test_a_line_without_end_takes_no_memory() -> None:
    screen = Screen()
    for number in range(3 * LINE_LIMIT // 80):
        assert screen.write(f"\r{number:>80}%") == ""
    assert len(screen.end()) <= LINE_LIMIT
    assert screen.write("x" * LINE_LIMIT) == ""
    assert screen.write("x") == "x" * (LINE_LIMIT + 1) + "\n"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nested_bars_are_one_line_each_and_those_that_end_are_gone(depth: int) -> None:
    assert shown(settled(f"before\n{bars(depth)}after\n")) == ["before", "level 0: 100", "after"]


def test_bars_that_stay_are_all_there() -> None:
    assert shown(settled(bars(2, leave=True, end=2))) == ["level 1: 100", "level 1: 100", "level 0: 100"]


def test_bars_in_the_middle_have_their_newest_state() -> None:
    text = bars(2)
    middle = text[: text.index("25%", text.index("level 0:  50%"))]
    assert shown(settled(middle)) == ["level 0:  50", "level 1:"]


@FEW
@given(st.integers(1, 3), st.sets(st.integers(0, 150)))
def test_lines_may_come_in_any_groups(depth: int, cuts: set[int]) -> None:
    lines = re.split(r"(?<=\n)", f"before\n{bars(depth)}after\n")
    screen, drawn, group = Screen(), "", ""
    for number, line in enumerate(lines):
        group += line
        if number in cuts:
            drawn, group = drawn + screen.write(group), ""
    assert shown(drawn + screen.write(group) + screen.end()) == ["before", "level 0: 100", "after"]


def test_a_plain_line_comes_at_once_and_a_bar_with_the_next_line() -> None:
    screen = Screen()
    assert screen.write("plain\n") == "plain\n"
    assert screen.write("\r100%\n") == ""
    assert screen.write("\r 50%\n") == "\r100%\n"
    assert screen.write("plain\n") == "\r 50%\nplain\n"


def test_the_lines_of_a_log_and_its_end_have_one_line_for_each_bar(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("first\nsecond\n" + bars(2, end=30) + "last\n")
    assert shown("".join(logs.lines(log))) == ["first", "second", "level 0: 100", "last"]
    assert shown(logs.tail(log, 3)) == ["second", "level 0: 100", "last"]
    assert shown("".join(logs.selected(log, "level"))) == ["level 0: 100"]

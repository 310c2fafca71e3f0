"""Search: newest first, in steps of bounded time, and no pattern that hangs."""

from __future__ import annotations

import contextlib
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_torchdist.feed import search as module
from jupyter_torchdist.feed.pattern import Overtime, Pattern
from jupyter_torchdist.feed.search import search
from jupyter_torchdist.protocol.errors import UserError
from jupyter_torchdist.protocol.feed import LINE_LIMIT, Hit, SearchAsked
from jupyter_torchdist.protocol.paths import Home
from jupyter_torchdist.protocol.times import RECORD
from jupyter_torchdist.store import segments
from jupyter_torchdist.testing import FakeJob


@pytest.fixture
def job(tmp_path: Path) -> FakeJob:
    job = FakeJob(Home(tmp_path / "home"), ranks=2)
    job.close()
    return job


def ask(job: FakeJob, pattern: str, **words: Any) -> list[Hit]:
    """All hits, asked again until everything was searched."""
    found: list[Hit] = []
    at = words.pop("at", None)
    logs = segments.find(job.paths)
    while True:
        question = {"pattern": pattern, "regex": False, "case": True, "files": [], **words, "at": at}
        answer = search(logs, SearchAsked.from_json(question))
        found += answer["hits"]
        at = answer["at"]
        if at is None:
            return found


def test_hits_are_whole_lines_with_their_places(job: FakeJob) -> None:
    job.rank(0).prints("one\ntwo €\nthree two\n").prints(b"\xff two")
    hits = ask(job, "two")
    assert [(hit["start"], hit["text"]) for hit in hits] == [(22, "\\xff two"), (12, "three two"), (4, "two €")]


def test_case_and_expressions(job: FakeJob) -> None:
    job.rank(0).prints("Loss 1\nloss 22\nLOSS\n")
    assert len(ask(job, "loss")) == 1
    assert len(ask(job, "LOSS", case=False)) == 3
    assert [hit["text"] for hit in ask(job, r"loss \d+$", regex=True, case=False)] == ["loss 22", "Loss 1"]
    assert [hit["text"] for hit in ask(job, r"^[^x]*$", regex=True)] == ["LOSS", "loss 22", "Loss 1"]
    assert ask(job, "Loss 1\nloss") == []


def test_newest_first_over_all_ranks(job: FakeJob) -> None:
    for rank, records in ((0, [(1.0, 4), (3.0, 8)]), (1, [(2.0, 4), (4.0, 8)])):
        job.rank(rank).prints(f"x {rank}\ny x\n")
        job.rank(rank).files.times(rank).write_bytes(b"".join(RECORD.pack(*record) for record in records))
    assert [(hit["file"], hit["t"]) for hit in ask(job, "x")] == [
        ("1.out", 4.0),
        ("0.out", 3.0),
        ("1.out", 2.0),
        ("0.out", 1.0),
    ]
    assert {hit["file"] for hit in ask(job, "x", files=["1.out", "9.err"])} == {"1.out"}
    assert [hit["start"] for hit in ask(job, "x", at={"0.out": 4})] == [0]


def test_a_call_is_short_and_the_next_one_goes_on(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUDGET", 0.01)
    job.rank(0).prints(b"".join(b"line %08d of the log\n" % number for number in range(300_000)))
    logs = segments.find(job.paths)
    at: dict[str, int] | None = None
    calls, hits, searched = 0, 0, 0
    while calls == 0 or at is not None:
        answer = search(logs, SearchAsked(r"0{5}\d?7 ", regex=True, at=at))
        calls, hits = calls + 1, hits + len(answer["hits"])
        searched, at = searched + answer["searched"], answer["at"]
    assert (hits, searched) == (10, 300_000 * 25)
    assert calls > 3


def test_many_hits_come_in_parts(job: FakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUDGET", 60.0)
    job.rank(0).prints("same\n" * 3000)
    answer = search(segments.find(job.paths), SearchAsked("same"))
    assert len(answer["hits"]) == module.HITS
    assert answer["at"] == {"0.out": (3000 - module.HITS) * 5}
    assert len(ask(job, "same")) == 3000


def test_one_long_line(job: FakeJob) -> None:
    job.rank(0).prints(b"\0" * 3_000_000 + b"needle" + "😀".encode() * 500_000)
    (hit,) = ask(job, "needle")
    assert hit["start"] <= 3_000_000 < hit["start"] + LINE_LIMIT
    assert "needle" in hit["text"]
    assert len(hit["text"]) <= module.SHOWN
    assert len(ask(job, "needl.", regex=True)) == 1


@pytest.mark.parametrize("pattern", ["(a|aa)+$", "(a+)+$", r"(\w+\s?)*$", "((a|b+)*)*$", "(a?){30}a{30}$"])
def test_a_line_that_takes_too_long_is_told_and_ends_the_search(job: FakeJob, pattern: str) -> None:
    job.rank(1).prints("before\n" + "a" * 3000 + "!\n" + "fine a\n")
    with pytest.raises(UserError, match=r"takes too long on a line of rank 1 \(stdout, byte 7\)"):
        ask(job, pattern, regex=True)


def test_a_slow_line_does_not_take_the_hits_before_it(job: FakeJob) -> None:
    job.rank(0).prints("a" * 3000 + "!\nfine a\n")
    answer = search(segments.find(job.paths), SearchAsked("(a|aa)+$", regex=True))
    assert [hit["text"] for hit in answer["hits"]] == ["fine a"]
    assert answer["at"] == {"0.out": 3002}


@pytest.mark.parametrize("pattern", ["(a+)+b", "(foo|bar)+", r"(\d+\.)+\d+", "^.*$", "(x+x+)+y", r"(\w+) (\w+) (\w+)"])
def test_an_expression_is_as_good_as_the_lines_let_it(job: FakeJob, pattern: str) -> None:
    lines = ["aab", "barfoo", "1.2.3", "xxxy", "one two three", ""]
    job.rank(0).prints("\n".join(lines) + "\n")
    wanted = [line for line in reversed(lines) if re.search(pattern, line)]
    assert [hit["text"] for hit in ask(job, pattern, regex=True)] == wanted


@pytest.mark.parametrize("pattern", ["(((a{100}){100}){100}){100}", "a" * 2001, "a{1000}" * 30])
def test_an_expression_that_would_fill_the_memory_is_refused(pattern: str) -> None:
    with pytest.raises(UserError, match="too large"):
        Pattern.of(pattern, True, True)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("los{e}", "loss"),
        ("los{e}", "los{e}"),
        ("{e<=1}x", "a{e<=1}x"),
        (r"f\{d}", "f{d}"),
        ("[{]i}", "{i}"),
        (r"\N{DIGIT ONE}{2}", "x11"),
        ("x{2,}y{,1}", "xx"),
        ("[]{e}]", "}"),
        ("[[a]", "["),
        ("[a~~b]", "~"),
        ("[a||b]", "|"),
        ("a{", "a{"),
        ("(?i:A)b", "xab"),
        (r"(?P<q>['\"]).*?(?P=q)", "say 'x'"),
        (r"(?x) a b # {e}", "ab"),
    ],
)
def test_an_expression_means_what_it_means_in_python(pattern: str, text: str) -> None:
    found = re.search(pattern, text)
    assert Pattern.of(pattern, True, True).find(text, 1.0) == (found.start() if found else -1)


@pytest.mark.parametrize("pattern", [r"\p{L}", r"(?|a|b)", "(?R)", r"a\K", "(?V1)a", "*", "(?P<n>a", "[", "x{2,1}"])
def test_what_python_does_not_know_is_no_expression(pattern: str) -> None:
    with pytest.raises(UserError, match="not a regular expression: "):
        Pattern.of(pattern, True, True)


@pytest.mark.parametrize(
    "pattern",
    [
        "[[a]",
        "[a&&b]",
        "[a||b]",
        "[~~]",
        "[+--a]",
        "[--a]",
        "[a-c--z]",
        "[^^[-]",
        "[][&-]",
        "[[:alpha:]]",
        r"[\\[]",
        r"[\[-\]]",
    ],
)
def test_odd_sets_mean_what_they_mean_in_python_without_a_warning(pattern: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        python = re.compile(pattern)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = Pattern.of(pattern, True, True)
        with contextlib.suppress(UserError):
            Pattern.of(pattern[:2], True, True)  # as it is typed
    for character in map(chr, range(128)):
        for text in (character, f"{character}]"):
            found = python.search(text)
            assert own.find(text, 1) == (found.start() if found else -1), text


def test_no_expression_is_told(job: FakeJob) -> None:
    with pytest.raises(UserError, match="not a regular expression"):
        search({}, SearchAsked("(", regex=True))
    assert Pattern.of("(", False, True).find("f(x)", 1.0) == 1


@pytest.mark.parametrize("many", ["x" * 40, "é" * 20])
@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("Needle", {}),
        ("nEEDle", {"case": False}),
        ("nee", {"case": False}),
        ("Nee+dle[0-9]*", {"regex": True}),
        ("^.?Needle$", {"regex": True}),
        ("(?:Nadel|Needle)", {"regex": True}),
        ("needles?", {"regex": True, "case": False}),
        ("(?i)NEEDLE", {"regex": True}),
        ("(?i:NEEDLE)", {"regex": True}),
        ("(?x) Nee dle", {"regex": True}),
    ],
)
def test_what_is_passed_over_holds_no_hit(
    job: FakeJob, monkeypatch: pytest.MonkeyPatch, pattern: str, words: dict[str, Any], many: str
) -> None:
    monkeypatch.setattr(module, "_BLOCK", 2000)
    monkeypatch.setattr(module, "_SLICE", 300)
    line = f"{many}\n"
    job.rank(0).prints(f"Needle\n{line * 30}Needle\n{line * 7}Needle\n{line * 100}Needle")
    hits = ask(job, pattern, **words)
    assert [hit["text"] for hit in hits] == ["Needle"] * 4
    assert hits[-1]["start"] == 0


def test_letters_beyond_ascii_that_are_small_ones_of_ascii(job: FakeJob) -> None:
    job.rank(0).prints("5 \N{KELVIN SIGN}\n")
    assert len(ask(job, "5 k", case=False)) == len(ask(job, "5 k", case=False, regex=True)) == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(alphabet="ab\r €", max_size=6), max_size=30), st.sampled_from(["a", "ab", "", "€", "a b"]))
def test_it_finds_what_grep_finds(tmp_path_factory: pytest.TempPathFactory, lines: list[str], text: str) -> None:
    job = FakeJob(Home(tmp_path_factory.mktemp("home")), ranks=1)
    job.close()
    job.rank(0).prints("\n".join(lines))
    wanted = [line for line in "\n".join(lines).split("\n") if text in line]
    if not "\n".join(lines).split("\n")[-1]:
        wanted = [line for line in "\n".join(lines).split("\n")[:-1] if text in line]
    assert [hit["text"] for hit in reversed(ask(job, text))] == wanted
    assert len(ask(job, re.escape(text), regex=True)) == len(wanted)


def test_the_pieces_of_a_long_line_share_its_time() -> None:
    slow = Pattern.of("(a|aa)+b", True, True)
    line = ("a" * 12 + "!") * 20_000
    began = time.process_time()
    with contextlib.suppress(Overtime):
        slow.find(line, 0.05)
    assert time.process_time() - began < 1.0, "not 0.05 s for each of a hundred pieces"

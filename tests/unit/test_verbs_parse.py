"""The words after ``%dist`` and ``torchdist``."""

from __future__ import annotations

import pytest

from jupyter_torchdist.protocol.errors import OptionError
from jupyter_torchdist.verbs import parse


def test_no_word_lists_the_jobs() -> None:
    assert parse.parse("", "%dist").verb == "jobs"


def test_arguments_of_logs() -> None:
    found = parse.parse("logs 2026 --rank 3 --grep 'a b|c' --tail 100", "%dist")
    assert (found.job, found.rank, found.grep, found.tail, found.stream) == ("2026", 3, "a b|c", 100, None)


@pytest.mark.parametrize(
    ("line", "age", "size"),
    [
        ("rm --older 7d --keep-bytes 10G", 604800.0, 10_000_000_000),
        ("rm --older 1.5h", 5400.0, None),
        ("rm --keep-bytes 1MiB", None, 1048576),
        ("rm --keep-bytes 12", None, 12),
        ("rm --older 30min", 1800.0, None),
    ],
)
def test_limits_of_rm(line: str, age: float | None, size: int | None) -> None:
    found = parse.parse(line, "%dist")
    assert (found.older, found.keep_bytes) == (age, size)


def test_options_of_plan_are_left_to_the_options() -> None:
    assert parse.parse("plan --ranks 2 --fresh", "%dist").options == ["--ranks", "2", "--fresh"]


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("job", "%dist has no verb 'job'", "did you mean jobs?"),
        ("xyzzy", "no verb", "there are run, jobs, show"),
        ("logs", "required: JOB", "usage: %dist logs"),
        ("logs a --rank x", "whole number", "usage"),
        ("logs a --grep (", "not a regular expression", "usage"),
        ("logs a --tail=-1", "whole number", "usage"),
        ("logs a --ran 1", "unrecognized arguments: --ran", "usage"),
        ("rerun a --env NCCL-DEBUG=INFO", "expected NAME or NAME=VALUE", "usage: %dist rerun"),
        ("rerun a --env", "expected one argument", "usage: %dist rerun"),
        ("rm --older soon", "7d", "usage"),
        ("rm --keep-bytes much", "10G", "usage"),
        ("show 'a", "cannot be read", "quotation"),
    ],
)
def test_mistakes_say_what_to_write(line: str, message: str, hint: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse.parse(line, "%dist")
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize("line", ["--help", "-h", "logs --help", "plan -h"])
def test_help_is_text(line: str) -> None:
    with pytest.raises(parse.HelpShown) as caught:
        parse.parse(line, "%dist")
    assert "usage: %dist" in str(caught.value)


def test_every_verb_has_its_line_of_help() -> None:
    text = parse.parser("%dist").format_help()
    assert all(verb in text for verb in parse.VERBS)


def test_the_flags_that_complete_are_those_that_parse() -> None:
    for verb in parse.VERBS:
        if verb not in ("plan", "run"):
            help_text = _help(verb)
            assert all(flag in help_text for flag in parse.flags(verb))


def _help(verb: str) -> str:
    with pytest.raises(parse.HelpShown) as caught:
        parse.parse(f"{verb} --help", "%dist")
    return str(caught.value)

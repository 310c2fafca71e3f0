"""What a test needs of the machine and does not find there: at home it is skipped, in CI it fails."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

ALL = "TORCHDIST_TEST_ALL"
"""The variable with which ``.ci/run`` says that everything was set up."""


def lacking(what: str) -> NoReturn:
    """End the test; ``what`` says what is missing, and how to get it."""
    if os.environ.get(ALL):
        pytest.fail(f"{what} ({ALL} is set, so nothing is skipped for it)", pytrace=False)
    pytest.skip(what)

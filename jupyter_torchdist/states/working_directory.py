"""The working directory, where a cell changes it. The notebook's goes to the ranks with the job, not with its state."""

from __future__ import annotations

import os

from .base import Adapter, Place, State

PATH = "path"


def read(place: Place) -> State:
    if place.rank is None or not any("chdir" in text for text in place.texts):
        return {}
    return {PATH: os.getcwd()}


def write(state: State, place: Place) -> None:
    if PATH in state:
        os.chdir(state[PATH])


ADAPTER = Adapter("working directory", "os", read, write, usual={})

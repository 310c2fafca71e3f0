"""The state of a process beside its names: each adapter against the real library, and the table of them."""

from __future__ import annotations

import decimal
import io
import logging
import pickle
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import cycler
import matplotlib
import numpy
import pandas
import pytest
import torch
import tqdm

from jupyter_torchdist import states
from jupyter_torchdist.capture import capture_cell, carried
from jupyter_torchdist.states import (
    Adapter,
    Place,
    State,
    base,
    imports,
    logs,
    numpy_settings,
    plotting,
    python_settings,
    randoms,
    table,
    tables,
    torch_settings,
    working_directory,
)

RANK = Place(rank=0)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What a test sets is gone after it."""
    before = {adapter.name: adapter.read(Place()) for adapter in states.TABLE}
    numbers = random.getstate(), numpy.random.get_state(), torch.get_rng_state(), set(randoms._known)
    yield
    for adapter in states.TABLE:
        now = adapter.read(Place())
        adapter.write({key: value for key, value in before[adapter.name].items() if now.get(key) != value}, Place())
    random.setstate(numbers[0])
    numpy.random.set_state(numbers[1])
    torch.set_rng_state(numbers[2])
    randoms._known.clear()
    randoms._known.update(numbers[3])


def crossing(adapter: Adapter, change: Callable[[], object]) -> State:
    """What differs after ``change``; everything is as before it again, and then what differed is written."""
    before = adapter.read(Place())
    change()
    now = adapter.read(Place())
    differing = table.changed(now, before, adapter.usual)
    adapter.write({key: before[key] for key in differing if key in before}, Place())
    assert table.changed(adapter.read(Place()), before, adapter.usual) == {}
    adapter.write(differing, RANK)
    assert table.changed(adapter.read(RANK), now, adapter.usual) == {}
    return differing


# ------------------------------------------------------------------------------------------ random numbers


def notebook(*cells: str) -> Place:
    return Place.notebook({"In": ["", *cells]})


def test_a_seeded_generator_goes_on_on_the_other_side() -> None:
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    sent = randoms.read(notebook("random.seed(1)"))
    drawn = random.random(), numpy.random.rand(), torch.rand(3).tolist()
    random.random(), numpy.random.rand(), torch.manual_seed(5)
    randoms.write(sent, RANK)
    assert (random.random(), numpy.random.rand(), torch.rand(3).tolist()) == drawn
    assert torch.initial_seed() == 1 and set(sent) == {"Python", "NumPy", "torch"}


def test_what_nobody_seeded_stays() -> None:
    torch.seed()
    assert randoms.read(Place(rank=1)) == {}
    assert "Python" not in randoms.read(notebook("import random", "x = random.random()"))


@pytest.mark.parametrize(
    ("cell", "seeded"),
    [
        ("random.seed(0)", {"Python"}),
        ("np.random.seed(0)", {"NumPy"}),
        ("numpy.random.set_state(saved)", {"NumPy"}),
        ("torch.manual_seed(2**40)", {"torch"}),
        ("seed_everything(42)", {"torch", "NumPy", "Python"}),
        ("pl.seed_everything(42, workers=True)", {"torch", "NumPy", "Python"}),
        ("transformers.set_seed(1)", {"torch", "NumPy", "Python"}),
        ("from random import seed\nseed(1)", {"NumPy", "Python"}),
        ("random.seed()", set()),
        ("torch.seed()", set()),
        ("generator.manual_seed(1)", set()),
        ("print(torch.initial_seed())", set()),
        ("def set_seed(value):\n    pass", set()),
        ("rng = np.random.default_rng(seed=1)", set()),
    ],
)
def test_what_a_cell_seeds(cell: str, seeded: set[str]) -> None:
    assert randoms._told([cell]) == seeded


def test_the_cell_that_is_about_to_run_has_not_seeded_yet() -> None:
    cells = ["", "x = 1", "get_ipython().run_cell_magic('distribute', '--ranks 2', 'random.seed(0)')"]
    assert Place.notebook({"In": cells}, running=True).texts == ("", "x = 1")
    assert len(Place.notebook({"In": cells}).texts) == 3


def test_a_seed_that_came_back_holds() -> None:
    """The cell that seeded may have been another notebook's, or a function's."""
    randoms.write({"Python": random.getstate()}, Place())
    assert "Python" in randoms.read(Place())


def test_a_gpus_numbers_wait_for_the_next_cell() -> None:
    """The notebook's GPU is not in use: a seed throws away what came back, as it would there."""
    torch.manual_seed(3)
    randoms.write({"GPU": b"state"}, Place())
    assert randoms.read(Place())["GPU"] == b"state"
    torch.manual_seed(3)
    assert "GPU" not in randoms.read(Place())


# ------------------------------------------------------------------------------------------ torch's settings

_OTHER: dict[str, Any] = {
    "default device": "meta",
    "default dtype": "float64",
    "autocast dtype on cpu": "float16",
    "autocast dtype on cuda": "bfloat16",
    "grad mode": False,
    "deterministic algorithms": (True, True),
    "anomaly detection": (True, False),
    "print options": {"precision": 2, "threshold": 10, "edgeitems": 1, "linewidth": 60, "sci_mode": True},
    "float32 matmul precision": "high",
}


def other(key: str, usual: Any) -> Any:
    """A value that is not the usual one."""
    return _OTHER.get(key, "ieee" if usual == "none" else not usual)


@pytest.mark.parametrize("key", sorted(torch_settings.USUAL))
def test_each_setting_of_torch_crosses(key: str) -> None:
    usual = torch_settings.USUAL[key]
    if key not in torch_settings.read(Place()):
        pytest.skip("not in this release of torch")
    torch_settings.write({key: other(key, usual)}, Place())
    differing = table.changed(torch_settings.read(Place()), {}, torch_settings.USUAL)
    assert differing[key] == other(key, usual)
    torch_settings.write({key: usual}, Place())
    assert key not in table.changed(torch_settings.read(Place()), {}, torch_settings.USUAL)
    torch_settings.write({key: differing[key]}, RANK)
    assert torch_settings.read(RANK)[key] == differing[key]


def test_the_default_gpu_is_the_ranks_own() -> None:
    place = Place(rank=1, device="meta")  # stands for cuda:1, which not every machine has
    torch_settings.write({"default device": "cuda"}, place)
    assert torch_settings.read(place)["default device"] == "meta"


def test_settings_that_fail_do_not_keep_the_others_back() -> None:
    with pytest.raises(base.NotSet, match=r"grad mode .*default dtype"):
        torch_settings.write({"grad mode": "x", "default dtype": "none", "cudnn.benchmark": True}, RANK)
    assert torch.backends.cudnn.benchmark


# ------------------------------------------------------------------------------------------------- logging


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    made = logging.getLogger("a_notebook.training")
    yield made
    made.setLevel(logging.NOTSET)
    made.propagate, made.disabled = True, False
    made.handlers.clear()
    made.manager.loggerDict.pop(made.name)


class Only(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg != "secret"


def test_a_logger_with_its_handlers_crosses(logger: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", stream := io.StringIO())
    handler = logging.StreamHandler(sys.stdout)
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter("<%(levelname)s %(message)s>"))
    handler.addFilter(Only())
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    found = table.changed(logs.read(Place()), {}, logs.USUAL)
    sent = {key: found[key] for key in (logger.name, f"handlers of {logger.name}")}
    sent = pickle.loads(pickle.dumps(sent))
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    logs.write(sent, RANK)
    for message in ("seen", "secret"):
        logger.info(message)
    logger.debug("no")
    assert stream.getvalue() == "<INFO seen>\n"
    assert (logger.level, logger.propagate, logger.handlers[0] is not handler) == (logging.DEBUG, False, True)


def test_a_handler_of_a_new_file_comes_back_and_appends(tmp_path: Path) -> None:
    logger = logging.getLogger("notebooks")
    logger.addHandler(old := logging.FileHandler(path := tmp_path / "log.txt", mode="w"))
    assert logs.read(Place())["handlers of notebooks"] == []
    logger.removeHandler(old)
    logger.addHandler(made := logging.FileHandler(path, mode="w"))
    logger.warning("on a rank")
    state = {"handlers of notebooks": logs.read(RANK)["handlers of notebooks"]}
    logger.removeHandler(made)
    made.close()
    logger.addHandler(old)
    logs.write(state, Place())
    logger.warning("here")
    assert path.read_text() == "on a rank\nhere\n"
    (found,) = logger.handlers
    assert isinstance(found, logging.FileHandler) and found.mode == "a"
    logger.removeHandler(found)
    found.close()


def test_a_handler_that_is_there_stays_the_same_object(logger: logging.Logger) -> None:
    logger.addHandler(handler := logging.StreamHandler(sys.stderr))
    key = f"handlers of {logger.name}"
    ((kind, where, rest),) = logs.read(Place())[key]
    logs.write({key: [(kind, where, {**rest, "level": 40})]}, Place())
    assert logger.handlers == [handler] and handler.level == 40
    logs.write({key: []}, Place())
    assert logger.handlers == []


def test_files_are_written_by_rank_0_alone(logger: logging.Logger, tmp_path: Path) -> None:
    logger.addHandler(handler := logging.FileHandler(path := tmp_path / "log.txt"))
    logger.error("notebook")
    handler.close()
    key = f"handlers of {logger.name}"
    sent = {key: pickle.loads(pickle.dumps(logs.read(Place())[key]))}
    for rank in (0, 1):
        logger.handlers.clear()
        logs.write(sent, Place(rank=rank))
        logger.error("rank %d", rank)
        for made in logger.handlers:
            made.close()
    assert path.read_text() == "notebook\nrank 0\n"


def test_other_handlers_stay_and_are_told(logger: logging.Logger) -> None:
    logger.addHandler(MemoryHandler(10))
    found = states.differing(Place())
    (note,) = [note for note in found.notes if logger.name in note]
    assert "MemoryHandler" in note and not [name for name in found.values if "other handlers" in name]


def test_loggers_of_libraries_go_along_where_a_cell_names_them() -> None:
    library = logging.getLogger("numpy.something")
    library.setLevel(logging.ERROR)
    assert "numpy.something" not in logs.read(Place())
    cell = "import logging\nlogging.getLogger('numpy.something').setLevel('ERROR')"
    state = logs.read(notebook(cell))
    assert state["numpy.something"] == (logging.ERROR, True, False)
    assert logs.later({"numpy.something": state["numpy.something"]}).keys() == {"numpy"}
    library.manager.loggerDict.pop(library.name)


def test_logging_that_is_disabled_is_so_on_ranks() -> None:
    assert crossing(logs.ADAPTER, lambda: logging.disable(logging.INFO)) == {"disable": logging.INFO}


def test_names_of_levels_cross() -> None:
    logging.addLevelName(7, "TRACE")
    assert logs.read(Place())["level names"] == {7: "TRACE"}
    logs.write({"level names": {7: "FINE"}}, RANK)
    assert logging.getLevelName(7) == "FINE"
    del logging._levelToName[7], logging._nameToLevel["TRACE"], logging._nameToLevel["FINE"]


# ------------------------------------------------------------------------------------------- Python and NumPy


def test_the_decimal_context_and_the_recursion_limit_cross() -> None:
    def change() -> None:
        decimal.getcontext().prec = 5
        decimal.getcontext().traps[decimal.Inexact] = True
        sys.setrecursionlimit(sys.getrecursionlimit() + 500)

    assert set(crossing(python_settings.ADAPTER, change)) == {"decimal context", "recursion limit"}


def test_warning_filters_cross_where_a_cell_sets_some() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Once.*", category=UserWarning)
        warnings.simplefilter("error", numpy.exceptions.ComplexWarning)
        assert "warning filters" not in python_settings.read(notebook("import warnings"))
        sent = python_settings.read(notebook("import warnings\nwarnings.filterwarnings('ignore')"))
    told = pickle.loads(pickle.dumps({"warning filters": sent["warning filters"]}))
    with warnings.catch_warnings():
        python_settings.write(told, RANK)
        warnings.warn("Once upon a time", UserWarning, stacklevel=1)
        with pytest.raises(numpy.exceptions.ComplexWarning):
            warnings.warn("complex", numpy.exceptions.ComplexWarning, stacklevel=1)
        assert [python_settings._told(one) for one in warnings.filters] == told["warning filters"]


def test_filters_of_libraries_wait_for_their_import() -> None:
    filters = {"warning filters": [("ignore", None, ("no_library_yet.errors", "Odd"), None, 0)]}
    with warnings.catch_warnings():
        python_settings.write(filters, RANK)
    assert python_settings.later(filters) == {"no_library_yet.errors": filters}


def test_print_options_and_error_states_of_numpy_cross() -> None:
    def change() -> None:
        numpy.set_printoptions(precision=2, suppress=True, formatter={"int": str})
        numpy.seterr(divide="raise")

    expected = {"print precision", "print suppress", "print formatter", "on divide"}
    assert set(crossing(numpy_settings.ADAPTER, change)) == expected


# -------------------------------------------------------------------------------------- matplotlib and pandas


def test_settings_of_matplotlib_cross_without_the_backend() -> None:
    def change() -> None:
        matplotlib.rcParams["figure.figsize"] = [9.0, 3.0]
        matplotlib.rcParams["axes.prop_cycle"] = cycler.cycler(color=["r", "g"])
        dict.__setitem__(matplotlib.rcParams, "backend", "svg")

    backend = dict.__getitem__(matplotlib.rcParams, "backend")
    assert set(crossing(plotting.ADAPTER, change)) == {"figure.figsize", "axes.prop_cycle"}
    dict.__setitem__(matplotlib.rcParams, "backend", backend)


def test_options_of_pandas_cross() -> None:
    def change() -> None:
        pandas.set_option("display.max_rows", 7)
        pandas.options.display.float_format = "{:.1f}".format

    assert set(crossing(tables.ADAPTER, change)) == {"display.max_rows", "display.float_format"}


def test_accessors_of_the_notebook_cross() -> None:
    class Doubled:
        def __init__(self, frame: pandas.DataFrame) -> None:
            self.frame = frame

        def sum(self) -> float:
            return float(2 * self.frame.sum().sum())

    Doubled.__module__ = "__main__"
    pandas.api.extensions.register_dataframe_accessor("doubled")(Doubled)
    state = tables.read(Place())
    assert state["accessor DataFrame.doubled"] is Doubled
    del pandas.DataFrame.doubled
    pandas.DataFrame._accessors.discard("doubled")
    tables.write({"accessor DataFrame.doubled": Doubled}, RANK)
    assert pandas.DataFrame({"a": [1, 2]}).doubled.sum() == 6
    del pandas.DataFrame.doubled
    pandas.DataFrame._accessors.discard("doubled")


def test_tqdm_for_pandas_crosses() -> None:
    tqdm.tqdm.pandas(desc="rows")
    state = tables.read(Place())
    assert state["tqdm.pandas"] == {"desc": "rows"}
    del pandas.DataFrame.progress_apply
    tables.write({"tqdm.pandas": {"desc": "rows"}}, RANK)
    assert pandas.DataFrame({"a": [1, 2]}).progress_apply(lambda column: column.sum()).a == 3


def test_a_submodule_that_a_cell_imports_is_imported_in_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import os, xml.dom.minidom  # as users write\nimport json.tool as tool\ndef f():\n    import not.there"
    place = Place((text,), 0)
    import xml.dom.minidom

    before, now = imports.read(place), imports.read(place)
    assert set(table.changed(now, before, {})) == {"xml.dom.minidom"}  # a warm rank has it before
    monkeypatch.delitem(sys.modules, "xml.dom.minidom")
    monkeypatch.delattr(xml.dom, "minidom")
    assert states.write_back({"submodules": pickle.loads(pickle.dumps(now))}, Place()) == ()
    assert xml.dom.minidom.parseString("<a/>")
    assert imports.read(Place((text,))) == {}


def test_a_working_directory_that_a_cell_changes_is_the_notebooks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert working_directory.read(Place(("x = 1",), 0)) == working_directory.read(Place(("os.chdir('a')",))) == {}
    state = working_directory.read(Place(("os.chdir('a')",), 0))
    monkeypatch.chdir("/")
    assert states.write_back({"working directory": state}, Place()) == ()
    assert Path.cwd() == tmp_path
    (note,) = states.write_back({"working directory": {"path": "/not/there"}}, Place())
    assert note.startswith("working directory could not be set in the notebook: FileNotFoundError")


# ------------------------------------------------------------------------------------------------ the table


def test_a_fresh_process_has_nothing_to_tell() -> None:
    code = (
        "import decimal, logging, random, warnings, numpy.random, torch, pandas, matplotlib.pyplot, tqdm.auto\n"
        "from jupyter_torchdist import states\n"
        "print(states.differing(states.Place()))\n"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert told.strip() == "Found(values={}, notes=())"


def failing(_: Any, __: Any = None) -> Any:
    raise OSError("no such thing\nin this release")


def test_an_adapter_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Adapter("broken state", "random", failing, failing, {})
    monkeypatch.setattr(table, "TABLE", (broken, *states.TABLE))
    monkeypatch.setattr(table, "_BY_NAME", {"broken state": broken})
    torch.set_default_dtype(torch.float64)
    found = states.differing(Place())
    assert "torch settings: default dtype" in found.values
    assert "broken state could not be read: OSError: no such thing" in found.notes
    assert states.write_back({"broken state": {"a": 1}}, Place()) == (
        "broken state could not be set in the notebook: OSError: no such thing",
    )


def test_libraries_that_are_not_loaded_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Adapter("absent state", "no_such_module", failing, failing, {})
    monkeypatch.setattr(table, "TABLE", (absent,))
    monkeypatch.setattr(table, "_BY_NAME", {"absent state": absent})
    assert states.differing(Place()) == table.Found({}, ())
    assert states.write_back({"absent state": {"a": 1}}, Place()) == ()


def test_a_state_that_cannot_be_pickled_stays_with_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = {"torch settings: a": 1, "torch settings: b": threading.Lock(), "pandas settings: c": threading.Lock()}
    monkeypatch.setattr(carried, "differing", lambda _place: states.Found(values, ("a note",)))
    captured = capture_cell("x", "Cell In[1]", 1, {"__name__": "__main__", "x": 5}, cwd=tmp_path)
    assert [(item.name, item.kind, item.what) for item in captured.receipt[1:]] == [("torch settings", "state", "a")]
    assert captured.names == ("x",) and "a note" in captured.notes
    assert len([note for note in captured.notes if "settings: " in note and "lock" in note]) == 2


def test_states_are_taken_out_of_names() -> None:
    names = {"x": 1, "torch settings: grad mode": False, "torch settings": 2}
    assert states.take(names) == {"torch settings": {"grad mode": False}}
    assert names == {"x": 1, "torch settings": 2}

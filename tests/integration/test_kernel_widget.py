"""The widget under a cell, with this test as the browser: it opens, watches, asks and cancels while the cell blocks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.protocol import codec
from jupyter_torchdist.protocol.feed import MIME_TYPE
from jupyter_torchdist.store import catalog
from tests.notebook import Notebook

WIDGET = "application/vnd.jupyter.widget-view+json"
COUNTING = """%%distribute --ranks 2 --watch full --grace 2s {options}
import time
for number in range(1000):
    print("line", number, flush=True)
    time.sleep(0.05)
"""
SHORT = "%%distribute --ranks 2 --watch full\nprint('hello')\nvalue = 5"


class Browser:
    """A front end that shows widgets: it keeps models, and views speak through it.

    It knows no subshells (VS Code), unless it has asked for one (JupyterLab).
    """

    def __init__(self, notebook: Notebook) -> None:
        self.client = notebook.client
        self.bundles: dict[str, dict[str, Any]] = {}
        self.models: dict[str, dict[str, Any]] = {}
        self.closed: set[str] = set()
        self.heard: list[dict[str, Any]] = []
        """Messages of feeds, in order."""
        self.idle: set[str] = set()
        self.busy: list[str] = []
        """What the kernel said to be busy with."""
        self.subshell: str | None = None

    def ask_for_a_subshell(self) -> None:
        """Have one for what views say, where the kernel can make one."""
        channel = self.client.control_channel
        channel.send(self.client.session.msg("create_subshell_request"))
        self.subshell = channel.get_msg(timeout=10)["content"]["subshell_id"]

    def execute(self, code: str) -> str:
        """Send a cell as a person's front end does: ``input()`` would be answered."""
        return str(self.client.execute(code, allow_stdin=True))

    def take(self, timeout: float = 0.2) -> None:
        """One message from the kernel, if one comes."""
        try:
            message = self.client.get_iopub_msg(timeout=timeout)
        except Exception as error:
            if type(error).__name__ != "Empty":
                raise
            return
        kind, content = message["msg_type"], message["content"]
        if kind in ("display_data", "update_display_data"):
            self.bundles[content["transient"].get("display_id", "")] = content["data"]
        elif kind == "comm_open" and content["target_name"] == "jupyter.widget":
            self.models[content["comm_id"]] = dict(content["data"]["state"])
        elif kind == "comm_close":
            self.closed.add(content["comm_id"])
        elif kind == "comm_msg" and content["comm_id"] in self.models:
            self._comm(content, message.get("buffers") or [])
        elif kind == "status":
            about = message["parent_header"].get("msg_id", "")
            if content["execution_state"] == "idle":
                self.idle.add(about)
            else:
                self.busy.append(about)

    def _comm(self, content: dict[str, Any], buffers: list[Any]) -> None:
        data = content["data"]
        if data["method"] == "update":
            self.models[content["comm_id"]].update(data["state"])
        elif data["method"] == "custom":
            text = data["content"].get("messages") or bytes(buffers[0])
            view, messages = data["content"]["view"], codec.loads(text)
            self.heard += [{**message, "view": view} for message in messages]
            self.say(content["comm_id"], view, {"type": "ack", "n": messages[-1]["n"]})

    def until(self, done: Callable[[], Any], timeout: float = 30.0) -> Any:
        """What ``done`` gives, once it gives something."""
        deadline = time.monotonic() + timeout
        while not (found := done()):
            assert time.monotonic() < deadline, (self.bundles, self.heard[-5:])
            self.take()
        return found

    def model(self) -> str:
        """The model of the widget that was shown last, once it is."""

        def shown() -> str:
            views = [bundle[WIDGET]["model_id"] for bundle in self.bundles.values() if WIDGET in bundle]
            return views[-1] if views and views[-1] in self.models else ""

        return str(self.until(shown))

    def say(self, model: str, view: str, message: dict[str, Any] | None, **more: Any) -> None:
        """What the view's ``model.send`` does."""
        content = {"view": view, "message": codec.dumps(message) if message else None, **more}
        data = {"method": "custom", "content": content}
        sent = self.client.session.msg("comm_msg", {"comm_id": model, "data": data})
        if self.subshell:
            sent["header"]["subshell_id"] = self.subshell
        self.client.shell_channel.send(sent)

    def of(self, view: str, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.heard if message["view"] == view and message["type"] == kind]

    def text(self, view: str) -> str:
        return "".join(segment["text"] for message in self.of(view, "lines") for segment in message["segments"])


@pytest.fixture
def notebook(new_notebook: Callable[[], Notebook]) -> Notebook:
    return with_a_widget(new_notebook())


def with_a_widget(notebook: Notebook) -> Notebook:
    """Whether its script was built or not: this test is the browser, and reads no JavaScript."""
    notebook.run(
        "import jupyter_torchdist.kernel.widget as w, pathlib\n"
        "w.SCRIPT, w.JobWidget._esm = pathlib.Path(w.__file__), 'export default {}'\n"
        "w.pump.LINGER, w.pump.QUIET = 60, 0.5"
    )
    return notebook


@pytest.fixture(scope="module", params=["6.31", "7.1", "7.3"])
def older(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an ipykernel whose comms ask nobody for a subshell, named by its version."""
    directory = tmp_path_factory.mktemp("packages") / str(request.param)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--target", str(directory), f"ipykernel=={request.param}.*"], check=True)
    return directory


@pytest.fixture
def older_notebook(older: Path, home: Path, tmp_path: Path) -> Iterator[Notebook]:
    """A kernel of that version, everything else as in this environment."""
    with Notebook(tmp_path, {"PYTHONPATH": str(older)}) as notebook:
        with_a_widget(notebook.load())
        assert notebook.value("__import__('ipykernel').__version__").startswith(older.name)
        yield notebook


def waits_for_nobody(notebook: Notebook) -> None:
    """Widgets go soon after their job's end, unless a view is there."""
    assert notebook.value("setattr(w.pump, 'LINGER', 0.5)") is None  # no cell: its messages are the browser's


def test_a_view_lives_while_the_cell_blocks(notebook: Notebook) -> None:
    browser = Browser(notebook)
    cell = browser.execute(COUNTING.format(options="--name counted"))
    model = browser.model()
    bundle = next(bundle for bundle in browser.bundles.values() if MIME_TYPE in bundle)
    (summary,) = catalog.jobs()
    assert bundle[MIME_TYPE]["job"] == summary.job
    assert "counted" in bundle["text/plain"] and "counted" in bundle["text/html"]
    assert browser.models[model]["snapshot"]["job"] == summary.job

    browser.say(model, "one", {"type": "open", "logs": {}}, binary=True)
    browser.until(lambda: "line 3\n" in browser.text("one"))
    (hello,) = browser.of("one", "hello")
    assert hello["job"] == summary.job and hello["spec"]["source"].startswith("import time")
    assert cell not in browser.idle

    asked = time.monotonic()
    question = {"what": "search", "pattern": "line 2", "regex": False, "case": True, "files": [], "at": None}
    browser.say(model, "one", {"type": "ask", "id": 1, **question})
    answer = browser.until(lambda: browser.of("one", "answer"))[0]
    assert time.monotonic() - asked < 2
    assert answer["id"] == 1 and any(hit["text"].strip() == "line 2" for hit in answer["hits"])

    said = browser.busy.count(cell)
    browser.say(model, "two", {"type": "open", "logs": {}})
    browser.until(lambda: browser.busy.count(cell) > said, 10)  # front ends take its last word for all it does
    browser.until(lambda: browser.of("two", "hello") and "line 1\n" in browser.text("two"))
    browser.say(model, "two", {"type": "ask", "id": 1, "what": "cancel", "kill": False})
    browser.until(lambda: browser.of("two", "answer"))
    browser.until(lambda: cell in browser.idle)
    assert catalog.jobs()[0].state == "cancelled"
    browser.until(lambda: any(e["kind"] == "job.ended" for m in browser.of("one", "events") for e in m["events"]))


def test_a_front_end_with_a_subshell_of_its_own_is_heard(notebook: Notebook) -> None:
    browser = Browser(notebook)
    if notebook.value("bool(getattr(get_ipython().kernel, '_supports_kernel_subshells', False))"):
        browser.ask_for_a_subshell()
    cell = browser.execute(COUNTING.format(options=""))
    model = browser.model()
    browser.say(model, "one", {"type": "open", "logs": {}})
    browser.until(lambda: "line 3\n" in browser.text("one"))
    assert cell not in browser.idle
    browser.say(model, "one", {"type": "ask", "id": 1, "what": "cancel", "kill": False})
    browser.until(lambda: cell in browser.idle)
    assert catalog.jobs()[0].state == "cancelled"


def test_what_came_before_the_subshell_was_there_is_heard(notebook: Notebook) -> None:
    """A kernel that is busy makes its subshell late, and the cell looks for messages once it is there."""
    notebook.run(
        "import time, jupyter_torchdist.kernel.subshell as s\n"
        "ask, tick = s.Subshells._ask, w.Live.tick\n"
        "s.Subshells._ask = lambda self, *args, **more: (time.sleep(1), ask(self, *args, **more))[1]\n"
        "w.Live.tick = lambda self: self._subshells.name and tick(self)"
    )
    browser = Browser(notebook)
    cell = browser.execute(COUNTING.format(options=""))
    model = browser.model()
    browser.say(model, "one", {"type": "open", "logs": {}})
    browser.until(lambda: browser.of("one", "hello"))
    assert cell not in browser.idle
    browser.say(model, "one", {"type": "ask", "id": 1, "what": "cancel", "kill": False})
    browser.until(lambda: cell in browser.idle)


def test_nothing_is_left_when_the_views_have_closed(notebook: Notebook) -> None:
    browser = Browser(notebook)
    cell = browser.execute(SHORT)
    model = browser.model()
    browser.say(model, "one", {"type": "open", "logs": {}})
    browser.until(lambda: browser.of("one", "hello") and cell in browser.idle)
    waits_for_nobody(notebook)
    browser.say(model, "one", None, bye=True)
    browser.until(lambda: model in browser.closed)
    assert all(WIDGET not in bundle for bundle in browser.bundles.values())
    assert any("hello" in bundle["text/plain"] for bundle in browser.bundles.values())
    left = "[t.name for t in __import__('threading').enumerate() if 'torchdist' in t.name or 'subshell-' in t.name]"
    deadline = time.monotonic() + 5
    while notebook.value(left) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert notebook.value(left) == []


def test_a_program_that_runs_notebooks_gets_no_widget(notebook: Notebook) -> None:
    cell = notebook.run(SHORT)
    assert cell.displays and all(MIME_TYPE in bundle and WIDGET not in bundle for bundle in cell.displays)
    assert not any(message["msg_type"] == "comm_open" for _, message in cell.messages)


def test_a_widget_nobody_looks_at_becomes_a_picture(notebook: Notebook) -> None:
    waits_for_nobody(notebook)
    browser = Browser(notebook)
    cell = browser.execute(SHORT)
    model = browser.model()
    browser.until(lambda: cell in browser.idle and model in browser.closed)
    assert all(WIDGET not in bundle and MIME_TYPE in bundle for bundle in browser.bundles.values())


def test_a_view_that_opens_late_has_everything(notebook: Notebook) -> None:
    browser = Browser(notebook)
    cell = browser.execute(SHORT)
    model = browser.model()
    browser.until(lambda: cell in browser.idle)
    assert browser.models[model]["snapshot"]["state"] == "succeeded"
    browser.say(model, "late", {"type": "open", "logs": {}})
    browser.until(lambda: browser.of("late", "hello") and browser.text("late").count("hello") == 2)
    assert browser.of("late", "hello")[0]["state"]["state"] == "succeeded"


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "scene",
    [
        test_a_view_lives_while_the_cell_blocks,
        test_a_front_end_with_a_subshell_of_its_own_is_heard,
        test_nothing_is_left_when_the_views_have_closed,
        test_a_view_that_opens_late_has_everything,
    ],
)
def test_in_an_older_kernel(older_notebook: Notebook, scene: Callable[[Notebook], None]) -> None:
    """The waiting cell looks through the main shell's queue itself, and nobody notices."""
    scene(older_notebook)


def test_tab_and_shift_tab_in_a_real_kernel(notebook: Notebook) -> None:
    def inspect(code: str, position: int) -> dict[str, Any]:
        return dict(notebook.client.inspect(code, position, reply=True, timeout=30)["content"])

    def complete(code: str, position: int) -> list[str]:
        return list(notebook.client.complete(code, position, reply=True, timeout=30)["content"]["matches"])

    assert complete("%%distribute --watch=co\nmodel = 1", 23) == ["compact"]
    assert "--timeout" in complete("%%distribute --ranks 2 --ti\nx", 27)
    said = inspect("%%distribute --watch text\nmodel = 1", 18)
    assert said["found"] and said["data"]["text/plain"].startswith("--watch full|compact|text|off")
    assert "--ranks" in inspect("%%distribute --watch text", 4)["data"]["text/plain"]
    assert inspect("%%distribute\nlen", 16)["found"]
    assert "Return the number of items" in inspect("len", 2)["data"]["text/plain"]
    notebook.run("%unload_ext jupyter_torchdist")
    assert "do_inspect" not in notebook.value("list(vars(get_ipython().kernel))")

"""Who may ask: every handler that we register is walked, so that none can be forgotten."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_server.auth import Authorizer
from jupyter_server.auth.identity import User
from jupyter_server.base.handlers import APIHandler, JupyterHandler
from tornado.httpclient import HTTPClientError
from tornado.web import Application
from tornado.websocket import WebSocketHandler
from traitlets.config import Config

from jupyter_torchdist.protocol import codec
from jupyter_torchdist.server.base import Ours
from jupyter_torchdist.server.routes import ROUTES
from jupyter_torchdist.store.jobdir import taken_requests
from jupyter_torchdist.testing import FakeJob
from tests.integration.server.conftest import Fetch

VERBS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")

ACTIONS = {"Rerun.POST": "execute", "Turn.POST": "read", "GET": "read", "POST": "write", "DELETE": "write"}


class Guard(Authorizer):
    """Lets nobody do anything but what is in ``allowed``, and remembers what it was asked."""

    allowed: frozenset[str] = frozenset()
    asked: list[tuple[str, str]]

    def is_authorized(self, handler: JupyterHandler, user: User, action: str, resource: str) -> bool:
        self.asked.append((action, resource))
        return action in self.allowed


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> type[Guard]:
    monkeypatch.setattr(Guard, "asked", [], raising=False)
    monkeypatch.setattr(Guard, "allowed", frozenset())
    return Guard


@pytest.fixture
def jp_server_config(guard: type[Guard]) -> Config:
    extensions = {"jpserver_extensions": {"jupyter_torchdist": True}}
    return Config({"ServerApp": {**extensions, "authorizer_class": guard}})


def ours(app: Application) -> Iterator[tuple[str, type[JupyterHandler]]]:
    """Every rule of the application that leads to code of this package."""
    pending = [app.default_router]
    while pending:
        for rule in getattr(pending.pop(), "rules", []):
            if isinstance(rule.target, type) and rule.target.__module__.startswith("jupyter_torchdist"):
                yield rule.matcher.regex.pattern, rule.target
            elif hasattr(rule.target, "rules"):
                pending.append(rule.target)


def questions(app: Application, job: str) -> list[tuple[str, str, str]]:
    """(handler and method, method, address) of whatever our handlers answer."""
    found = []
    for pattern, handler in ours(app):
        address = re.sub(r"\(\?P<job>[^)]*\)", job, pattern).replace("(?P<name>[^/]+)", "0.out")
        address = re.sub(r"\\(.)", r"\1", address.rstrip("$"))
        bases = (APIHandler, WebSocketHandler)
        for verb in VERBS:
            method = getattr(handler, verb.lower())
            if all(method is not getattr(base, verb.lower()) for base in bases):
                found.append((f"{handler.__name__}.{verb}", verb, address))
    return found


def test_the_walk_sees_all(jp_web_app: Application) -> None:
    handlers = [handler for _, handler in ours(jp_web_app)]
    assert sorted(handlers, key=repr) == sorted((handler for _, handler in ROUTES), key=repr)
    assert all(issubclass(handler, Ours) for handler in handlers)
    asked = {name for name, _, _ in questions(jp_web_app, "x")}
    assert asked == {
        *("Jobs.GET", "OneJob.GET", "OneJob.DELETE", "Cancel.POST", "Rerun.POST", "File.GET"),
        *("FeedSocket.GET", "JobsSocket.GET", "Turn.POST"),
    }


async def status_of(client: Any, verb: str, address: str, headers: dict[str, str]) -> int:
    socket = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "a" * 24,
    }
    body = "" if verb in ("POST", "PUT", "PATCH") else None
    headers = {**headers, **(socket if address.endswith("/feed") else {})}
    try:
        answer = await client.fetch(address, method=verb, body=body, headers=headers, follow_redirects=False)
    except HTTPClientError as error:
        if error.response is not None and error.response.body:
            assert codec.loads(error.response.body).keys() == {"message", "hint"}
        return error.code
    return int(answer.code)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "token of-another-user"}], ids=["nobody", "somebody-else"])
async def test_nobody_without_the_token(
    jp_web_app: Application, http_server_client: Any, guard: type[Guard], headers: dict[str, str]
) -> None:
    guard.allowed = frozenset({"read", "write", "execute"})
    with FakeJob() as job:
        job.running()
        for name, verb, address in questions(jp_web_app, job.paths.job):
            assert await status_of(http_server_client, verb, address, headers) in (401, 403), name
        assert taken_requests(job.paths) == []
    assert guard.asked == []


async def test_nobody_whom_the_authorizer_refuses(
    jp_web_app: Application, http_server_client: Any, jp_auth_header: dict[str, str], guard: type[Guard]
) -> None:
    with FakeJob() as job:
        job.running()
        for name, verb, address in questions(jp_web_app, job.paths.job):
            assert await status_of(http_server_client, verb, address, jp_auth_header) == 403, name
            assert guard.asked.pop() == (ACTIONS.get(name, ACTIONS[verb]), "torchdist")
        assert taken_requests(job.paths) == []
    assert guard.asked == []


async def cookie_of(client: Any, auth_header: dict[str, str], base_url: str) -> str:
    """What a browser has of a user who came in with the token, and sends along whoever's page it is that asks."""
    token = auth_header["Authorization"].split()[1]
    entered = await client.fetch(f"{base_url}api/status?token={token}")
    return "; ".join(value.split(";")[0] for value in entered.headers.get_list("Set-Cookie"))


async def test_a_cookie_needs_the_xsrf_token(
    jp_web_app: Application,
    http_server_client: Any,
    jp_auth_header: dict[str, str],
    jp_base_url: str,
    guard: type[Guard],
) -> None:
    """Whatever changes something: a page of another site cannot know the token in the user's cookies."""
    guard.allowed = frozenset({"read", "write", "execute"})
    cookie = await cookie_of(http_server_client, jp_auth_header, jp_base_url)
    with FakeJob() as job:
        job.running()
        changes = [asked for asked in questions(jp_web_app, job.paths.job) if asked[1] not in ("GET", "HEAD")]
        assert {name for name, _, _ in changes} == {"Cancel.POST", "Rerun.POST", "OneJob.DELETE", "Turn.POST"}
        for name, verb, address in changes:
            assert await status_of(http_server_client, verb, address, {"Cookie": cookie}) == 403, name
        assert taken_requests(job.paths) == []
        xsrf = "2|aaaaaaaa|bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb|1700000000"
        both = {"Cookie": f"{cookie}; _xsrf={xsrf}", "X-XSRFToken": xsrf}
        address = f"{jp_base_url}torchdist/api/jobs/{job.paths.job}"
        assert await status_of(http_server_client, "POST", f"{address}/cancel", both) == 200
        assert [asked.kind for asked in taken_requests(job.paths)] == ["interrupt"]


async def test_another_sites_page_embeds_no_log(
    http_server_client: Any,
    http_server_port: Any,
    jp_auth_header: dict[str, str],
    jp_base_url: str,
    guard: type[Guard],
) -> None:
    guard.allowed = frozenset({"read"})
    cookie = await cookie_of(http_server_client, jp_auth_header, jp_base_url)
    here = f"http://127.0.0.1:{http_server_port[1]}{jp_base_url}lab"
    with FakeJob() as job:
        job.running().rank(0).prints("a line\n")
        address = f"{jp_base_url}torchdist/api/jobs/{job.paths.job}/files/0.out"

        async def seen_from(referer: dict[str, str]) -> int:
            return await status_of(http_server_client, "GET", address, {"Cookie": cookie, **referer})

        assert await seen_from({}) == 403
        assert await seen_from({"Referer": "https://elsewhere.example/page"}) == 403
        assert await seen_from({"Referer": here}) == 200


async def test_another_sites_page_opens_no_socket(jp_ws_fetch: Fetch, guard: type[Guard]) -> None:
    guard.allowed = frozenset({"read"})
    with pytest.raises(HTTPClientError) as caught:
        await jp_ws_fetch(
            "torchdist", "api", "jobs", "feed", headers={"Origin": "https://elsewhere.example", "Authorization": ""}
        )
    assert caught.value.code == 403


async def test_who_may_only_read_cancels_nothing(jp_ws_fetch: Fetch, guard: type[Guard]) -> None:
    guard.allowed = frozenset({"read"})
    with FakeJob() as job:
        job.running()
        socket = await jp_ws_fetch("torchdist", "api", "jobs", job.paths.job, "feed")
        await socket.write_message('{"type":"open","logs":{}}')
        await socket.write_message('{"type":"ask","id":7,"what":"cancel","kill":true}')
        while (said := codec.loads(await socket.read_message()))["type"] != "answer":
            pass
        assert said["id"] == 7
        assert said["error"]
        assert taken_requests(job.paths) == []
        socket.close()
        while await socket.read_message() is not None:
            pass


async def test_who_may_only_read_cancels_nothing_in_a_turn_either(jp_fetch: Fetch, guard: type[Guard]) -> None:
    guard.allowed = frozenset({"read"})
    cancel = {"type": "ask", "id": 7, "what": "cancel", "kill": True}
    with FakeJob() as job:
        job.running()
        body = codec.dumps({"messages": [{"type": "open", "logs": {}}, cancel]})
        answer = await jp_fetch("torchdist", "api", "jobs", job.paths.job, "turn", method="POST", body=body)
        (said,) = [each for each in codec.loads(answer.body)["messages"] if each["type"] == "answer"]
        assert (said["id"], bool(said["error"])) == (7, True)
        assert taken_requests(job.paths) == []


def test_nothing_of_ipython_or_torch_is_imported() -> None:
    """In the server's process, not even by what asks for the routes."""
    code = """
import sys, importlib, pkgutil
import jupyter_torchdist, jupyter_torchdist.server as server
light = [name for name in ("jupyter_server", "tornado") if name in sys.modules]
assert not light, light
for module in pkgutil.iter_modules(server.__path__, server.__name__ + "."):
    importlib.import_module(module.name)
print([name for name in ("torch", "IPython", "ipykernel", "numpy") if name in sys.modules])
"""
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert said.stdout.strip() == "[]"

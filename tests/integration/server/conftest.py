"""A real Jupyter server in the test's own process, with our extension, for the tests of this directory alone.

The fixtures are taken over by name: as a plugin, pytest-jupyter would run around every test of the project.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeAlias

import pytest

_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)

from pytest_jupyter.jupyter_core import (  # noqa: F401
    echo_kernel_spec,
    jp_asyncio_loop,
    jp_config_dir,
    jp_data_dir,
    jp_env_config_path,
    jp_env_jupyter_path,
    jp_environ,
    jp_home_dir,
    jp_kernel_dir,
    jp_runtime_dir,
    jp_system_config_path,
    jp_system_jupyter_path,
    pytest_pyfunc_call,
)
from pytest_jupyter.jupyter_server import (  # noqa: F401
    jp_argv,
    jp_auth_header,
    jp_configurable_serverapp,
    jp_extension_environ,
    jp_fetch,
    jp_http_port,
    jp_logging_stream,
    jp_nbconvert_templates,
    jp_root_dir,
    jp_server_cleanup,
    jp_serverapp,
    jp_template_dir,
    jp_web_app,
    jp_ws_fetch,
)
from pytest_jupyter.pytest_tornasync import http_server, http_server_client, http_server_port, io_loop  # noqa: F401
from traitlets.config import Config

resource.setrlimit(resource.RLIMIT_NOFILE, _FILES)  # pytest-jupyter sets it when it is imported

Fetch: TypeAlias = Callable[..., Awaitable[Any]]


@pytest.fixture
def jp_base_url() -> str:
    """As JupyterHub has it for the user ``a.b@c``."""
    return "/user/a.b%40c/"


@pytest.fixture
def jp_server_config() -> Config:
    """Our extension, found as the installed one is."""
    return Config({"ServerApp": {"jpserver_extensions": {"jupyter_torchdist": True}}})


@pytest.fixture(autouse=True)
def without_a_loop(home: Any) -> Iterator[None]:
    """Other tests do not find this one's closed event loop."""
    yield
    asyncio.set_event_loop(None)

"""The Jupyter server extension: jobs of its data directory as HTTP routes and WebSockets below ``torchdist/api``.

A restart loses nothing: all data is read from the job directories, and a disconnected client connects again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jupyter_server.serverapp import ServerApp


def _load_jupyter_server_extension(app: ServerApp) -> None:
    """Called by the server when it loads this extension."""
    from .routes import install

    install(app.web_app)

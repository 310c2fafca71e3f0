"""The Jupyter server's side: the jobs of its data directory as HTTP routes and WebSockets below ``torchdist/api``.

Nothing is kept here that a restart could lose: what is told is read from the job directories, and a client that was
cut off opens again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jupyter_server.serverapp import ServerApp


def _load_jupyter_server_extension(app: ServerApp) -> None:
    """What the server calls when it loads us."""
    from .routes import install

    install(app.web_app)

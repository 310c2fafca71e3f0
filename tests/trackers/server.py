"""``python -m tests.trackers.server DIRECTORY``: MLflow's own server application on a free port, which it prints.

``mlflow server`` starts it below two more servers, whose imports take three times as long.
"""

from __future__ import annotations

import os
import sys

from mlflow import server
from mlflow.server.handlers import initialize_backend_stores
from werkzeug.serving import make_server


def main(directory: str) -> None:
    root = "mlflow-artifacts:/"
    os.environ |= {
        server.BACKEND_STORE_URI_ENV_VAR: f"sqlite:///{directory}/mlflow.db",
        server.ARTIFACT_ROOT_ENV_VAR: root,
        server.ARTIFACTS_DESTINATION_ENV_VAR: f"{directory}/artifacts",
        server.SERVE_ARTIFACTS_ENV_VAR: "true",
    }
    initialize_backend_stores(os.environ[server.BACKEND_STORE_URI_ENV_VAR], default_artifact_root=root)
    listening = make_server("127.0.0.1", 0, server.app, threaded=True)
    print(listening.server_port, flush=True)
    listening.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])

"""Sphinx reads the repository as it is: pages of ``docs`` and notebooks link to each other as they do on GitHub.

``TORCHDIST_DOCS_RUN=1`` runs the notebooks for their outputs, as ``make docs`` does.
"""

from __future__ import annotations

import importlib.util
import os

import jupyter_torchdist

project = "jupyter_torchdist"
author = copyright = "the authors of jupyter_torchdist"
version = release = jupyter_torchdist.__version__

root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "notebooks/*.ipynb",
    "README.md",
    "tests/benchmarks/RESULTS.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
exclude_patterns = [".*", "labextension", "out", "**/.ipynb_checkpoints"]

extensions = ["myst_nb", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type"]

nb_execution_mode = "force" if os.environ.get("TORCHDIST_DOCS_RUN") else "off"
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_execution_timeout = 900
# What these need is there in a test only: tests/cluster, tests/engines, tests/trackers.
ELSEWHERE = ("hosts", "slurm", "ray", "spark", "serverless_gpu", "mlflow")
nb_execution_excludepatterns = [f"notebooks/{name}.ipynb" for name in ELSEWHERE]
if not importlib.util.find_spec("deepspeed"):
    nb_execution_excludepatterns.append("notebooks/deepspeed.ipynb")

autodoc_typehints = "signature"
autodoc_member_order = "bysource"

# `--ranks` stays as it is typed.
smartquotes = False

html_theme = "pydata_sphinx_theme"
html_title = "jupyter_torchdist"
html_theme_options = {"show_prev_next": False, "navigation_with_keys": False}
html_sourcelink_suffix = ""

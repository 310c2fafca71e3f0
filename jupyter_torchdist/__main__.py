"""``python -m jupyter_torchdist`` is the ``torchdist`` command."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())

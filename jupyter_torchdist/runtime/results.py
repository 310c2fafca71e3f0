"""What a rank leaves behind: values of the names the cell bound or changed, or its exception."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from typing import Any

from .. import marshal
from ..protocol.bundle import Manifest
from ..protocol.paths import JobPaths
from ..protocol.plan import Plan
from .eventfile import EventFile
from .execution import CALL, VALUE

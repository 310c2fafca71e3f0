"""The names of torch that are private, or not in every supported release: no other room touches them.

A private name may move or go with any release. Here each has one line that says where it is (``places``), or one
function that says what is done where it is missing. ``tests/unit/test_torch_private.py`` holds the rule and looks up
every name in the release that is installed; ``make test-torch V=2.11.0`` does so with another one.
"""

from __future__ import annotations

import torch

from ..protocol import releases

releases.check(torch.__version__)

"""Names of torch that are private, or not in every supported release. Only this subpackage uses them.

Any release may move or remove a private name. Each name has one line here that tells where it is (``places``), or one
function that handles its absence. ``tests/unit/test_torch_private.py`` checks this rule, and looks up every name in
the installed release. ``make test-torch V=2.11.0`` does this with another release.
"""

from __future__ import annotations

import torch

from ..protocol import releases

releases.check(torch.__version__)

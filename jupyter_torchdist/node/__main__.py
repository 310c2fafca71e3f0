"""``python -m jupyter_torchdist.node VERB``: the processes of a node.

agent [DIRECTORY]           be this node's agent, unless there is one
relay                       join standard input and output to this node's agent (what SSH runs)
remove PARENT …             end this node's agents; delete what connections left, and the code below PARENT
examine                     say what a job of several hosts needs to know of this node
environment                 make the environment of --env-sync that standard input describes
zygote FD [LIBRARY …]       a warm process, for the agent, that imports none of these
launcher                    one job's launcher in a new interpreter; its assignment comes on standard input
worker JOB_ROOT BLOBS NODE  one rank, under torchrun
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..protocol.version import agent_directory


def main(words: list[str]) -> None:
    verb, *rest = words or [""]
    if verb == "agent":
        from . import agent_process

        agent_process.main(Path(*rest) if rest else agent_directory())
    elif verb == "relay":
        from . import relay

        relay.main()
    elif verb == "remove":
        from . import removal

        removal.main(rest)
    elif verb == "examine":
        from . import examine

        examine.main()
    elif verb == "environment":
        from .shipping import environments

        environments.main()
    elif verb == "zygote":
        from . import zygote

        zygote.main(int(rest[0]), rest[1:])
    elif verb == "launcher":
        from ..protocol import codec
        from ..protocol.wire.assignment import Assignment
        from . import launcher

        launcher.start(Assignment.from_json(codec.loads(sys.stdin.buffer.readline())))
    elif verb == "worker":
        from ..ranks import worker

        worker.main(*rest)
        os._exit(0)  # all is written; an interpreter that frees torch objects at exit may hang
    else:
        raise SystemExit(f"{__doc__}\nunknown verb {verb!r}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""The first program on a host. Its text is sent on the command line, so it imports nothing of this package.

Arguments: a mark, the digest of the code, a verb, and the scratch directory (may be empty). It prints the mark and a
word; whatever was printed before that is a banner of the login. Words: ``have`` (the code is here), ``need`` (the code
must come on standard input first, after its size in eight bytes; then it is stored, and the next word is said) and
``cannot``, with the reason. Then it is ``python -m jupyter_torchdist.node VERB``.
"""

from __future__ import annotations

import importlib.util
import io
import os
import runpy
import shutil
import socket
import sys
import tempfile
import zipfile


def main(mark: str, digest: str, verb: str, scratch: str) -> None:
    def say(word: str) -> None:
        os.write(1, f"\n{mark} {word}\n".encode())

    version = ".".join(map(str, sys.version_info[:2]))
    if sys.version_info < (3, 10):  # noqa: UP036  # it runs on whatever Python a host has
        say(f"cannot has Python {version} ({sys.executable}); 3.10 or newer is needed")
        return
    if importlib.util.find_spec("torch") is None:
        say(
            f"cannot has no torch in {sys.executable}; install it there with "
            f"`ssh HOST {sys.executable} -m pip install torch`, or name another with --host-option python=PATH"
        )
        return
    short = f"/tmp/torchdist-{os.getuid()}"
    if scratch:
        scratch = os.path.join(os.path.expanduser(scratch), socket.gethostname())
        os.environ["TORCHDIST_SCRATCH"] = scratch
    # $XDG_RUNTIME_DIR is deleted at the end of the last login session; an agent must outlive it.
    os.environ.setdefault("TORCHDIST_RUNTIME_DIR", short)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    code, error = None, ""
    parents = [*filter(None, [scratch]), os.path.join(cache, "jupyter_torchdist"), short]
    for parent in parents:
        try:
            os.makedirs(parent, 0o700, exist_ok=True)
            owned = os.stat(parent).st_uid == os.getuid() and os.access(parent, os.W_OK)
        except OSError as failure:
            error = str(failure)
            continue
        if owned:
            code = os.path.join(parent, "code-" + digest)
            break
    if code is None:
        error = error or "none is writable"
        say(f"cannot has no directory for our code ({error}); name one with --host-option scratch=DIR")
        return
    if not os.path.isdir(code):
        say("need")
        try:
            receive(code)
        except OSError as failure:
            say(f"cannot cannot store our code in {os.path.dirname(code)}: {failure}")
            return
    say("have")
    sys.path.insert(0, code)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (code, os.environ.get("PYTHONPATH"))))
    sys.argv[:] = [verb, verb, *parents]
    try:
        runpy.run_module("jupyter_torchdist.node", run_name="__main__")
    except Exception as failure:  # noqa: BLE001  # the driver tells the user
        say(f"cannot starts no agent: {failure}")


def read(size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            raise OSError("the connection ended")
        data += part
    return bytes(data)


def receive(code: str) -> None:
    """Unpack the code beside its place, and rename: another connection may do the same at the same time."""
    data = read(int.from_bytes(read(8), "big"))
    aside = tempfile.mkdtemp(prefix=".code-", dir=os.path.dirname(code))
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            archive.extractall(aside)
        os.rename(aside, code)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        if not os.path.isdir(code):
            raise


main(*sys.argv[2:])

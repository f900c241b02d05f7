"""Makes the README's picture: `python -m tests.web.picture docs/page.png`.

As root, so that the node can be named as a simulated one.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

from tests.web.browser import Visit, chromium
from tests.web.node import node

NAME = "gpu-node-17.simulated"
SIZE = (1360, 1180)
SECONDS = 60
"""How long the page is watched, so that its trends show something."""
CLONE_NEWUTS = 0x04000000


def call_the_node(name: str) -> None:
    """Give this process and its children another host name, in a namespace of their own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "unshare")
    socket.sethostname(name)


def main() -> None:
    """Watch a simulated node for a minute, some of its parts ailing, and take the picture."""
    target = Path(sys.argv[1])
    call_the_node(NAME)
    with tempfile.TemporaryDirectory() as directory, node(Path(directory)) as made:
        made.train(0)
        with made.agent() as agent, chromium() as browser:
            visit = Visit(browser, f"http://127.0.0.1:{agent.port}/", SIZE)
            for second in range(SECONDS):
                made.train(second)
                if second > SECONDS // 3:
                    made.ail()
                visit.page.wait_for_timeout(1000)
            assert visit.text("h1") == NAME
            target.parent.mkdir(parents=True, exist_ok=True)
            visit.page.screenshot(path=target)
    print(f"{target}: {target.stat().st_size} bytes, {time.strftime('%Y-%m-%d')}")


if __name__ == "__main__":
    main()

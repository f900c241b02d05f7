"""`python -m dshealthd.training script.py …`, or `-m module …`.

Run an unchanged program with a heartbeat.
"""

from __future__ import annotations

import os
import runpy
import sys

from dshealthd.training import watch


def main() -> None:
    """Run the script or module that the arguments name, as the interpreter itself would."""
    arguments = sys.argv[1:]
    if not arguments or arguments == ["-m"]:
        sys.exit("usage: python -m dshealthd.training (script.py | -m module) [argument …]")
    watch.start()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()

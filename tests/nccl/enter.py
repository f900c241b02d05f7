"""A rank that only enters functions of NCCL: a line `enter FUNCTION ARGUMENT TIMES` calls one with
something that is no communicator in that argument, which NCCL refuses. It needs no GPU.

`NCCLSIM_LIB` is the folder of the library.
"""

from __future__ import annotations

import ctypes
import os
import sys

INVALID_ARGUMENT = 4
MOST_ARGUMENTS = 11
nccl = ctypes.CDLL(f"{os.environ['NCCLSIM_LIB']}/libnccl.so.2")
given: list[object] = []  # kept, so that each is at another address


def enter(function: str, argument: int, times: int) -> bool:
    """Return whether each call was refused."""
    arguments: list[ctypes.Array[ctypes.c_char] | None] = [None] * MOST_ARGUMENTS
    arguments[argument] = ctypes.create_string_buffer(1 << 20)
    given.append(arguments[argument])
    return {getattr(nccl, function)(*arguments) for _ in range(times)} == {INVALID_ARGUMENT}


if __name__ == "__main__":
    for line in sys.stdin:
        match line.split():
            case ["enter", function, argument, times]:
                refused = enter(function, int(argument), int(times))
                print("ok" if refused else f"error in {function}", flush=True)
            case _:
                print("ok", flush=True)

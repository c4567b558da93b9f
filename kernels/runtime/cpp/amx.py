"""Permission to use the tile registers of AMX, which Linux gives to a process that asks for it."""

import ctypes
import platform
import sys
from functools import cache

ARCH_PRCTL = 158
"""The number of the system call on x86-64."""
ARCH_REQ_XCOMP_PERM = 0x1023
TILE_DATA = 18
"""The number of the tile registers among the parts of a thread's state (XSAVE features)."""


@cache
def may_use_tiles() -> bool:
    """Ask the system for the tile registers, for all threads of this process. Return whether they may be used.

    Without the permission, the first instruction that touches a tile would kill the process. The system refuses it
    where its kernel is older than 5.16, where a sandbox forbids the call, or where a thread's signal stack is too small
    for the registers.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0)

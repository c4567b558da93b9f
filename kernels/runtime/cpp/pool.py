"""The threads of native code are torch's own: two pools would take each other's processors."""

import ctypes

import torch

RUN = "GOMP_parallel"


def use_pool(library: ctypes.CDLL, threads: int) -> bool:
    """Give `library` torch's pool; it runs in the calling thread alone where torch has none, or there is one thread.

    threads: as many as torch has, since the pool is made anew where the numbers differ. False without a pool.
    """
    use = library.baton_use_pool
    use.argtypes, use.restype = [ctypes.c_void_p, ctypes.c_int], None
    found = torch_pool()
    use(found, threads)
    return found is not None


def torch_pool() -> int | None:
    """The address of what runs a function on all threads, as torch's own calls resolve it; None where there is none."""
    # A preloaded OpenMP comes before the one that torch brought.
    for scope in (ctypes.CDLL(None), ctypes.CDLL(torch._C.__file__)):
        try:
            return ctypes.cast(getattr(scope, RUN), ctypes.c_void_p).value
        except AttributeError:
            continue
    return None

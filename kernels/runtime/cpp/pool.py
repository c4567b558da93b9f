"""Native code runs on torch's own OpenMP threads, because two pools would compete for the same cores."""

import ctypes

import torch

RUN = "GOMP_parallel"


def use_pool(library: ctypes.CDLL, threads: int) -> bool:
    """Let the library run on torch's pool; return False if torch has none, so that it runs in the calling thread.

    threads: must equal torch's number of threads, because OpenMP creates the pool again whenever the number changes.
        With one thread, too, the library runs in the calling thread.
    """
    use = library.baton_use_pool
    use.argtypes, use.restype = [ctypes.c_void_p, ctypes.c_int], None
    found = torch_pool()
    use(found, threads)
    return found is not None


def torch_pool() -> int | None:
    """Return the address of OpenMP's entry point for parallel regions, as torch resolves it; None if there is none.

    The function runs another function on all threads of the pool.
    """
    # A preloaded OpenMP takes precedence over the one that torch ships, as it does for torch itself.
    for scope in (ctypes.CDLL(None), ctypes.CDLL(torch._C.__file__)):
        try:
            return ctypes.cast(getattr(scope, RUN), ctypes.c_void_p).value
        except AttributeError:
            continue
    return None

"""The threads of native code are torch's own: two pools would take each other's processors."""

import ctypes

import torch

SYMBOLS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


def use_pool(library: ctypes.CDLL, threads: int) -> bool:
    """Give `library` torch's pool; it runs in the calling thread alone where torch has none, or there is one thread.

    threads: as many as torch has, since the pool is made anew where the numbers differ. False without a pool.
    """
    use = library.baton_use_pool
    use.argtypes, use.restype = [ctypes.c_void_p] * len(SYMBOLS) + [ctypes.c_int], None
    found = torch_pool()
    use(*(found or [0] * len(SYMBOLS)), threads)
    return found is not None


def torch_pool() -> list[int] | None:
    """Addresses of SYMBOLS as torch's own calls resolve; None where its OpenMP has another interface."""
    # A preloaded OpenMP comes before the one that torch brought.
    for scope in (ctypes.CDLL(None), ctypes.CDLL(torch._C.__file__)):
        try:
            return [ctypes.cast(getattr(scope, name), ctypes.c_void_p).value or 0 for name in SYMBOLS]
        except AttributeError:
            continue
    return None

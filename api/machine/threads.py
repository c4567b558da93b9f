"""The number of threads that compute, and how long idle ones spin before they sleep."""

import os
from collections.abc import MutableMapping

# Iterations of libgomp's waiting loop.
SPINS = "3000"
SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# In smaller models threads wait for each other longer than a second thread saves.
PARAMETERS_FOR_MORE = 20_000_000


def spin_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Shorten the spinning, unless the user has set it. Call this before torch is imported, which reads it then."""
    if not any(name in environment for name in SETTINGS):
        environment["GOMP_SPINCOUNT"] = SPINS


def default_threads(parameters: int, available: int) -> int:
    """Return how many threads compute: `available` (torch's choice), or one for a small model."""
    return available if parameters >= PARAMETERS_FOR_MORE else 1

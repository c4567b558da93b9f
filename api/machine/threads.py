"""The number of threads that compute, and how long idle threads spin before they sleep."""

import os
from collections.abc import MutableMapping

# Value of GOMP_SPINCOUNT: how often an idle thread of libgomp checks for work before it sleeps.
SPINS = "3000"
SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# In smaller models, a second thread with a busy process running costs more than it saves alone.
PARAMETERS_FOR_MORE = 10_000_000


def spin_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set a short GOMP_SPINCOUNT, unless the user has set it. Call this before torch is imported, which reads it."""
    if not any(name in environment for name in SETTINGS):
        environment["GOMP_SPINCOUNT"] = SPINS


def default_threads(parameters: int, available: int) -> int:
    """Return how many threads compute: one for a small model, else `available`, which is torch's choice."""
    return available if parameters >= PARAMETERS_FOR_MORE else 1

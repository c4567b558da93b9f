"""How many threads compute a step, and how long they spin for the next piece of it before they sleep."""

import os
from collections.abc import MutableMapping

# Turns of libgomp's waiting loop.
SPINS = "3000"
SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# Below it the threads wait for each other longer than the second one saves.
PARAMETERS_FOR_MORE = 20_000_000


def spin_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Unless the user has said how long; to be called before torch is imported, which reads it then."""
    if not any(name in environment for name in SETTINGS):
        environment["GOMP_SPINCOUNT"] = SPINS


def default_threads(parameters: int, available: int) -> int:
    """As many as there are for a model of some size, else one. available: what torch would take."""
    return available if parameters >= PARAMETERS_FOR_MORE else 1

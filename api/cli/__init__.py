"""The entry point of the command line. It handles signals before it imports anything that takes long to import."""

import os
import sys
from collections.abc import Sequence

from baton.api.machine.signals import Signals


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    signals = Signals()
    if arguments[:1] in (["serve"], ["route"], ["cluster"]):
        signals.take()
    from baton.api.cli.commands import run

    try:
        code = run(arguments, signals)
        if sys.stdout is not None:  # None if the process was started without one
            sys.stdout.flush()
    except BrokenPipeError:  # The reader of the output has ended, as in `baton doctor | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code

"""The arguments of `baton cluster`."""

import argparse
from pathlib import Path

LINES = 100


def add_commands(to: argparse.ArgumentParser) -> None:
    """Add the commands of `baton cluster` to its parser."""
    verbs = to.add_subparsers(dest="verb", required=True, metavar="up | status | logs | restart | down")
    for verb, help in (
        ("up", "start the cluster, and keep it running until SIGTERM, Ctrl-C or `down`"),
        ("status", "show its processes"),
        ("logs", "show the last lines of logs"),
        ("restart", "restart all engines one after the other, or the named processes, without failing a request"),
        ("down", "let it drain and end"),
    ):
        command = verbs.add_parser(verb, help=help, description=f"{help[0].upper()}{help[1:]}.")
        command.add_argument("file", type=Path, help="the cluster's file, such as cluster.toml")
        if verb in ("logs", "restart"):
            command.add_argument("names", nargs="*", metavar="NAME", help="a process, as in `status` [all]")
        if verb == "logs":
            command.add_argument("--lines", type=count, default=LINES, help="of each process [%(default)s]")


def count(text: str) -> int:
    """Parse a number of lines. Raises ValueError."""
    if (number := int(text)) < 0:
        raise ValueError
    return number

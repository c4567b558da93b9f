"""The command line: `baton serve [DIR] | chat | inspect [DIR] | doctor | version`.

Options of serve and inspect are made from api/config.py:Config.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton.api import config as configuration
from baton.api.config import Config, ConfigError, flag, is_size, variable
from baton.api.machine.threads import spin_briefly
from baton.api.terminal.client import DEFAULT_URL
from baton.api.version import VERSION

OF_SIZE = (
    "model", "max_model_len", "dtype", "state_dtype", "quantize", "device", "state_slots", "state_strategy",
    "tree_slots", "kv_pages", "page_size", "memory", "max_running",
)  # fmt: skip
"""The options of serve that decide what a model takes."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = vars(parser().parse_args(arguments))
    command = options.pop("command")
    if command == "version":
        print(f"baton {VERSION}")
        return 0
    if command == "chat":
        from baton.api.terminal.chat import chat

        options["api_key"] = options["api_key"] or first_key(os.environ)
        return chat(**options)
    spin_briefly()
    if command == "doctor":
        from baton.api.machine.doctor import doctor

        return doctor(options["json"])
    as_json = options.pop("json", False)
    try:
        config = configuration.load(options)
        config.accepted_keys()
    except ConfigError as error:
        print(f"baton: {error}", file=sys.stderr)
        return 2
    if command == "inspect":
        from baton.api.inspection import inspect

        return inspect(config, as_json)
    from baton.api.serve import serve
    from baton.api.wiring import load

    return serve(config, load)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="baton", description="Serve language models that have a recurrent state.")
    commands = top.add_subparsers(dest="command", required=True, metavar="serve | chat | inspect | doctor | version")
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve the model in DIR, or the bundled one, over HTTP.",
        epilog="Each option can be set by the environment variable that is named with it; the command line wins.",
    )
    for field in configuration.fields():
        add_option(serve, field)
    talk = commands.add_parser("chat", help="chat with a running server", description="Chat with a running server.")
    talk.add_argument("--url", default=DEFAULT_URL, help="the server [%(default)s]")
    talk.add_argument("--api-key", help="key to send, if the server wants one (BATON_API_KEY)")
    which = talk.add_mutually_exclusive_group()
    which.add_argument("--session", metavar="ID", help="go on with this session")
    which.add_argument("--fork", metavar="ID", help="go on in a copy of this session")
    talk.add_argument("--system", help="system message of a new session")
    talk.add_argument("--temperature", type=float, help="sampling temperature [the model's default]")
    talk.add_argument("--max-tokens", type=int, help="most tokens of an answer")
    look = commands.add_parser(
        "inspect",
        help="tell what a checkpoint holds and takes, and whether it can be served",
        description="Tell what the checkpoint in DIR, or the bundled one, holds and takes here, without loading it.",
    )
    for field in configuration.fields():
        if field.name in OF_SIZE:
            add_option(look, field)
    look.add_argument("--json", action="store_true", help="as one JSON object")
    examine = commands.add_parser("doctor", help="tell what this machine has, and which code runs on it")
    examine.add_argument("--json", action="store_true", help="as one JSON object")
    commands.add_parser("version", help="print the version")
    return top


def first_key(environment: Mapping[str, str]) -> str | None:
    """The first API key in BATON_API_KEY, None if there is none. A server takes any of those that are listed there."""
    return environment.get(variable("api_key"), "").partition(",")[0].strip() or None


def add_option(to: argparse.ArgumentParser, field: msgspec.inspect.Field) -> None:
    """One option, checked later by msgspec so that the environment and the command line obey the same rules."""
    name = field.name
    if name == "model":
        to.add_argument(name, nargs="?", metavar="DIR", help=f"{describe(field)} ({variable(name)})")
        return
    more: dict[str, Any] = {"dest": name, "help": f"{describe(field)} ({variable(name)})"}
    if isinstance(field.default, bool):
        more |= {"action": "store_true", "default": None}
    elif isinstance(field.default, tuple):
        more |= {"action": "append", "metavar": short_name(name)}
    else:
        more["metavar"] = metavar(field)
    to.add_argument(flag(name), **more)


def describe(field: msgspec.inspect.Field) -> str:
    """The help text, with the default where that says something."""
    assert isinstance(field.type, msgspec.inspect.Metadata)
    text = str((field.type.extra_json_schema or {})["description"]).replace("%", "%%")
    if field.default is None or isinstance(field.default, bool | tuple):
        return text
    default = f"{field.default / 2**20:g}M" if is_size(field) else f"{field.default}".removesuffix(".0")
    return f"{text} [{default}]"


def metavar(field: msgspec.inspect.Field) -> str:
    assert isinstance(field.type, msgspec.inspect.Metadata)
    if is_size(field):
        return "SIZE"
    kinds = field.type.type
    if isinstance(kinds, msgspec.inspect.LiteralType):
        declared = [f.default for f in msgspec.structs.fields(Config) if f.name == field.name]
        return "{" + ",".join(sorted(map(str, kinds.values), key=lambda v: v != declared[0])) + "}"
    if isinstance(kinds, msgspec.inspect.EnumType):
        return "{" + ",".join(kinds.cls) + "}"
    names = {msgspec.inspect.IntType: "N", msgspec.inspect.FloatType: "SECONDS"}
    options = kinds.types if isinstance(kinds, msgspec.inspect.UnionType) else (kinds,)
    return next((names[type(option)] for option in options if type(option) in names), short_name(field.name))


def short_name(name: str) -> str:
    """What the help calls the value of an option: the last word of its name."""
    return name.rpartition("_")[2].upper()


if __name__ == "__main__":
    sys.exit(main())

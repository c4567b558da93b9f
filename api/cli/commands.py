"""The command line: `baton serve [MODEL] | route | chat | inspect [MODEL] | pull MODEL | list | doctor | version`.

MODEL is a folder, a GGUF file or a name on the hub.
The options of serve, route and inspect are made from api/config.py:Config.
"""

import argparse
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from baton.api import config as configuration
from baton.api.cluster.arguments import add_commands as add_cluster_commands
from baton.api.config import Config, ConfigError, choices, flag, is_size, metadata, variable
from baton.api.hub.names import hub_name
from baton.api.machine.environment import expand_segments
from baton.api.machine.signals import Signals
from baton.api.machine.threads import spin_briefly
from baton.api.terminal.client import DEFAULT_URL
from baton.api.terminal.console import complain
from baton.api.version import VERSION

if TYPE_CHECKING:
    from baton.api.serve import Load

OF_SIZE = (
    "model", "max_model_len", "dtype", "state_dtype", "quantize", "activation_dtype", "device", "state_slots",
    "state_strategy", "tree_slots", "kv_pages", "page_size", "memory", "max_running", "speculation",
)  # fmt: skip
"""The options that `baton inspect` shares with `baton serve`: they decide how much memory a model needs."""
OF_ROUTER = (
    "engine", "host", "port", "uds", "tls_cert", "tls_key", "max_connections", "bytes_in_flight", "body_limit",
    "header_timeout", "body_timeout", "idle_timeout", "unread_timeout", "websocket_timeout", "ping_interval",
    "request_timeout", "drain_timeout", "api_key", "api_key_file", "cors", "allowed_host", "log_format", "log_level",
)  # fmt: skip
"""The options of `baton route`; only the first is not one of `baton serve`."""
HELP_WIDTH = 120
DEFAULTS = "Defaults are in brackets."
VARIABLES = "Each option can also be set by the environment variable in parentheses; the command line takes precedence."
CACHE = "Names use the cache of huggingface_hub and its variables HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE."
NAMES = (
    "MODEL is a folder, a GGUF file or a name on the Hugging Face hub: ORG/NAME, ORG/NAME@REVISION, or "
    f"ORG/NAME:Q4_K_M for a GGUF file. {CACHE}"
)
UNITS = (("G", 2**30), ("M", 2**20), ("K", 2**10), ("", 1))


def run(arguments: Sequence[str], signals: Signals) -> int:
    """Run one command and return its exit code. A server leaves the process instead."""
    options = vars(parser().parse_args(arguments))
    command = options.pop("command")
    if command == "version":
        print(f"baton {VERSION}")
        return 0
    if command == "chat":
        from baton.api.terminal.chat import chat

        options["api_key"] = options["api_key"] or first_key(os.environ)
        return chat(**options)
    if command == "pull":
        from baton.api.cli.pulling import pull

        return pull(options["model"])
    if command == "cluster":
        from baton.api.cluster.commands import run as run_cluster

        return run_cluster(options, signals)
    spin_briefly()
    expand_segments()
    if command == "doctor":
        from baton.api.machine.doctor import doctor

        return doctor(options["json"])
    if command == "list":
        from baton.api.cli.listing import list_models

        return list_models(options["json"])
    as_json = options.pop("json", False)
    from baton.api.security import accepted_keys

    try:
        config = configuration.load(options)
        # The file is read once: it may be a pipe.
        config = msgspec.structs.replace(config, api_key=accepted_keys(config), api_key_file=None)
        if config.peer or config.peer_listen is not None:
            from baton.api.peering.options import read_key

            read_key(config)
    except ConfigError as error:
        complain(error)
        return 2
    if command == "inspect":
        return run_inspect(config, as_json)
    if command == "route":
        from baton.api.routing.serve import route

        return route(config, signals)
    from baton.api.serve import serve

    return serve(config, loader(config), signals)


def run_inspect(config: Config, as_json: bool) -> int:
    """Inspect a folder or, with huggingface_hub, a name on the hub."""
    if (name := hub_name(config.model)) is not None:
        from baton.api.cli.by_name import inspect_by_name

        return inspect_by_name(config, name, as_json)
    from baton.api.inspection import inspect

    return inspect(config, as_json)


def loader(config: Config) -> "Load":
    """Return the function that loads the model; for a name on the hub, the one that fetches it first."""
    if (name := hub_name(config.model)) is not None:
        from baton.api.cli.by_name import load_by_name

        return partial(load_by_name, name)
    from baton.api.wiring import load

    return load


class HelpFormatter(argparse.HelpFormatter):
    """Help in lines of up to 120 columns, so that most options take one line each."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size((HELP_WIDTH, 24)).columns, HELP_WIDTH)
        super().__init__(prog, max_help_position=28, width=width)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(prog="baton", description="Serve language models with a recurrent state.")
    names = "serve | route | cluster | chat | inspect | pull | list | doctor | version"
    commands = top.add_subparsers(dest="command", required=True, metavar=names)
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        usage="baton serve [MODEL] [OPTION ...]",
        description="Serve MODEL over HTTP; without it, the bundled example model, which knows a small invented world.",
        epilog=f"{DEFAULTS} {NAMES} SIZE is a number of bytes, such as 512M or 4G. {VARIABLES}",
        formatter_class=HelpFormatter,
    )
    add_options(serve, (field for field in configuration.fields() if field.name != "engine"))
    route = commands.add_parser(
        "route",
        help="put one address in front of several engines",
        usage="baton route --engine URL [--engine URL ...] [OPTION ...]",
        description="Pass requests on to the engine that would answer first, and sessions to the engine that has them.",
        epilog=f"{DEFAULTS} {VARIABLES}",
        formatter_class=HelpFormatter,
    )
    add_options(route, (field for field in configuration.fields() if field.name in OF_ROUTER))
    cluster = commands.add_parser(
        "cluster",
        help="run a router and engines by one file",
        description="Run a router and engines, as one file describes them.",
    )
    add_cluster_commands(cluster)
    talk = commands.add_parser("chat", help="chat with a running server", description="Chat with a running server.")
    talk.add_argument("--url", default=DEFAULT_URL, help="URL of the server [%(default)s]")
    talk.add_argument("--api-key", help="API key to send, if the server requires one (BATON_API_KEY)")
    which = talk.add_mutually_exclusive_group()
    which.add_argument("--session", metavar="ID", help="continue this session")
    which.add_argument("--fork", metavar="ID", help="continue in a copy of this session")
    talk.add_argument("--system", help="system message for new sessions")
    talk.add_argument("--temperature", type=float, help="sampling temperature [the model's default]")
    talk.add_argument("--max-tokens", type=int, help="maximum tokens of an answer")
    look = commands.add_parser(
        "inspect",
        help="show what a checkpoint holds and needs, and whether it can be served",
        usage="baton inspect [MODEL] [OPTION ...]",
        description="Show what MODEL, or the bundled model, holds and how much memory it needs on this machine, "
        "without loading or fetching its weights. Exits with 1 if `baton serve` would refuse it.",
        epilog=f"{DEFAULTS} {NAMES} {VARIABLES}",
        formatter_class=HelpFormatter,
    )
    add_options(look, (field for field in configuration.fields() if field.name in OF_SIZE))
    look.add_argument("--json", action="store_true", help="print one JSON object")
    get = commands.add_parser(
        "pull",
        help="fetch a model from the hub",
        description="Fetch the files of a model that a server needs into the hub's cache, and print their folder.",
        epilog=CACHE,
        formatter_class=HelpFormatter,
    )
    get.add_argument(
        "model",
        metavar="MODEL",
        help="name on the hub: ORG/NAME, ORG/NAME@REVISION, or ORG/NAME:Q4_K_M for a GGUF file",
    )
    cached = commands.add_parser(
        "list",
        help="list the models in the hub's cache",
        description="List the models in the hub's cache, and for each what keeps it from being served on this machine.",
    )
    cached.add_argument("--json", action="store_true", help="print one JSON array")
    examine = commands.add_parser("doctor", help="show this machine's hardware, and which kernels run on it")
    examine.add_argument("--json", action="store_true", help="print one JSON object")
    commands.add_parser("version", help="print the version")
    return top


def first_key(environment: Mapping[str, str]) -> str | None:
    """Return the first of the comma-separated API keys in BATON_API_KEY, or None. A server accepts all of them."""
    return environment.get(variable("api_key"), "").partition(",")[0].strip() or None


def add_options(to: argparse.ArgumentParser, fields: Iterable[msgspec.inspect.Field]) -> None:
    """Add options to a parser, each under the heading of its group."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in fields:
        title = group_of(field)
        if title not in groups:
            groups[title] = to.add_argument_group(title)
        add_option(groups[title], field)


def add_option(to: argparse._ArgumentGroup, field: msgspec.inspect.Field) -> None:
    """Add one option. `configuration.load` checks its value, with the same rules for environment and command line."""
    name = field.name
    if name == "model":
        to.add_argument(name, nargs="?", metavar="MODEL", help=f"{describe(field)} ({variable(name)})")
        return
    more: dict[str, Any] = {"dest": name, "help": f"{describe(field)} ({variable(name)})"}
    if isinstance(field.default, bool):
        more |= {"action": "store_true", "default": None}
    elif isinstance(field.default, tuple):
        more |= {"action": "append", "metavar": short_name(name)}
    else:
        more["metavar"] = metavar(field)
    to.add_argument(flag(name), **more)


def group_of(field: msgspec.inspect.Field) -> str:
    """Return the heading of --help under which the option appears."""
    return str((metadata(field).extra or {})["group"])


def description(field: msgspec.inspect.Field) -> str:
    """Return the option's help text, as written in Config."""
    return str((metadata(field).extra_json_schema or {})["description"])


def describe(field: msgspec.inspect.Field) -> str:
    """Return an option's help text, with the default in brackets unless the default is None, off or empty."""
    text = description(field).replace("%", "%%")
    if field.default is None or isinstance(field.default, bool | tuple):
        return text
    return f"{text} [{size(field.default) if is_size(field) else str(field.default).removesuffix('.0')}]"


def size(count: int) -> str:
    """Return a number of bytes in the largest unit that divides it without a remainder, such as 10G."""
    return next(f"{count // unit}{name}" for name, unit in UNITS if count % unit == 0)


def metavar(field: msgspec.inspect.Field) -> str:
    """Return the placeholder for a value in --help: the choices, default first; a unit; or the option's last word."""
    assert isinstance(field.type, msgspec.inspect.Metadata)
    if is_size(field):
        return "SIZE"
    kinds = field.type.type
    if isinstance(kinds, msgspec.inspect.LiteralType):
        declared = [f.default for f in msgspec.structs.fields(Config) if f.name == field.name]
        return "{" + ",".join(sorted(choices(field), key=lambda v: v != declared[0])) + "}"
    if isinstance(kinds, msgspec.inspect.EnumType):
        return "{" + ",".join(choices(field)) + "}"
    names = {msgspec.inspect.IntType: "N", msgspec.inspect.FloatType: "SECONDS"}
    options = kinds.types if isinstance(kinds, msgspec.inspect.UnionType) else (kinds,)
    return next((names[type(option)] for option in options if type(option) in names), short_name(field.name))


def short_name(name: str) -> str:
    """Return the last word of an option's name, to stand for its value in --help."""
    return name.rpartition("_")[2].upper()

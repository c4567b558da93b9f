"""Options: defaults, ranges, environment, help."""

import os
import re
import subprocess
import sys

import pytest

from baton.actors.scheduler.strategy import Strategy
from baton.api import config
from baton.api.cli import commands, main
from baton.api.cli.commands import description, group_of
from baton.api.config import Config, ConfigError, fields, flag, load, variable
from baton.api.machine.signals import Signals
from baton.api.routing import serve
from baton.api.security import Guard


def parse(*arguments: str, environment: dict[str, str] | None = None) -> Config:
    options = vars(commands.parser().parse_args(["serve", *arguments]))
    options.pop("command")
    return load(options, environment or {})


def test_defaults() -> None:
    assert parse() == Config()


def test_options_of_every_kind() -> None:
    parsed = parse(
        "folder", "--port", "0", "--memory", "1.5G", "--no-overlap", "--api-key", "a", "--api-key", "b", "--dtype",
        "bfloat16", "--request-timeout", "2.5", "--codec-check", "--body-limit", "64K", "--state-strategy",
        "extra_buffer", "--tree-slots", "3", "--restarts", "0", "--poison-freed", "--session-dir", "d",
        "--session-disk", "20M", "--host-memory", "0", "--session-slots", "0",
    )  # fmt: skip
    assert (parsed.model, parsed.port, parsed.memory, parsed.no_overlap) == ("folder", 0, 3 * 2**29, True)
    assert (parsed.api_key, parsed.dtype, parsed.request_timeout) == (("a", "b"), "bfloat16", 2.5)
    assert (parsed.codec_check, parsed.body_limit) == (True, 65536)
    assert (parsed.state_strategy, parsed.tree_slots) == (Strategy.EXTRA_BUFFER, 3)
    assert (parsed.restarts, parsed.poison_freed) == (0, True)
    assert (parsed.session_dir, parsed.session_disk) == ("d", 20 * 2**20)
    assert (parsed.host_memory, parsed.session_slots) == (0, 0)


def test_the_environment_sets_what_the_command_line_does_not() -> None:
    environment = {
        "BATON_PORT": "9", "BATON_API_KEY": "x, y", "BATON_NO_OVERLAP": "1", "BATON_MODEL": "m",
        "BATON_MAX_RUNNING": "2",
        "BATON_CODEC_CHECK": "false", "BATON_HOST": "",
    }  # fmt: skip
    parsed = parse("--max-running", "3", environment=environment)
    assert (parsed.port, parsed.api_key, parsed.no_overlap, parsed.model) == (9, ("x", "y"), True, "m")
    assert (parsed.max_running, parsed.codec_check, parsed.host) == (3, False, "127.0.0.1")


@pytest.mark.parametrize(
    ("arguments", "environment", "named"),
    [
        (["--port", "70000"], {}, "--port"),
        (["--port", "x"], {}, "--port"),
        (["--memory", "lots"], {}, "--memory"),
        (["--max-running", "0"], {}, "--max-running"),
        (["--state-slots", "-1"], {}, "--state-slots"),
        (["--dtype", "int8"], {}, "--dtype"),
        (["--quantize", "int2"], {}, "--quantize"),
        (["--state-strategy", "hoard"], {}, "--state-strategy"),
        (["--tree-slots", "-1"], {}, "--tree-slots"),
        (["--session-disk", "1K"], {}, "--session-disk"),
        (["--host-memory", "-1"], {}, "--host-memory"),
        (["--device", "tpu"], {}, "--device"),
        (["--host", ""], {}, "--host"),
        (["--session-dir", ""], {}, "--session-dir"),
        (["--memory", "9" * 400], {}, "--memory"),
        (["--cors", "example.org"], {}, "--cors"),
        (["--api-key", " "], {}, "--api-key"),
        ([], {"BATON_API_KEY": " , "}, "BATON_API_KEY"),
        ([], {"BATON_API_KEY": ""}, "BATON_API_KEY"),
        (["--request-timeout", "nan"], {}, "--request-timeout"),
        (["--request-timeout", "inf"], {}, "--request-timeout"),
        ([], {"BATON_PAGE_SIZE": "0"}, "BATON_PAGE_SIZE"),
        ([], {"BATON_NO_OVERLAP": "perhaps"}, "BATON_NO_OVERLAP"),
        ([], {"BATON_BODY_LIMIT": "1"}, "BATON_BODY_LIMIT"),
        (["--max-queue", "\udcff"], {}, "--max-queue"),
        (["--host", "\udcff"], {}, "--host"),
        (["/models/\udcff"], {}, "MODEL"),
        (["--cors", "http://\udcff"], {}, "--cors"),
        ([], {"BATON_ENGINE_NAME": "\udcff"}, "BATON_ENGINE_NAME"),
        (["--kv-pages", "9" * 20], {}, "--kv-pages"),
        (["--threads", "9" * 10], {}, "--threads"),
        (["--memory", "9" * 18 + "T"], {}, "--memory"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], environment: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}: "):
        parse(*arguments, environment=environment)


@pytest.mark.parametrize(
    ("name", "choices"),
    [("--activation-dtype", "auto, int8"), ("--quantize", "int4, int8, none"), ("--state-strategy", ".*no_buffer.*")],
)
def test_a_wrong_choice_is_answered_with_the_right_ones(name: str, choices: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: expected {choices}, not 'int7'$"):
        parse(name, "int7", environment={})


def test_keys_may_have_any_bytes() -> None:
    assert parse("--api-key", "\udcff").api_key == ("\udcff",)


def test_reading_options_does_not_import_torch() -> None:
    code = "import sys; import baton.api.cli.commands, baton.api.routing.serve; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"


def help_text(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as leaving:
        commands.run(["serve", "--help"], Signals())
    assert leaving.value.code == 0
    return capsys.readouterr().out


def test_help_shows_every_option_and_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    shown = "".join(help_text(capsys).split())
    for field in fields():
        assert variable(field.name) in shown
        assert field.name == "model" or flag(field.name) in shown


def test_help_shows_every_option_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    sections = dict(re.findall(r"^(\w[\w ]*):\n((?:  .*\n)+)", help_text(capsys), re.MULTILINE))
    assert list(sections) == ["options", *dict.fromkeys(group_of(field) for field in fields())]
    for field in fields():
        name = "MODEL" if field.name == "model" else flag(field.name)
        assert re.search(rf"^  {name}\b", sections[group_of(field)], re.MULTILINE), name
    assert len(re.findall(r"^  -", sections["options"], re.MULTILINE)) == 1  # only --help is in no group


def test_every_option_is_documented() -> None:
    assert all(description(field) for field in fields())


def test_a_wrong_option_ends_the_process_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_STEP_TOKENS", "none")
    assert commands.run(["serve"], Signals()) == 2
    assert "BATON_STEP_TOKENS" in capsys.readouterr().err


def test_keys_are_read_once_because_they_may_come_from_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    served = list[Guard]()
    monkeypatch.setattr(serve, "route", lambda config, signals: served.append(Guard(config)) or 0)
    reader, writer = os.pipe()
    os.write(writer, b"first\n")
    os.close(writer)
    assert commands.run(["route", "--engine", "http://x", "--api-key-file", f"/dev/fd/{reader}"], Signals()) == 0
    os.close(reader)
    assert served[0].has_keys


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("baton ")


@pytest.mark.parametrize("command", ["version", "list"])
def test_a_command_whose_reader_has_left_ends_quietly(command: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    run = [sys.executable, "-m", "baton.api.cli", command]
    done = subprocess.run(run, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_command_without_an_output_ends_as_others() -> None:
    run = [sys.executable, "-m", "baton.api.cli", "version"]
    done = subprocess.run(run, preexec_fn=lambda: os.close(1), stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_keys_are_never_shown() -> None:
    assert "secret" not in str(config.Config(api_key=("secret",)).redacted())

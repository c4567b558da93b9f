"""Chat templates as Hugging Face checkpoints carry them: Jinja, sandboxed, with the extras that templates expect."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import groupby, takewhile
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# The words that transformers uses: some templates know them.
END_OF_FINAL_MESSAGE = "CONTINUE_FINAL_MESSAGE_TAG "
PARTS = ("the first part", "the second part")
LATER = "said later"
REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateError(ValueError):
    """A chat cannot be rendered; the message says why."""


@dataclass(frozen=True)
class Beginning:
    """What a chat begins with: its first messages, the last of them perhaps in part, and, if a part, of its tools too.

    variables: what a template reads in place of the whole chat's.
    """

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any] = field(default_factory=dict)


class GenerationTag(Extension):
    """{% generation %} … {% endgeneration %} marks the assistant's tokens for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """The templates of a checkpoint by name; "default" is used, or "tool_use", if there is one, when tools are given.

    What they see is what transformers shows them: tools and documents are none where none are given, a message's fields
    that are null are not there, and its reasoning has every name that templates know it by. Only what the system says
    behind its first message is shown otherwise, by those that would refuse or drop it: see `with_one_system`.

    special_tokens (bos_token, eos_token, …) are visible to the template. TemplateError if one does not compile.
    variables: all names that one of the templates reads. texts: the sources, and the special tokens.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, Any]) -> None:
        environment = _environment()
        self.sources = dict(sources)
        self.variables: frozenset[str] = frozenset()
        self.texts = [*sources.values(), *map(str, special_tokens.values())]
        self._special_tokens = dict(special_tokens)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                self.variables |= meta.find_undeclared_variables(environment.parse(source))
            except jinja2.TemplateError as error:
                raise TemplateError(f"chat template {name!r} does not compile: {error}") from error
        if "default" not in self._templates:
            raise TemplateError(f"there is no default chat template, only {', '.join(sorted(sources)) or 'none'}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt's text. TemplateError, with the template's own message, for a chat that it does not accept.

        chat_template: the name of another than the one that is used otherwise, such as "rag".
        """
        template = self._named(chat_template, variables.get("tools"))
        if any(map(is_system, messages[1:])) and not self._takes_systems_anywhere:
            messages = with_one_system(messages)
        return self._rendered(template, messages, add_generation_prompt=add_generation_prompt, **variables)

    def _rendered(self, template: jinja2.Template, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        known = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return template.render(messages=[as_templates_know_it(message) for message in messages], **known)
        except TemplateError:
            raise
        except Exception as error:  # A template is the model author's code: whatever it raises is about this chat.
            raise TemplateError(f"the chat template failed: {error}") from error

    @cached_property
    def _takes_systems_anywhere(self) -> bool:
        said = (("system", "You"), ("system", LATER), ("user", "Hello"), ("system", LATER), ("user", "Hello"))
        messages = [{"role": role, "content": content} for role, content in said]
        try:
            shown = self._rendered(self._templates["default"], messages, add_generation_prompt=True)
        except TemplateError:
            return False
        return shown.count(LATER) == 2

    @cached_property
    def between_parts(self) -> str:
        """What it puts between two parts of a message's text; nothing where it takes only strings."""
        content = [{"type": "text", "text": part} for part in PARTS]
        try:
            shown = self.render([{"role": "user", "content": content}], add_generation_prompt=False)
        except TemplateError:
            return ""
        between, found, _ = shown.partition(PARTS[0])[2].partition(PARTS[1])
        return between if found and not between.strip() else ""

    def render_open(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt's text up to the end of the final message's content, so that the model writes on in it.

        As transformers has it: where the template trims contents, this one's end is trimmed too. TemplateError if the
        template shows that message changed, or not at all.
        """
        content, marked = mark_end(messages[-1].get("content"))
        final = {**messages[-1], "content": marked}
        text = self.render([*messages[:-1], final], add_generation_prompt=False, **variables)
        end = text.rfind(END_OF_FINAL_MESSAGE.rstrip())
        if end < 0 or content.strip() not in text:
            raise TemplateError("it does not show the final message as it is, so that cannot be continued")
        return text[:end] if text.startswith(END_OF_FINAL_MESSAGE, end) else text[:end].rstrip()

    def _named(self, name: str | None, tools: object) -> jinja2.Template:
        if name is None:
            name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if not isinstance(name, str) or name not in self._templates:
            raise TemplateError(f"there is no chat template {name!r}, only {', '.join(sorted(self._templates))}")
        return self._templates[name]


def with_one_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The system's first messages as one, and what it says later as the user's, with what the user says beside it."""
    opening = len(list(takewhile(is_system, messages)))
    later = [{**message, "role": "user"} if is_system(message) else message for message in messages[opening:]]
    both = zip([*messages[:opening], *later], messages, strict=True)
    shown = list[Mapping[str, Any]]()
    for _, run in groupby(both, key=lambda pair: pair[0].get("role")):
        as_told, as_said = zip(*run, strict=True)
        texts = [message.get("content") for message in as_told]
        if any(map(is_system, as_said)) and all(isinstance(text, str) for text in texts):
            shown.append({**as_told[0], "content": "\n\n".join(map(str, texts))})
        else:
            shown += as_told
    return shown


def is_system(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "system"


def as_templates_know_it(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is null, which a template would show as None, and with its reasoning under every name for it."""
    given = {name: value for name, value in message.items() if value is not None}
    reasoning = next((given[name] for name in REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def mark_end(content: str | Sequence[Mapping[str, Any]] | None) -> tuple[str, str | list[Mapping[str, Any]]]:
    """The text that is to be continued, the last one of several parts, and the content with a mark behind it.

    TemplateError if there is no text.
    """
    if isinstance(content, str):
        return content, content + END_OF_FINAL_MESSAGE
    parts = list(content or [])
    for index in reversed(range(len(parts))):
        if "text" in parts[index]:
            text = parts[index]["text"]
            parts[index] = {**parts[index], "text": text + END_OF_FINAL_MESSAGE}
            return text, parts
    raise TemplateError("the final message has no text, so that cannot be continued")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)

"""Chat templates as Hugging Face checkpoints have them: sandboxed Jinja, with the extensions that templates expect."""

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

from baton.models.text.sandbox import Sandbox, TemplateError, checked

# transformers uses the same text, and some templates look for it.
END_OF_FINAL_MESSAGE = "CONTINUE_FINAL_MESSAGE_TAG "
# Texts of probe chats, which are rendered to find out how a template behaves.
PARTS = ("the first part", "the second part")
LATER = "said later"
# Variables by which templates keep the reasoning of earlier turns, with the value that keeps it.
KEEPING = {
    "preserve_thinking": True,
    "preserve_reasoning": True,
    "keep_past_thinking": True,
    "clear_thinking": False,
    "drop_thinking": False,
    "truncate_history_thinking": False,
}
THOUGHT, CALLED = "A thought.", "called_tool"  # the reasoning and the tool's name in probe chats
# Fields in which a message may have its reasoning, in order of precedence.
REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class Beginning:
    """The beginning of a chat: its first messages, of which the last one may be cut off."""

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Template variables that replace those of the whole chat, such as only the first of its tools."""


class GenerationTag(Extension):
    """The tag {% generation %} … {% endgeneration %}, which marks tokens for training: it renders as its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@dataclass(frozen=True)
class KeptReasoning:
    """How a chat is given to a template so that the reasoning of earlier turns is shown."""

    variables: Mapping[str, bool]
    in_content: bool  # the template reads no field with reasoning: put it into the content, between its markers
    calls_first: bool = False  # the template writes calls before the content, where reasoning would come too late


class ChatTemplate:
    """The templates of a checkpoint by name. A chat uses "default"; a chat with tools uses "tool_use" if that exists.

    Templates see the same values as in transformers: `tools` and `documents` are None if absent, fields of messages
    that are null are left out, and reasoning is given under every name that templates use. There is one exception:
    `with_one_system` rewrites chats for templates that would refuse or drop system messages after the first ones.

    sources: the templates' source texts by name.
    special_tokens: bos_token, eos_token and so on; templates can read them.
    Raises TemplateError if a template does not compile, or if there is no "default".
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, Any]) -> None:
        environment = _environment()
        self.sources = dict(sources)
        self.variables: frozenset[str] = frozenset()  # all names that the templates read
        self.texts = [*sources.values(), *map(str, special_tokens.values())]  # all text that templates can add
        self._special_tokens = dict(special_tokens)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
                self.variables |= meta.find_undeclared_variables(environment.parse(source))
            except (jinja2.TemplateError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError) as error:
                why = str(error).partition("\n")[0]
                raise TemplateError(f"chat template {name!r} does not compile: {why}") from error
        if "default" not in self._templates:
            raise TemplateError(f"there is no default chat template, only {', '.join(sorted(sources)) or 'none'}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of the prompt. Raises TemplateError, with the template's message, if that refuses the chat.

        chat_template: the name of a template, such as "rag"; None chooses one as described at the class.
        """
        template = self._named(chat_template, variables.get("tools"))
        if any(map(is_system, messages[1:])) and not self._takes_systems_anywhere:
            messages = with_one_system(messages)
        return self._rendered(template, messages, add_generation_prompt=add_generation_prompt, **variables)

    def _rendered(self, template: jinja2.Template, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        known = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return template.render(messages=[for_templates(message) for message in messages], **known)
        except TemplateError:
            raise
        except Exception as error:  # A template is the model author's code: any error concerns this chat only.
            raise TemplateError(f"the chat template failed: {error}") from error

    @cached_property
    def _takes_systems_anywhere(self) -> bool:
        """Whether the default template shows system messages after the first one; found out with a probe chat."""
        probe = (("system", "You"), ("system", LATER), ("user", "Hello"), ("system", LATER), ("user", "Hello"))
        messages = [{"role": role, "content": content} for role, content in probe]
        try:
            shown = self._rendered(self._templates["default"], messages, add_generation_prompt=True)
        except TemplateError:
            return False
        return shown.count(LATER) == 2

    @cached_property
    def kept_reasoning(self) -> KeptReasoning | None:
        """How the default template shows the reasoning of earlier turns; None if it cannot. Found with a probe chat."""
        variables = {name: value for name, value in KEEPING.items() if name in self.variables}
        question, answer = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello"}
        apart = {**answer, "reasoning_content": THOUGHT}
        for message in (apart, in_content(apart, "<think>", "</think>")):
            chat = [question, message, question]
            try:
                shown = self._rendered(self._templates["default"], chat, add_generation_prompt=True, **variables)
            except TemplateError:
                continue
            if THOUGHT in shown:
                return KeptReasoning(variables, message is not apart, self._writes_calls_first())
        return None

    def _writes_calls_first(self) -> bool:
        """Return whether the template for tools writes calls before the content. Found with a probe chat."""
        call = {"id": "1", "type": "function", "function": {"name": CALLED, "arguments": {}}}
        message = {"role": "assistant", "content": THOUGHT, "tool_calls": [call]}
        try:
            shown = self._rendered(
                self._named(None, []), [{"role": "user", "content": "Hello"}, message], add_generation_prompt=False
            )
        except TemplateError:
            return False
        return 0 <= shown.find(CALLED) < shown.find(THOUGHT)

    @cached_property
    def between_parts(self) -> str:
        """The white space that the template puts between two parts of a message's text; "" if it takes only strings."""
        content = [{"type": "text", "text": part} for part in PARTS]
        try:
            shown = self.render([{"role": "user", "content": content}], add_generation_prompt=False)
        except TemplateError:
            return ""
        between, found, _ = shown.partition(PARTS[0])[2].partition(PARTS[1])
        return between if found and not between.strip() else ""

    def render_open(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Return the prompt up to the end of the final message's content, so that the model continues that message.

        As in transformers, white space at the end is removed if the template removes it from contents. Raises
        TemplateError if the template changes the message or does not show it.
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
    """Rewrite a chat for templates that accept one system message only, at the beginning.

    System messages at the beginning are joined into one. Later ones become user messages, and are joined with adjacent
    user messages, because templates may require that roles alternate.
    """
    opening = len(list(takewhile(is_system, messages)))
    later = [{**message, "role": "user"} if is_system(message) else message for message in messages[opening:]]
    both = zip([*messages[:opening], *later], messages, strict=True)
    shown = list[Mapping[str, Any]]()
    for _, run in groupby(both, key=lambda pair: pair[0].get("role")):
        rewritten, originals = zip(*run, strict=True)
        texts = [message.get("content") for message in rewritten]
        # Join only runs that contain a system message: the template may itself handle adjacent messages of one role.
        if any(map(is_system, originals)) and all(isinstance(text, str) for text in texts):
            shown.append({**rewritten[0], "content": "\n\n".join(map(str, texts))})
        else:
            shown += rewritten
    return shown


def is_system(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "system"


def for_templates(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without its null fields, which templates would print as None, and with its reasoning under
    every name that templates use.
    """
    fields = {name: value for name, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in REASONING if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def in_content(message: Mapping[str, Any], begin: str, end: str) -> Mapping[str, Any]:
    """Return a message whose content has its reasoning too, between two markers, as most models write it."""
    reasoning, content = message.get("reasoning_content"), message.get("content")
    if not reasoning or not isinstance(content, str):
        return message
    fields = {name: value for name, value in message.items() if name not in REASONING}
    return {**fields, "content": f"{begin}\n{reasoning}\n{end}\n\n{content}"}


def mark_end(content: str | Sequence[Mapping[str, Any]] | None) -> tuple[str, str | list[Mapping[str, Any]]]:
    """Return the text that is to be continued, and the content with END_OF_FINAL_MESSAGE after that text.

    If the content has several parts, the text is that of the last part with text. Raises TemplateError if none has any.
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


def _environment() -> Sandbox:
    # An optimizer would compute constant expressions while the template is compiled.
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, GenerationTag]
    )
    environment.filters["tojson"] = checked("tojson", _tojson)
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
    """Return plain JSON. Jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)

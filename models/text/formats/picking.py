"""Choice of the formats of reasoning and tool calls that a checkpoint's model writes."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from baton.models.text.formats.content import ToolFormat
from baton.models.text.formats.hermes import GRANITE4, HERMES
from baton.models.text.formats.kimi import KIMI
from baton.models.text.formats.lfm2 import LFM2
from baton.models.text.formats.nemotron_v2 import NEMOTRON_V2
from baton.models.text.formats.qwen3_coder import FUNCTION, QWEN3_CODER
from baton.models.text.formats.thinking import THINK, ReasoningFormat

T = TypeVar("T")
AUTO, NO_PARSER = "auto", "none"

TOOL_FORMATS = {format.name: format for format in (HERMES, QWEN3_CODER, NEMOTRON_V2, GRANITE4, KIMI, LFM2)}
REASONING_FORMATS = {format.name: format for format in (THINK,)}

# Markers that identify the format of calls in a chat template, in order of precedence.
BY_MARKER = (
    (NEMOTRON_V2.begins[0], NEMOTRON_V2),
    (KIMI.begins[0], KIMI),
    (LFM2.begins[0], LFM2),
    (FUNCTION, QWEN3_CODER),
    (HERMES.begins[0], HERMES),
)
# The format of each family (model_type), for chat templates without any marker in BY_MARKER.
BY_FAMILY = {
    "falcon_h1": HERMES,
    "granitemoehybrid": GRANITE4,
    "kimi_linear": KIMI,
    "lfm2": LFM2,
    "lfm2_moe": LFM2,
    "lfm3": LFM2,
    "nemotron_h": QWEN3_CODER,
    "qwen3_5": QWEN3_CODER,
    "qwen3_5_moe": QWEN3_CODER,
    "qwen3_5_moe_text": QWEN3_CODER,
    "qwen3_5_text": QWEN3_CODER,
    "qwen3_next": HERMES,
}


def tool_format(model_type: str, templates: Iterable[str]) -> ToolFormat | None:
    """Return the format whose marker is in the checkpoint's chat templates, else its family's, else None."""
    text = "\n".join(templates)
    own = BY_FAMILY.get(model_type)
    found = next((format for marker, format in BY_MARKER if marker in text), own)
    # Hermes and Granite 4 have the same markers, so a template does not distinguish them, but the family does.
    return own if own and found and own.begins == found.begins else found


def reasoning_format(templates: Iterable[str]) -> ReasoningFormat | None:
    """Return the format of reasoning that has a marker in the checkpoint's chat templates; None if no format has."""
    text = "\n".join(templates)
    return next((format for format in REASONING_FORMATS.values() if format.begin in text or format.end in text), None)


@dataclass(frozen=True)
class OutputFormats:
    """The formats of tool calls and of reasoning that are parsed in a model's output."""

    tools: ToolFormat | None = None  # None: tool calls are not parsed
    reasoning: ReasoningFormat | None = None  # None: reasoning is not parsed

    @property
    def markers(self) -> frozenset[str]:
        """Markers that the output parsers must see as text, even if the tokenizer treats them as special tokens."""
        tools = (*self.tools.begins, *self.tools.within, self.tools.end) if self.tools is not None else ()
        reasoning = (self.reasoning.begin, self.reasoning.end) if self.reasoning is not None else ()
        return frozenset((*tools, *reasoning))

    @property
    def ending(self) -> re.Pattern[str] | None:
        """A pattern for the end of reasoning: its end marker, or the beginning of a call if calls end reasoning too."""
        if self.reasoning is None:
            return None
        call = self.tools.ends_reasoning if self.tools is not None else ()
        begun = [r"\s*".join(map(re.escape, call))] if call else []
        return re.compile("|".join([re.escape(self.reasoning.end), *begun]))


def output_formats(
    model_type: str, templates: Iterable[str], tools: str = AUTO, reasoning: str = AUTO
) -> OutputFormats:
    """Return the formats with these names. "none" stands for no format; "auto" for the one that the checkpoint's chat
    templates or its family indicate.

    Raises ValueError for an unknown name.
    """
    sources = tuple(templates)
    return OutputFormats(
        tool_format(model_type, sources) if tools == AUTO else _named(TOOL_FORMATS, tools),
        reasoning_format(sources) if reasoning == AUTO else _named(REASONING_FORMATS, reasoning),
    )


def _named(formats: Mapping[str, T], name: str) -> T | None:
    if name != NO_PARSER and name not in formats:
        raise ValueError(f"there is no format {name!r}, only {', '.join([AUTO, *formats, NO_PARSER])}")
    return formats.get(name)

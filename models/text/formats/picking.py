"""Which formats a checkpoint's model writes."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from baton.models.text.formats.content import ToolFormat
from baton.models.text.formats.granite4 import GRANITE4
from baton.models.text.formats.hermes import HERMES
from baton.models.text.formats.kimi import KIMI
from baton.models.text.formats.nemotron_v2 import NEMOTRON_V2
from baton.models.text.formats.qwen3_coder import FUNCTION, QWEN3_CODER
from baton.models.text.formats.thinking import THINK, ReasoningFormat

T = TypeVar("T")
AUTO, NO_PARSER = "auto", "none"

TOOL_FORMATS = {format.name: format for format in (HERMES, QWEN3_CODER, NEMOTRON_V2, GRANITE4, KIMI)}
REASONING_FORMATS = {format.name: format for format in (THINK,)}

# What shows in a template which format it is: the first of these that it has.
TELLING = (
    (NEMOTRON_V2.begins[0], NEMOTRON_V2),
    (KIMI.begins[0], KIMI),
    (FUNCTION, QWEN3_CODER),
    (HERMES.begins[0], HERMES),
)
# Of families, where templates do not show it.
OF_FAMILIES = {
    "falcon_h1": HERMES,
    "granitemoehybrid": GRANITE4,
    "kimi_linear": KIMI,
    "nemotron_h": QWEN3_CODER,
    "qwen3_5": QWEN3_CODER,
    "qwen3_5_moe": QWEN3_CODER,
    "qwen3_5_moe_text": QWEN3_CODER,
    "qwen3_5_text": QWEN3_CODER,
    "qwen3_next": HERMES,
}


def tool_format(model_type: str, templates: Iterable[str]) -> ToolFormat | None:
    """By the markers that a checkpoint's chat templates write; if they write none, by family; None if that has none."""
    text = "\n".join(templates)
    own = OF_FAMILIES.get(model_type)
    told = next((format for marker, format in TELLING if marker in text), own)
    return own if own and told and own.begins == told.begins else told


def reasoning_format(templates: Iterable[str]) -> ReasoningFormat | None:
    """The one of whose markers a checkpoint's chat templates know one."""
    text = "\n".join(templates)
    return next((format for format in REASONING_FORMATS.values() if format.begin in text or format.end in text), None)


@dataclass(frozen=True)
class OutputFormats:
    """What is looked for in a model's output; None: nothing of that kind."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def markers(self) -> frozenset[str]:
        """What is text to those who look, also where the tokenizer has a special token for it."""
        tools = (*self.tools.begins, *self.tools.within, self.tools.end) if self.tools is not None else ()
        reasoning = (self.reasoning.begin, self.reasoning.end) if self.reasoning is not None else ()
        return frozenset((*tools, *reasoning))

    @property
    def ending(self) -> re.Pattern[str] | None:
        """Finds the end of reasoning: its marker, or the beginning of a call where that ends it too."""
        if self.reasoning is None:
            return None
        call = self.tools.ends_reasoning if self.tools is not None else ()
        begun = [r"\s*".join(map(re.escape, call))] if call else []
        return re.compile("|".join([re.escape(self.reasoning.end), *begun]))


def output_formats(
    model_type: str, templates: Iterable[str], tools: str = AUTO, reasoning: str = AUTO
) -> OutputFormats:
    """Those that are named, or "none"; "auto": what the checkpoint's templates and its family tell.

    ValueError for a name that is not known.
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

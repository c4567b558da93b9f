"""Which formats a checkpoint's model writes."""

from collections.abc import Iterable

from models.text.formats.content import ToolFormat
from models.text.formats.granite4 import GRANITE4
from models.text.formats.hermes import HERMES
from models.text.formats.nemotron_v2 import NEMOTRON_V2
from models.text.formats.qwen3_coder import FUNCTION, QWEN3_CODER
from models.text.formats.thinking import THINK, ReasoningFormat

TOOL_FORMATS = {format.name: format for format in (HERMES, QWEN3_CODER, NEMOTRON_V2, GRANITE4)}
REASONING_FORMATS = {format.name: format for format in (THINK,)}

# Of families whose templates may leave it open.
OF_FAMILIES = {
    "falcon_h1": HERMES,
    "granitemoehybrid": GRANITE4,
    "nemotron_h": QWEN3_CODER,
    "qwen3_5": QWEN3_CODER,
    "qwen3_5_moe": QWEN3_CODER,
    "qwen3_next": HERMES,
}


def tool_format(model_type: str, templates: Iterable[str]) -> ToolFormat | None:
    """By the markers that a checkpoint's chat templates write; if they write none, by family; None if that has none."""
    text = "\n".join(templates)
    if NEMOTRON_V2.begins[0] in text:
        return NEMOTRON_V2
    if FUNCTION in text:
        return QWEN3_CODER
    own = OF_FAMILIES.get(model_type)
    if HERMES.begins[0] in text and (own is None or own.begins[0] not in HERMES.begins or own is QWEN3_CODER):
        return HERMES
    return own


def reasoning_format(templates: Iterable[str]) -> ReasoningFormat | None:
    """The one whose markers a checkpoint's chat templates know."""
    text = "\n".join(templates)
    return next((format for format in REASONING_FORMATS.values() if format.end in text), None)

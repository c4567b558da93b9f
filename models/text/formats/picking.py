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

# What shows in a template which format it is: the first of these that it has.
TELLING = ((NEMOTRON_V2.begins[0], NEMOTRON_V2), (FUNCTION, QWEN3_CODER), (HERMES.begins[0], HERMES))
# Of families, where templates do not show it.
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
    own = OF_FAMILIES.get(model_type)
    told = next((format for marker, format in TELLING if marker in text), own)
    return own if own and told and own.begins == told.begins else told


def reasoning_format(templates: Iterable[str]) -> ReasoningFormat | None:
    """The one of whose markers a checkpoint's chat templates know one."""
    text = "\n".join(templates)
    return next((format for format in REASONING_FORMATS.values() if format.begin in text or format.end in text), None)

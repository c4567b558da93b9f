"""Tool calls as Granite 4 writes them: the format of Hermes."""

from baton.models.text.formats.json_calls import json_calls

GRANITE4 = json_calls("granite4", "<tool_call>", "</tool_call>")

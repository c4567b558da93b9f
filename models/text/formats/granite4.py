"""Tool calls as Granite 4 writes them: in the same format as Hermes 2 Pro."""

from baton.models.text.formats.json_calls import json_calls

GRANITE4 = json_calls("granite4", "<tool_call>", "</tool_call>")

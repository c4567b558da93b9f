"""Calls as Granite 4 writes them, which is as Hermes does."""

from baton.models.text.formats.json_calls import json_calls

GRANITE4 = json_calls("granite4", "<tool_call>", "</tool_call>")

"""Tool calls as Hermes 2 Pro and Qwen3-Next write them: <tool_call>{"name": …, "arguments": {…}}</tool_call> each."""

from baton.models.text.formats.json_calls import json_calls

HERMES = json_calls("hermes", "<tool_call>", "</tool_call>")

"""Tool calls as Hermes 2 Pro, Qwen3-Next and Granite 4 write them.

Each is <tool_call>{"name": …, "arguments": {…}}</tool_call>.
"""

from baton.models.text.formats.json_calls import json_calls

HERMES = json_calls("hermes", "<tool_call>", "</tool_call>")
GRANITE4 = json_calls("granite4", "<tool_call>", "</tool_call>")

"""Tool calls as Nemotron Nano 2 writes them: <TOOLCALL>[{"name": …, "arguments": {…}}, …]</TOOLCALL>, in one list."""

from baton.models.text.formats.json_calls import json_calls

NEMOTRON_V2 = json_calls("nemotron_v2", "<TOOLCALL>", "</TOOLCALL>", around=("[", "]"), in_list=True)

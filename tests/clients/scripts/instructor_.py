"""instructor: an answer as a typed object, from a named tool, whole and in partial objects."""

import json
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class weather(BaseModel):
    """The city that the question asks about."""

    city: str


client = instructor.from_openai(
    OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0), mode=instructor.Mode.TOOLS
)
fields = {"model": "scripted", "messages": [{"role": "user", "content": "How is the weather in Köln?"}]}
whole = client.chat.completions.create(response_model=weather, max_retries=0, **fields)
# create_partial gives the tool another name, so the answer is not the scripted one. Check only its keys.
parts = list(client.chat.completions.create_partial(response_model=weather, max_retries=0, **fields))
print(json.dumps({"structured": whole.model_dump(), "in parts": list(parts[-1].model_dump())}))

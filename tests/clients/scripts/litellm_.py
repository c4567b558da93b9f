"""litellm: completions with a tool, streamed and not."""

import json
import sys

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def ask(url, messages, stream):
    fields = {"model": "openai/scripted", "api_base": f"{url}/v1", "api_key": "none", "tools": [TOOL]}
    answer = litellm.completion(messages=messages, stream=stream, num_retries=0, **fields)
    return litellm.stream_chunk_builder(list(answer), messages=messages) if stream else answer


def converse(url, stream):
    messages = [{"role": "user", "content": "How is the weather in Köln?"}]
    outputs = []
    while True:
        choice = ask(url, messages, stream).choices[0]
        messages.append(choice.message)
        if choice.finish_reason != "tool_calls":
            return [*outputs, choice.message.content]
        for call in choice.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            outputs.append([call.function.name, arguments])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"rain in {arguments['city']}"})


print(json.dumps({"chat": converse(sys.argv[1], False), "chat streamed": converse(sys.argv[1], True)}))

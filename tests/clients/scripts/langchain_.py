"""langchain-openai: bind_tools over both APIs, streamed and not, and with_structured_output."""

import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def weather(city: str) -> str:
    """Report the weather in a city."""
    return f"rain in {city}"


class Weather(BaseModel):
    """The city that the question asks about."""

    model_config = {"title": "weather"}
    city: str


def ask(llm, messages, stream):
    if not stream:
        return llm.invoke(messages)
    pieces = list(llm.stream(messages))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole += piece
    return whole


def converse(url, responses, stream):
    llm = ChatOpenAI(
        model="scripted", base_url=f"{url}/v1", api_key="none", max_retries=0, use_responses_api=responses
    ).bind_tools([weather])
    messages = [HumanMessage("How is the weather in Köln?")]
    outputs = []
    while True:
        answer = ask(llm, messages, stream)
        messages.append(answer)
        if not answer.tool_calls:
            return [*outputs, answer.text]
        for call in answer.tool_calls:
            outputs.append([call["name"], call["args"]])
            messages.append(ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]))


def structured(url, **method):
    llm = ChatOpenAI(model="scripted", base_url=f"{url}/v1", api_key="none", max_retries=0)
    return llm.with_structured_output(Weather, **method).invoke("How is the weather in Köln?").model_dump()


url = sys.argv[1]
outputs = {
    f"{'responses' if responses else 'chat'}{' streamed' if stream else ''}": converse(url, responses, stream)
    for responses in (False, True)
    for stream in (False, True)
}
outputs["structured"] = structured(url, method="function_calling")
# The default method forces an answer by a JSON schema, which is not the scripted answer. Check only its keys.
outputs["by schema"] = list(structured(url))
print(json.dumps(outputs))

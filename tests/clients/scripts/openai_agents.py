"""openai-agents: an agent with a tool, over both APIs, streamed and not."""

import asyncio
import json
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

calls = []


@function_tool
def weather(city: str) -> str:
    """Report the weather in a city."""
    calls.append(["weather", {"city": city}])
    return f"rain in {city}"


async def run(model, stream):
    calls.clear()
    agent = Agent(name="guide", instructions="You help.", tools=[weather], model=model)
    question = "How is the weather in Köln?"
    if stream:
        result = Runner.run_streamed(agent, question)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, question)
    return [*calls, result.final_output]


async def main(url):
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        kinds = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
        outputs = {}
        for name, kind in kinds.items():
            for stream in (False, True):
                model = kind(model="scripted", openai_client=client)
                outputs[f"{name}{' streamed' if stream else ''}"] = await run(model, stream)
    print(json.dumps(outputs))


asyncio.run(main(sys.argv[1]))

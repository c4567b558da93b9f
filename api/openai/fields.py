"""OpenAI's fields that completions and chat completions ignore, and those that they refuse."""

from msgspec import Struct

from baton.api.parsing import Unsupported

IGNORED = frozenset(
    {
        "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_retention", "prompt_cache_options",
        "parallel_tool_calls", "prediction", "verbosity",
    }
)  # fmt: skip

# Refused, except with these values, which ask for nothing.
UNSUPPORTED: Unsupported = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "store": (False,),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "use_beam_search": (False,),
    "suffix": ("",),
}


class StreamOptions(Struct):
    """Options of a stream."""

    include_usage: bool = False  # one more chunk at the end, with the token counts
    continuous_usage_stats: bool = False  # vLLM's: token counts in every chunk

"""OpenAI's fields that completions and chat completions ignore, and those that they refuse."""

from msgspec import Struct

from baton.api.parsing import Unsupported

IGNORED = frozenset(
    {
        "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_retention", "prompt_cache_options",
        "parallel_tool_calls", "prediction", "verbosity",
    }
)  # fmt: skip

# Fields that are refused, except with the values listed here, which have no effect.
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
    """The field stream_options."""

    include_usage: bool = False  # one more chunk at the end, with the token counts
    continuous_usage_stats: bool = False  # vLLM's option: token counts in every chunk

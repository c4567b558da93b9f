"""Fields that both OpenAI endpoints know: those that may be ignored, and those that must be refused."""

from msgspec import Struct

from baton.api.parsing import Unsupported

IGNORED = frozenset(
    {
        "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_retention", "prompt_cache_options",
        "parallel_tool_calls", "prediction", "verbosity",
    }
)  # fmt: skip

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
    """include_usage: a last chunk with the counts; continuous_usage_stats (vLLM's): counts in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False

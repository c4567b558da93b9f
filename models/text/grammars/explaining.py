"""llguidance's error messages, in words for clients."""

import re

# llguidance's messages, and what each means for the author of the grammar.
MEANINGS = (
    (
        r"Current row has (\d+) items; max is \d+",
        r"more continuations are possible at one place than are supported (\1)",
    ),
    (r"Too many items \(limit", "its rules never end, or are too many"),
    (r"too many expressions|too many states|fuel", "its regular expressions are too complex"),
    (r"NoExtension", "nothing can follow there"),
)
NOT_VERBOSE = "<non-verbose/>"


def explained(message: str) -> str:
    """Return an error message of llguidance in words for clients, or unchanged if it has no known meaning."""
    for pattern, meaning in MEANINGS:
        if found := re.search(pattern, message):
            return found.expand(meaning)
    return message.replace(NOT_VERBOSE, "").strip()

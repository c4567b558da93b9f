"""Incremental detokenization with a bounded window."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes, so at most 3 further tokens complete a character that a token has begun.
MAX_HELD = 3
# New tokens are decoded with a window of recent tokens. Above WINDOW tokens, it is cut back to about CONTEXT.
WINDOW = 16
CONTEXT = 8
# At most this many tokens from the end of the prompt are used as context.
PROMPT = 64


class Detokenizer:
    """A converter from a stream of tokens to text, which is returned as soon as it can no longer change.

    The tokenizer's `decode` need not be additive: it may drop leading spaces, and several tokens' bytes may form one
    character. So new tokens are decoded together with a window of earlier tokens; at first, the window is the end of
    the prompt. A character of which only some bytes have arrived is held back for at most MAX_HELD further tokens. The
    work per token does not depend on the length of the stream. For well-formed text, all pushes and the flush together
    return decode(prompt + output) without decode(prompt) at its beginning. A character that the prompt begins and the
    output completes belongs to the output.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_tail: Sequence[int]) -> None:
        self._decode = decode
        tail = list(prompt_tail[-PROMPT:])
        begun = next((n for n in range(MAX_HELD + 1) if not decode(tail[: len(tail) - n]).endswith(REPLACEMENT)), 0)
        whole = self._start(tail[: len(tail) - begun])
        self._window = whole + tail[len(tail) - begun :]
        # Index in the window: tokens from here on make the newest text, and those before it end with a whole character.
        self._whole = len(whole)
        # The part of decode(window) that has been shown. It is `_sure`, followed by U+FFFD only, which later tokens may
        # turn into characters.
        self._seen = decode(self._window)
        self._sure = max(decode(whole), self._seen.rstrip(REPLACEMENT), key=len)
        self._held = 0  # number of tokens that are held back as an incomplete character

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens and return the new text that is safe to show."""
        return "".join([self._push(token) for token in ids])

    def flush(self) -> str:
        """End the stream, and return the text that was held back: an unfinished character becomes U+FFFD."""
        text = self._decode(self._window)
        new = text[len(self._seen) :] if text.startswith(self._seen) else REPLACEMENT
        self._seen = text
        return new

    def _start(self, tail: list[int]) -> list[int]:
        """Return the last tokens of the prompt: enough to have text, beginning between two characters if possible."""
        size = CONTEXT
        while size < len(tail) and not self._decode(tail[-size:]):
            size *= 2
        for length in range(size, size + MAX_HELD + 1):
            if not self._decode(tail[-length:]).startswith(REPLACEMENT):
                return tail[-length:]
        return tail[-size:]

    def _push(self, token: int) -> str:
        """Add one token, and return the new text that is safe to show."""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._show_all(text)
        self._held += 1
        decided = text.rstrip(REPLACEMENT)
        if decided.startswith(self._sure) and len(decided) > self._shown(decided):
            # The token completes a character and begins another: show the first, and hold back the second.
            self._held = 1
            return self._show(text, len(decided))
        if self._held <= MAX_HELD:
            return ""
        # The held bytes are not a character. The last byte may begin one, so it stays held back for further tokens.
        self._held = 1
        if not text.startswith(self._seen):
            # One wrong byte makes byte-fallback decoders replace all characters in a run of bytes, even shown ones.
            self._seen = text
            self._cut(text)
            return REPLACEMENT
        return self._show(text, max(len(text) - 1, len(self._seen)))

    def _show_all(self, text: str) -> str:
        """Show everything, since the window ends with a whole character, and drop old tokens if the window is long."""
        new = text[self._shown(text) :]
        self._held = 0
        if not new and text:
            # A token without text, such as a special token, is useless as context.
            self._window.pop()
            return new
        self._sure = self._seen = text
        if len(self._window) > WINDOW:
            # Keep the tokens of the newest text. They begin between characters and have text, so bytes and spaces
            # decode as before.
            self._window = self._window[self._whole :] if new else self._window[-CONTEXT:]
            self._sure = self._seen = self._decode(self._window)
        self._whole = len(self._window)
        return new

    def _shown(self, text: str) -> int:
        """Return the length of the shown part of `text`. A U+FFFD that has become a character counts as not shown."""
        revised = not text.startswith(self._seen) and text.startswith(self._sure)
        return len(self._sure if revised else self._seen)

    def _show(self, text: str, end: int) -> str:
        """Show text[:end] of the window's text, and hold back the rest."""
        new = text[self._shown(text[:end]) : end]
        self._seen = text[:end]
        if not self._seen.endswith(REPLACEMENT):
            self._sure = self._seen
        self._cut(text)
        return new

    def _cut(self, text: str) -> None:
        """Shorten a long window that ends inside a character. Text that is held back stays held back."""
        if len(self._window) <= WINDOW:
            return
        held = len(text) - len(self._seen)
        self._window = self._window[-CONTEXT:]
        text = self._decode(self._window)
        self._sure = self._seen = text[: max(0, len(text) - held)]
        self._whole = 0

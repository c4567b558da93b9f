"""Incremental detokenization with a bounded window."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes, so at most 3 tokens can follow the one that began it.
MAX_HELD = 3
# A window longer than this is cut back to its end; the tokens kept before new ones are the context of their decoding.
WINDOW = 16
CONTEXT = 8
# Of the prompt at most this many tokens are looked at.
PROMPT = 64


class Detokenizer:
    """Text of a stream of tokens, shown as soon as it can no longer change.

    `decode` is the tokenizer's; it need not be additive (leading spaces are dropped, bytes make characters together),
    so new tokens are decoded behind a few that were shown before: the end of the prompt at first. A character of which
    only some bytes have come is held back for at most MAX_HELD further tokens. Work per token does not depend on the
    length of the stream. For well-formed text all pushes and the flush give decode(prompt + output) less
    decode(prompt); a character begun by the prompt and completed by the output belongs to the output.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_tail: Sequence[int]) -> None:
        self._decode = decode
        tail = list(prompt_tail[-PROMPT:])
        begun = next((n for n in range(MAX_HELD + 1) if not decode(tail[: len(tail) - n]).endswith(REPLACEMENT)), 0)
        whole = self._start(tail[: len(tail) - begun])
        self._window = whole + tail[len(tail) - begun :]
        # Where in the window the last whole character ended before the newest text.
        self._whole = len(whole)
        # What of decode(window) counts as shown: beyond `_sure` it is only U+FFFD.
        self._seen = decode(self._window)
        self._sure = max(decode(whole), self._seen.rstrip(REPLACEMENT), key=len)
        self._held = 0

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens and return the new text that is safe to show."""
        return "".join([self._push(token) for token in ids])

    def flush(self) -> str:
        """What was held back, at the end of the stream: an unfinished character becomes U+FFFD."""
        text = self._decode(self._window)
        new = text[len(self._seen) :] if text.startswith(self._seen) else REPLACEMENT
        self._seen = text
        return new

    def _start(self, tail: list[int]) -> list[int]:
        """The end of the prompt, long enough to have text, beginning between characters if that can be helped."""
        size = CONTEXT
        while size < len(tail) and not self._decode(tail[-size:]):
            size *= 2
        for length in range(size, size + MAX_HELD + 1):
            if not self._decode(tail[-length:]).startswith(REPLACEMENT):
                return tail[-length:]
        return tail[-size:]

    def _push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._show_all(text)
        self._held += 1
        decided = text.rstrip(REPLACEMENT)
        if decided.startswith(self._sure) and len(decided) > self._shown(decided):
            self._held = 1
            return self._show(text, len(decided))
        if self._held <= MAX_HELD:
            return ""
        # These bytes are no character. The last may begin one, so it waits for its next tokens.
        self._held = 1
        if not text.startswith(self._seen):
            # Byte-fallback decoders void the characters of a whole run of bytes when one is wrong.
            self._seen = text
            self._cut(text)
            return REPLACEMENT
        return self._show(text, max(len(text) - 1, len(self._seen)))

    def _show_all(self, text: str) -> str:
        """The window ends in a whole character: show everything, and drop older tokens now and then."""
        new = text[self._shown(text) :]
        self._held = 0
        if not new and text:
            # A token without text, like a special one: as context it would be useless.
            self._window.pop()
            return new
        self._sure = self._seen = text
        if len(self._window) > WINDOW:
            # From a place between characters, and with text in it: bytes and spaces decode as they did.
            self._window = self._window[self._whole :] if new else self._window[-CONTEXT:]
            self._sure = self._seen = self._decode(self._window)
        self._whole = len(self._window)
        return new

    def _shown(self, text: str) -> int:
        """How much of `text` counts as shown. What was shown as U+FFFD may have become a character: then it is new."""
        revised = not text.startswith(self._seen) and text.startswith(self._sure)
        return len(self._sure if revised else self._seen)

    def _show(self, text: str, end: int) -> str:
        new = text[self._shown(text[:end]) : end]
        self._seen = text[:end]
        if not self._seen.endswith(REPLACEMENT):
            self._sure = self._seen
        self._cut(text)
        return new

    def _cut(self, text: str) -> None:
        """Bound a window that never ends in a whole character; what is held back stays held back."""
        if len(self._window) <= WINDOW:
            return
        held = len(text) - len(self._seen)
        self._window = self._window[-CONTEXT:]
        text = self._decode(self._window)
        self._sure = self._seen = text[: max(0, len(text) - held)]
        self._whole = 0

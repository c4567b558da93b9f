"""The error of a grammar."""


class GrammarError(Exception):
    """An error in compiling or matching a grammar; the message is for the client and says what is wrong."""

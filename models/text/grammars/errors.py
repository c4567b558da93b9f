"""The errors of a grammar."""


class GrammarError(Exception):
    """An error in compiling or matching a grammar; the message is for the client and says what is wrong."""


class ForbiddenToken(GrammarError):
    """A token that the grammar does not allow was drawn: an error of the server, not of the grammar."""

"""The errors of a grammar."""


class GrammarError(Exception):
    """An error in compiling or matching a grammar; the message is for the client and says what is wrong."""


class ForbiddenToken(GrammarError):
    """A token that the grammar does not allow was drawn: an error of the server, not of the grammar."""


class TooManyItems(GrammarError):
    """A point of an output at which the parser would have too much to do. Other outputs need not reach it."""

"""How a planted bug changes classes and modules, and a check that the bug still fits the code that it changes."""

import builtins
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import Parameter, signature
from types import FunctionType
from typing import Any
from unittest import mock

# Patch(owner, attribute, value) sets the attribute until the bug is removed.
Patch = Callable[[Any, str, Any], None]


class OutOfDate(Exception):
    """A planted bug whose replacement cannot be called like the function that it replaces."""


@contextmanager
def planting(bug: Callable[[Patch], None]) -> Iterator[None]:
    """Plant a bug while the block runs. Raises OutOfDate, or AttributeError for an attribute that does not exist.

    A bug may add an attribute to a module if it has the name of a builtin, which the module then uses instead.
    """
    with ExitStack() as patches:

        def patch(owner: Any, attribute: str, value: Any) -> None:
            check_call(getattr(owner, attribute, None), value, f"{owner.__name__}.{attribute}")
            is_builtin = hasattr(builtins, attribute)
            patches.enter_context(mock.patch.object(owner, attribute, value, create=is_builtin))

        bug(patch)
        yield


def check_call(original: Any, replacement: Any, name: str) -> None:
    """Raise OutOfDate if the replacement of a function refuses arguments that the function takes.

    All arguments are tried, and those without defaults. Otherwise the simulator would find a TypeError and not the
    planted fault.
    """
    if not isinstance(original, FunctionType):
        return
    kinds = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
    parameters = [each for each in signature(original).parameters.values() if each.kind not in kinds]
    for used in (parameters, [each for each in parameters if each.default is Parameter.empty]):
        places = [None for each in used if each.kind is not Parameter.KEYWORD_ONLY]
        names = {each.name: None for each in used if each.kind is Parameter.KEYWORD_ONLY}
        try:
            signature(replacement).bind(*places, **names)
        except TypeError as error:
            raise OutOfDate(f"the replacement of {name} cannot be called like it: {error}") from None

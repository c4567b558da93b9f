"""The sandbox in which chat templates are rendered: no common operation may take much memory or time.

A template is stopped at its time limit, but only between two operations of Python. So an operation whose result is as
large as an argument says, or a multiple of its operands, is checked before it is computed. Many values that are each
below the limits can still take memory, and so can the text of nested lists that contain one list several times.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial, wraps
from itertools import chain
from string import Formatter
from typing import Any

from jinja2 import nodes, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Environment
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_BASE, MOST_EXPONENT = 2**64, 64  # largest operands of **
MOST_ITEMS = 1 << 26
"""The most characters of a text, and items of a list, that one operation makes."""
MOST_LINES = 1 << 20  # lines that `tojson` is assumed to indent: its value is not text. Also a factor for `round`
MOST_BITS = 1 << 16  # maximum bits of a product of integers
NUMBERS = (int, float)
CONVERSION = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d+)?(?:\.(\*|\d+))?[hlL]?(.)", re.DOTALL)
"""A conversion in a format of the operator %: its width, its precision and its type."""
SIZE = re.compile(r"\d+|\{")
"""A width or precision in a field of str.format; a brace if it is an argument."""
parse = Formatter().parse
PADDING = frozenset({"batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "tojson", "zfill"})
"""Methods of texts, and filters, whose result is as large as an argument says."""
FORBIDDEN = frozenset({"encode", "to_bytes", "translate"})
"""Methods that make large values and that no template needs."""


class TemplateError(ValueError):
    """An error in rendering a chat; the message says why."""


class Generator(CodeGenerator):
    """A compiler of templates in which the operator ~ joins texts with the sandbox's `concat`."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox that raises TemplateError instead of making a value that is too large."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})
    code_generator_class = Generator

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # The filter `format` is the operator %, not str.format.
        self.filters = {name: checked("%" if name == "format" else name, work) for name, work in self.filters.items()}
        self.filters["join"] = join_values

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in FORBIDDEN and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) <= MOST_BASE and abs(right) <= MOST_EXPONENT):
            raise TemplateError(f"{left} ** {right} is too large")
        if operator == "*" and not (isinstance(left, NUMBERS) and isinstance(right, NUMBERS)):
            sequence, times = (left, right) if isinstance(right, int) else (right, left)
            check_size(len(sequence) * times)
        if operator == "*" and isinstance(left, int) and isinstance(right, int):
            check_size(left.bit_length() + right.bit_length(), MOST_BITS)
        if operator == "%" and isinstance(left, str):
            check("%", left, right if isinstance(right, tuple) else [right], {})
        if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    # The names of the first parameters are jinja's: a template may pass arguments with any other name.
    def call(__self, __context: Context, __obj: Any, *arguments: Any, **options: Any) -> Any:
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            check(name, owner, arguments, options)
            __obj = partial(join_texts, owner) if name == "join" else __obj
        return super().call(__context, __obj, *arguments, **options)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a safe form of str.format and str.format_map; None for other values."""
        work = super().wrap_str_format(value)
        return checked(value.__name__, work, value.__self__) if work is not None else None

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the parts of a text, such as everything that a template writes."""
        found, size = list[str](), 0
        for part in parts:
            size += len(part)
            check_size(size)
            found.append(part)
        return "".join(found)


def checked(name: str, work: Callable[..., Any], *owner: str) -> Callable[..., Any]:
    """Return a filter, or a method of a text, that checks its value and its arguments first.

    owner: the method's text
    """
    skipped = int(hasattr(work, "jinja_pass_arg"))  # Jinja passes the environment or a context before the value.

    @wraps(work)
    def run(*arguments: Any, **options: Any) -> Any:
        values = [*owner, *arguments[skipped:]]
        check(name, values[0], values[1:], options)
        return work(*arguments, **options)

    return run


def check(name: str, value: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raise TemplateError if a text's method, a filter or the operator % would make a value that is too large."""
    others = (*arguments, *options.values())
    if name in ("%", "format", "format_map"):
        check_format(str(value), conversions if name == "%" else fields, others)
    elif name == "replace" and len(others) > 1:
        old, new = (*arguments, *(options[name] for name in ("old", "new") if name in options))[:2]
        check_size(len(str(value)) + str(value).count(str(old)) * len(str(new)))
    elif name == "wordwrap":
        check_size(len(str(value)) * max((len(other) for other in others if isinstance(other, str)), default=1))
    elif name == "sum" and any(isinstance(other, Sized) for other in (*arguments[1:], options.get("start"))):
        raise TemplateError("a sum that begins with no number may be too large")
    elif name in PADDING:
        times = 1 + value.count("\n") + value.count("\t") if isinstance(value, str) else 1
        for width in others:
            if isinstance(width, int | str):
                size = width if isinstance(width, int) else len(width)
                check_size(size * (MOST_LINES if name in ("round", "tojson") else times))


def check_format(text: str, parts: Callable[[str], Iterable[list[str]]], arguments: Sequence[Any]) -> None:
    """Raise TemplateError if a format could make a value that is too large.

    parts: returns the widths and precisions of each part of a format that takes an argument
    """
    values = chain(arguments, *(argument.values() for argument in arguments if isinstance(argument, dict)))
    longest = max((len(value) for value in values if isinstance(value, str)), default=0)
    size = len(text)
    for sizes in parts(text):
        if not all(map(str.isdigit, sizes)):
            raise TemplateError("a format whose width is an argument may be too large")
        size += longest + sum(map(int, sizes))
        check_size(size)


def conversions(text: str) -> Iterator[list[str]]:
    """Yield the widths and precisions of each conversion in a format of the operator %."""
    for width, precision, kind in CONVERSION.findall(text):
        if kind != "%":
            yield [size for size in (width, precision) if size]


def fields(text: str) -> Iterator[list[str]]:
    """Yield the widths and precisions of each field in a format of str.format."""
    for _, name, form, _ in parse(text):
        if name is not None:
            yield SIZE.findall(form or "")


def check_size(size: int, most: int = MOST_ITEMS) -> None:
    """Raise TemplateError if a size in characters, items or bits exceeds `most`."""
    if size > most:
        raise TemplateError(f"a value of more than {most} characters, items or bits is too large")


def join_texts(separator: str, texts: Iterable[str]) -> str:
    """Do what str.join does."""

    def parts() -> Iterator[str]:
        for number, text in enumerate(texts):
            if number:
                yield separator
            yield text

    return Sandbox.concat(parts())


@pass_environment
def join_values(environment: Environment, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    """Do what Jinja's filter `join` does."""
    values = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return join_texts(str(d), map(str, values))

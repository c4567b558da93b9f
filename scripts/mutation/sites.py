"""Sites: the places of a Python file at which a small change of the text makes a fault."""

import ast
import random
import re
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<", "<=", ">="),
    ast.LtE: ("<=", "<", ">"),
    ast.Gt: (">", ">=", "<="),
    ast.GtE: (">=", ">", "<"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Pow: ("**", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
    ast.BitXor: ("^", "|"),
}
TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}
MAKERS = ("__init__", "__post_init__")


@dataclass(frozen=True, slots=True, order=True)
class Change:
    """A replacement of bytes [start, end) of a file."""

    start: int
    end: int
    text: str  # the new text


@dataclass(frozen=True, slots=True)
class Site:
    """A place in a file that can get a fault, and changes of its text. Each change makes one fault."""

    file: Path
    function: str  # the outermost function around the place; empty outside of functions
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault in a file."""

    file: Path
    function: str  # the outermost function around the fault; empty outside of functions
    line: int  # number of the changed line
    before: str  # the line without the fault
    after: str  # the line with the fault
    source: bytes  # the whole file with the fault

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.before}  →  {self.after}"


def draw_mutants(root: Path, pattern: str, count: int, seed: int) -> list[Mutant]:
    """Draw `count` sites, all equally likely, from the files that match a pattern, and one change at each site."""
    files = sorted(path for path in root.glob(pattern) if path.suffix == ".py")
    sites = [site for file in files for site in find_sites(file.relative_to(root), file.read_bytes())]
    rng = random.Random(seed)
    chosen = rng.sample(sites, min(count, len(sites)))
    return [make_mutant(site, rng.choice(site.changes), (root / site.file).read_bytes()) for site in chosen]


def make_mutant(site: Site, change: Change, source: bytes) -> Mutant:
    """Return the fault that a change makes in the text `source` of a file."""
    new = source[: change.start] + change.text.encode() + source[change.end :]
    begin = source.rfind(b"\n", 0, change.start) + 1
    line = source.count(b"\n", 0, begin) + 1
    return Mutant(site.file, site.function, line, _line_at(source, begin), _line_at(new, begin), new)


def _line_at(source: bytes, begin: int) -> str:
    return source[begin:].partition(b"\n")[0].decode().strip()


def find_sites(file: Path, source: bytes) -> list[Site]:
    """Return all sites of a file."""
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return finder.sites


class _Finder(ast.NodeVisitor):
    """A visitor that collects sites. It skips code whose faults do not matter.

    Such code is annotations, error messages, logs and assertions.
    """

    def __init__(self, file: Path, source: bytes) -> None:
        self.sites: list[Site] = []
        self._file, self._source = file, source
        self._classes: list[str] = []
        self._function = ""
        self._starts = [0]
        for line in source.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    # Nodes that may contain sites

    def visit_Module(self, node: ast.Module | ast.ClassDef) -> None:
        for child in node.body:
            self.visit(child)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._classes.append(node.name)
        self.visit_Module(node)
        self._classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name != "__repr__":
            outer = self._function
            self._function = outer or ".".join([*self._classes, node.name])
            for child in [*node.args.defaults, *(default for default in node.args.kw_defaults if default), *node.body]:
                self.visit(child)
            self._function = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and ast.unparse(node.annotation) != "TypeAlias":
            self.visit(node.value)

    def skip(self, node: ast.AST) -> None:
        pass

    visit_Assert = visit_Raise = visit_JoinedStr = skip

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":
            self.visit(node.value)

    # Expressions that can be changed

    def visit_If(self, node: ast.If | ast.IfExp | ast.While) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self._negate(node.test)
            self.generic_visit(node)

    visit_IfExp = visit_While = visit_If

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._negate(condition)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for op, left, right in zip(node.ops, operands, operands[1:], strict=False):
            old, *new = COMPARISONS[type(op)]
            self._replace_between(left, right, old, new)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._replace_between(left, right, old, [new])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        old, new = OPERATORS[type(node.op)]
        self._replace_between(node.left, node.right, old, [new])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start, _ = self._span(node)
            self._add(start, start + len("not "), "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(*self._span(node), str(not node.value))
        elif isinstance(node.value, int | float):
            start, end = self._span(node)
            value, octal = node.value + 1, self._source[start:end].startswith(b"0o")
            self._add(start, end, oct(value) if octal and isinstance(value, int) else str(value))

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in TWINS:
            self._add(*self._span(node.func), TWINS[node.func.id])
        self.generic_visit(node)

    # Statements that can be left out

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call | ast.Await) and not self._logs(node):
            self._leave_out(node)
            self.generic_visit(node)
        elif isinstance(node.value, ast.Yield | ast.YieldFrom):
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Leave out assignments to attributes, except in constructors: a missing attribute is found too easily."""
        updates = any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
        if updates and self._function and not self._function.endswith(MAKERS):
            self._leave_out(node)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        old, new = OPERATORS[type(node.op)]
        self._leave_out(node)
        self._replace_between(node.target, node.value, f"{old}=", [f"{new}="])
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._leave_out(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self._leave_out(node)
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue | ast.Break) -> None:
        self._leave_out(node)

    visit_Break = visit_Continue

    # Positions

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _negate(self, condition: ast.expr) -> None:
        """Negate a condition that is not a comparison. In comparisons, the operators are changed (visit_Compare)."""
        if isinstance(condition, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            start, _ = self._span(condition)
            self._add(start, start, "not ")

    def _leave_out(self, node: ast.stmt) -> None:
        self._add(*self._span(node), "pass")

    def _replace_between(self, left: ast.expr, right: ast.expr, old: str, new: list[str]) -> None:
        begin, end = self._span(left)[1], self._span(right)[0]
        found = re.search(re.escape(old.encode()).replace(rb"\ ", rb"\s+"), self._source[begin:end])
        assert found is not None
        self._add(begin + found.start(), begin + found.end(), *new)

    def _add(self, start: int, end: int, *texts: str) -> None:
        changes = tuple(Change(start, end, text) for text in texts)
        self.sites.append(Site(self._file, self._function, changes))

    def _logs(self, node: ast.Expr) -> bool:
        return re.match(r"(structlog\.get_logger\(\)|log)\.", ast.unparse(node)) is not None

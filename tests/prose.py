"""Count the turns of phrase that docs/style.md avoids: `python -m tests.prose [PATH ...]` lists them, file by file.

Read are docstrings, comments, sentences in strings, Markdown outside of code, and the names of variables.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PATTERNS = {
    "begins without a noun": re.compile(
        r"(?:^|[.!?:] )(?:Of|By(?! default)|What|Whatever|Those|Who|Whose|Whoever|Beyond|Behind)\b(?![^.]*\?)"
    ),
    "who": re.compile(r"\b(?:who|whom|whoever|nobody|somebody|no one)\b", re.IGNORECASE),
    "behind": re.compile(r"\bbehind\b", re.IGNORECASE),
    "beside": re.compile(r"\bbesides?\b", re.IGNORECASE),
    "anew": re.compile(r"\banew\b", re.IGNORECASE),
    "go on from": re.compile(r"\b(?:go(?:es|ing|ne)?|went) on from\b", re.IGNORECASE),
    "at hand": re.compile(r"\bat hand\b", re.IGNORECASE),
    "told": re.compile(r"\b(?:told|tells?|telling)\b", re.IGNORECASE),
    "has to go": re.compile(r"\b(?:has|have|had) to go\b", re.IGNORECASE),
    "apart": re.compile(r"\b(?:lie|lies|lay|lying|stand) apart\b", re.IGNORECASE),
    "so many": re.compile(r"\b(?:of|with|after|in) so many\b", re.IGNORECASE),
}
ANY = re.compile("|".join(pattern.pattern for pattern in PATTERNS.values()), re.IGNORECASE)
# Strings here are inputs of a model, not prose.
INPUTS = ("tests", "scripts/demo")
PARTICIPLES = {"asked", "given", "kept", "said", "taken", "told", "wanted"}
CODE_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|<!--.*?-->", re.DOTALL)
COMMENT = re.compile(r"(?:^\s*|\s\s)# (.*)")
LEAST_WORDS = 4


class Place(NamedTuple):
    file: Path
    line: int
    pattern: str
    text: str


def files(paths: Iterable[str] = ()) -> list[Path]:
    """Return the files of the repository below `paths`, or all of them."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    own = Path(__file__).resolve()
    found = [ROOT / name for name in listed.stdout.splitlines()]
    return [file for file in found if file.is_file() and file != own]


def places(file: Path) -> Iterator[Place]:
    """Yield every place in `file` that a pattern matches, and every name that is a participle."""
    for line, text in passages(file):
        prose = re.sub(r"`[^`]*`", "", " ".join(text.split()))
        if ANY.search(prose) is None:
            continue
        for name, pattern in PATTERNS.items():
            for _ in pattern.finditer(prose):
                yield Place(file, line, name, prose)
    if is_python(file):
        for line, name in variables(ast.parse(file.read_text(encoding="utf-8"))):
            if name in PARTICIPLES:
                yield Place(file, line, "participle as a name", name)


def passages(file: Path) -> Iterator[tuple[int, str]]:
    """Yield each piece of prose in a file with the number of its first line."""
    if file.suffix == ".md":
        yield from paragraphs(file.read_text(encoding="utf-8"))
    elif is_python(file):
        source = file.read_text(encoding="utf-8")
        has_inputs = any(file.is_relative_to(ROOT / folder) for folder in INPUTS)
        yield from strings(ast.parse(source), docstrings_only=has_inputs)
        yield from comments(source)
    elif file.suffix in (".cpp", ".h", ".js", ".css", ".html"):
        source = file.read_text(encoding="utf-8")
        for match in CODE_COMMENT.finditer(source):
            yield source.count("\n", 0, match.start()) + 1, match[0].strip("/*<!->\n ")


def is_python(file: Path) -> bool:
    if file.suffix == ".py":
        return True
    if file.suffix or not file.is_relative_to(ROOT / "scripts"):
        return False
    with file.open("rb") as opened:
        return b"python" in opened.readline()


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a Markdown document that are not code."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield number, line.lstrip("-*#>| 0123456789.")


def strings(tree: ast.Module, docstrings_only: bool) -> Iterator[tuple[int, str]]:
    """Yield docstrings, and unless `docstrings_only` all other strings that are sentences."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_sentence = not docstrings_only and len(node.value.split()) >= LEAST_WORDS
            if id(node) in docstrings or is_sentence:
                yield node.lineno, node.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments; those on adjacent lines are one piece.

    Found by their form: reading Python's tokens takes ten times as long.
    """
    first, lines = 0, list[str]()
    for number, line in enumerate([*source.splitlines(), ""], 1):
        match = COMMENT.search(line)
        if match is None and lines:
            yield first, " ".join(lines)
            lines = []
        elif match is not None:
            first = first if lines else number
            lines.append(match[1])


def variables(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield every name that is assigned to, and every parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def counts(paths: Iterable[str] = ()) -> Counter[str]:
    """Count how often each pattern occurs below `paths`."""
    return Counter(place.pattern for file in files(paths) for place in places(file))


def main() -> None:
    total: Counter[str] = Counter()
    for file in files(sys.argv[1:]):
        for place in sorted(places(file), key=lambda place: place.line):
            total[place.pattern] += 1
            print(f"{place.file.relative_to(ROOT)}:{place.line}: {place.pattern}: {place.text[:100]}")
    print(total.total(), dict(total.most_common()))


if __name__ == "__main__":
    main()

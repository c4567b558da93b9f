"""The rules of the repository: imports go one way, unique names, small files, plain prose, documents that are true."""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import prose

ROOT = Path(__file__).parents[1]
PACKAGES = ("api", "actors", "models", "kernels")
DOCS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
MAX_FILES = 16
MAX_LINES = 450
MAX_CORE_LINES = 5740
WRITTEN = (".py", ".html", ".css", ".js", ".cpp", ".h")
# How often each pattern of tests/prose.py may still occur. One is also the name of an exam of the bundled model.
PROSE = {"told": 3}
# Names that every family defines in its own file.
OF_FAMILIES = {"Backbone", "Block"}
FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)(?::([\w.]+))?(?: [^`]*)?`")


@cache
def modules() -> dict[str, Path]:
    """Return every module by its dotted name without `baton.`; a package is named after its folder."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    return {name_of(file): file for file in files}


def name_of(file: Path) -> str:
    """Return the dotted name of a module without the leading `baton.`."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """Return the module's folder, as "package.folder"; a file at the package's top level counts as a folder."""
    return ".".join(module.split(".")[:2])


def floors() -> list[set[str]]:
    """Return the floors (lines) of the map in docs/design.md from top to bottom, each as a set of folders."""
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    found, package = [], ""
    for line in design.partition("## The map")[2].partition("\n## ")[0].splitlines():
        if match := re.fullmatch(r"    (\w+)/", line):
            package = match[1]
        elif package and line.startswith("      "):
            rooms, *_ = re.split(r" {2,}", line.strip())
            found.append({f"{package}.{room.rstrip('/')}" for room in rooms.split()})
    return found


def imports_of(file: Path) -> Iterator[str]:
    """Yield the modules of this repository that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix("baton.")
                yield inner if inner in modules() else node.module.removeprefix("baton.")
        elif isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("baton.") for alias in node.names)


def test_every_room_is_on_the_map_once() -> None:
    rooms = Counter(room for floor in floors() for room in floor)
    assert set(rooms.values()) == {1}
    assert set(rooms) == {room_of(name) for name in modules() if name not in PACKAGES}


def test_imports_run_down_the_map() -> None:
    height = {room: -depth for depth, floor in enumerate(floors()) for room in floor}
    wrong = [
        f"{importer} imports {imported}"
        for importer, file in modules().items()
        for imported in imports_of(file)
        if imported in modules() and importer not in PACKAGES
        if imported in PACKAGES
        or (room_of(importer) != room_of(imported) and height[room_of(imported)] >= height[room_of(importer)])
    ]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions and under TYPE_CHECKING count as imports."""
    left = {name: set(imports_of(file)) & modules().keys() for name, file in modules().items()}
    # Remove modules that import no remaining module, until none is left to remove. Circles, and modules that import
    # from one, remain.
    while free := {name for name, imported in left.items() if not imported & left.keys() - {name}}:
        left = {name: imported for name, imported in left.items() if name not in free}
    assert sorted(left) == []


def core() -> dict[str, Path]:
    """Return the modules listed in the bullets of design.md's section "The core"."""
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = design.partition("## The core\n")[2].partition("\n## ")[0]
    bullets = "\n".join(re.findall(r"^- .*", section, flags=re.MULTILINE))
    patterns = re.findall("`(.*?)`", bullets)
    return {name_of(file): file for pattern in patterns for file in ROOT.glob(pattern)}


def is_empty_package(module: str) -> bool:
    file = modules()[module]
    return file.name == "__init__.py" and len(ast.parse(file.read_text(encoding="utf-8")).body) <= 1


def test_the_core_is_small() -> None:
    assert 0 < sum(file.read_text(encoding="utf-8").count("\n") for file in core().values()) <= MAX_CORE_LINES


def test_the_core_stands_alone() -> None:
    """Importing the core loads no other module of this project, and not torch."""
    listing = "import sys, " + ", ".join(f"baton.{name}" for name in core()) + "; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=True).stdout.split()
    ours = {name.removeprefix("baton.") for name in loaded if name.startswith("baton.")}
    imported = ours | {name for file in core().values() for name in imports_of(file) if name in modules()}
    assert core().keys() <= imported
    assert [name for name in imported - core().keys() if not is_empty_package(name)] == []
    assert "torch" not in loaded


def test_no_two_classes_share_a_name() -> None:
    places = defaultdict(list)
    for name, file in modules().items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name not in OF_FAMILIES:
                places[node.name].append(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("top", [*PACKAGES, "scripts"])
def test_folders_and_files_are_small(top: str) -> None:
    files = [path for path in (ROOT / top).rglob("*") if path.suffix in WRITTEN]
    folders = Counter(file.parent for file in files)
    assert {str(folder): count for folder, count in folders.items() if count > MAX_FILES} == {}
    lines = {str(file): file.read_text(encoding="utf-8").count("\n") for file in files}
    assert {file: count for file, count in lines.items() if count > MAX_LINES} == {}


def named_in(doc: Path) -> Iterator[tuple[str, str]]:
    """Yield each path that a document names, with the name inside that file ("" if none). Skip placeholders."""
    for match in FILE.finditer(doc.read_text(encoding="utf-8")):
        path, inside = match[1], match[2] or ""
        if path.split("/")[0] in {child.name for child in ROOT.iterdir()}:
            yield path, inside


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_what_a_document_names_is_there(doc: Path) -> None:
    named = list(named_in(doc))
    missing = [path for path, _ in named if not any(ROOT.glob(path.rstrip("/")))]
    assert missing == []
    unknown = [f"{path}:{inside}" for path, inside in named if inside and inside not in defined_in(ROOT / path)]
    assert unknown == []


def test_each_step_of_a_requests_life_names_its_functions() -> None:
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    life = design.partition("## A request's life")[2].partition("\n## ")[0]
    steps = re.split(r"^(?=\d\. )", life, flags=re.MULTILINE)[1:]
    assert len(steps) == 9
    assert all(any(match[2] for match in FILE.finditer(step)) for step in steps)


def test_prose_gets_plainer() -> None:
    """Phrases that docs/style.md avoids may not become more frequent than PROSE says.

    Lower its numbers when they can be.
    """
    more = {name: count for name, count in prose.counts().items() if count > PROSE.get(name, 0)}
    assert more == {}, "python -m tests.prose lists the places"


def test_avoided_phrases_are_found(tmp_path: Path) -> None:
    """A phrase of each kind is found in each kind of text. Code and ordinary uses of the same words are not."""
    texts = {
        "a.md": "Those are told anew.\n\n    nobody, in code\n\nWhat is it? By default, nothing.\n",
        "b.py": '"""Whoever asks."""\n\nasked = 1\n\x23 lies behind\n\x23 beside it\n',
        "c.cpp": "int who; // has to go\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    found = {name: sorted(place.pattern for place in prose.places(tmp_path / name)) for name in texts}
    assert found == {
        "a.md": ["anew", "begins without a noun", "told"],
        "b.py": ["begins without a noun", "behind", "beside", "participle as a name", "who"],
        "c.cpp": ["has to go"],
    }
    assert len(prose.files()) > 900, "the repository is read"


def defined_in(file: Path) -> set[str]:
    """Return the functions, classes, constants and methods (`Class.method`) that a module defines."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (ast.FunctionDef, ast.AsyncFunctionDef)
            found.update(f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, methods))
    return found

"""scripts/mutate: where it can plant faults, and its report of found and surviving faults."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.mutation.sites import find_sites, make_mutant

ROOT = Path(__file__).resolve().parents[2]


def faults(text: str) -> set[str]:
    """Return the changed line for every fault that can be planted in a text."""
    source = text.encode()
    sites = find_sites(Path("some.py"), source)
    mutants = [make_mutant(site, change, source) for site in sites for change in site.changes]
    for mutant in mutants:
        compile(mutant.source, "some.py", "exec")
    return {mutant.after for mutant in mutants}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("found = a < b", {"found = a <= b", "found = a >= b"}),
        ("found = a is not None", {"found = a is None"}),
        ("found = ä and (b + c)", {"found = ä or (b + c)", "found = ä and (b - c)"}),
        ("found = not (a or b)", {"found = (a or b)", "found = not (a and b)"}),
        ("found = max(a, 8)", {"found = min(a, 8)", "found = max(a, 9)"}),
        ("a.b |= c", {"pass", "a.b &= c"}),
        ("a.b = c", {"pass"}),
        ("a(b)", {"pass"}),
        ("del a", {"pass"}),
        ("found = [b for b in a if b.c]", {"found = [b for b in a if not b.c]"}),
        ("found = True", {"found = False"}),
        ("a(0o600, 1.5)", {"pass", "a(0o601, 1.5)", "a(0o600, 2.5)"}),
        # Code without faults, because changing it would not alter behaviour.
        ('a: dict[str, int] | None = f"{b + 1}"', set()),
        ("assert a < b", set()),
        ("log.warning(a + b)", set()),
        ("found = zip(a, b, strict=True)", set()),
        ("raise ValueError(a + b)", set()),
    ],
)
def test_faults_of_a_line(line: str, expected: set[str]) -> None:
    assert faults(f"def some(a, b, c):\n    {line}\n") == expected


def test_declarations_have_no_faults() -> None:
    text = '''
        @dataclass(frozen=True)
        class Some(Struct, frozen=True):
            """Of 1 or 2."""
            size: "int | None" = 3
            def __repr__(self) -> str:
                return self.size + 1
            def __init__(self):
                self.size = size
        if TYPE_CHECKING:
            size = 5
        Some: TypeAlias = A | B
    '''
    assert faults(re.sub("^        ", "", text, flags=re.MULTILINE)) == {'size: "int | None" = 4'}


def mutate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/mutate", "--jobs", "1", "--seeds", "2", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_found_and_surviving_faults_are_reported() -> None:
    """Two faults are both found by the tests of their file, and both missed by tests of another file."""
    common = ["--count", "2", "--seed", "1", "--files", "actors/runtime/sizing.py", "--tests"]
    found = mutate(*common, "tests/actors/runtime/test_sizing.py")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "\n2 of 2 are found, 100.0%: 2 by tests" in found.stdout
    missed = mutate(*common, "tests/actors/test_lease.py")
    assert missed.returncode == 1, missed.stdout + missed.stderr
    survivors = missed.stdout.partition("2 of 2 survive:\n")[2].splitlines()[:2]
    assert all(re.match(r"actors/runtime/sizing\.py:\d+  .+  →  .+", line) for line in survivors)


def test_no_fault_is_tried_if_a_check_fails_without_one(tmp_path: Path) -> None:
    failing = tmp_path / "test_failing.py"
    failing.write_text("def test_it():\n    assert 1 == 2\n")
    done = mutate("--count", "1", "--tests", str(failing))
    assert done.returncode == 2 and "assert 1 == 2" in done.stderr and not done.stdout

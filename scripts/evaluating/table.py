"""The table of scripts/evaluate, and the check of `--least`."""

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.evaluating.asking import Outcome


@dataclass(frozen=True)
class Row:
    """The results of one exam. Each figure is (count, total); the total is 0 if there was nothing to compare."""

    name: str
    turns: int
    right: tuple[int, int]
    formed: tuple[int, int]  # tool calls that are well formed
    cold: tuple[int, int]  # questions answered with the same tokens in the session and with nothing cached
    forked: tuple[int, int]  # questions answered with the same tokens in the session and in a fork
    cached: tuple[int, int]  # tokens of the sessions' last prompts that came from the cache

    @classmethod
    def of(cls, name: str, turns: int, outcomes: Sequence[Outcome]) -> "Row":
        formed = [each.score.well_formed for each in outcomes if each.score.well_formed is not None]
        forked = [each.same_forked for each in outcomes if each.same_forked is not None]
        return cls(
            name,
            turns,
            (sum(each.score.right for each in outcomes), len(outcomes)),
            (sum(formed), len(formed)),
            (sum(each.same_cold for each in outcomes), len(outcomes)),
            (sum(forked), len(forked)),
            (sum(each.session.cached for each in outcomes), sum(each.session.prompt for each in outcomes)),
        )

    def reaches(self, least: float) -> bool:
        """Return whether at least the share `least` is right and well formed, and all compared tokens are the same."""
        enough = all(count >= least * whole for count, whole in (self.right, self.formed))
        return enough and all(count == whole for count, whole in (self.cold, self.forked))


HEAD = """\
| asked | turns | right | well formed | same tokens cold | same tokens forked | prompt cached |
|---|---|---|---|---|---|---|"""


def line(row: Row) -> str:
    counts = [f"{count} of {whole}" if whole else "" for count, whole in (row.right, row.formed, row.cold, row.forked)]
    cached = f"{row.cached[0] / row.cached[1]:.0%}" if row.cached[1] else ""
    return " | ".join([f"| {row.name}", str(row.turns), *counts, f"{cached} |"])

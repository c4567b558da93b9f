"""A model of a device's costs, in seconds of virtual time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """The seconds that each kind of work takes."""

    unit: int = 16  # tokens that one unit of the replay stands for
    step: float = 0.008  # any step, in addition to its units
    prefill: float = 16 / 30000  # each unit of a prompt
    decode: float = 0.0002  # each row that decodes one unit
    attention: float = 0.0  # each unit of a prompt, for each earlier unit that it attends to
    copy: float = 0.0002  # a state copied within the pool
    host: float = 0.004  # a state copied to host memory or back
    host_unit: float = 0.0  # the keys and values of one unit, copied to host memory or back with a state

    def chunk(self, start: int, stop: int) -> float:
        """Return the seconds for a prompt's units [start, stop)."""
        return (stop - start) * self.prefill + (stop * stop - start * start) / 2 * self.attention

    def transfer(self, position: int) -> float:
        """Return the seconds to copy a state at `position`, with its keys and values, to host memory or back."""
        return self.host + position * self.host_unit

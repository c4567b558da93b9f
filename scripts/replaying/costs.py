"""How long a device takes, by a model of its costs: seconds of virtual time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Seconds, for a unit of the replay, which stands for `unit` tokens.

    step: a step whatever is in it. prefill, decode: for each unit of a prompt, and for each row that decodes one.
    attention: for each unit of a prompt and each unit of its context. copy: of a state within the pool.
    host: of a state to host memory or back. host_unit: of the keys and values of one unit, on the same way.
    """

    unit: int = 16
    step: float = 0.008
    prefill: float = 16 / 30000
    decode: float = 0.0002
    attention: float = 0.0
    copy: float = 0.0002
    host: float = 0.004
    host_unit: float = 0.0

    def chunk(self, start: int, stop: int) -> float:
        """A prompt's units [start, stop)."""
        return (stop - start) * self.prefill + (stop * stop - start * start) / 2 * self.attention

    def transfer(self, position: int) -> float:
        return self.host + position * self.host_unit

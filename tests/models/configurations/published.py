"""Published facts of a model: its config.json, its size, and the tensors in its files."""

from dataclasses import dataclass, field
from typing import Any

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Published:
    """Published facts of a model.

    config: the hub's config.json, without keys that no family reads.
    size: the number of parameters, with as many digits as are known: "8.89B", "340M", "8888227328".
    tensors: shapes of the tensors in its files, all of them BF16.
    left_out: tensors of its files that no parameter is made from, as those of vision.
    state: bytes of a sequence's state in float32. kv: bytes of a token's keys and values in bfloat16.
    """

    config: dict[str, Any]
    size: str
    tensors: Shapes
    state: int
    kv: int
    left_out: Shapes = field(default_factory=dict)

    def is_size(self, count: int) -> bool:
        digits = self.size.rstrip("MB")
        unit = {"": 1, "M": 10**6, "B": 10**9}[self.size[len(digits) :]]
        places = len(digits.partition(".")[2])
        return f"{count / unit:.{places}f}" == digits


def mamba2_mixer(path: str, hidden: int, heads: int, width: int, groups: int, state: int) -> Shapes:
    """Return the tensors of a Mamba-2 mixer with kernel 4 and a convolution's bias, as in every family's files."""
    inner, channels = heads * width, heads * width + 2 * groups * state
    return {
        f"{path}.A_log": (heads,),
        f"{path}.D": (heads,),
        f"{path}.dt_bias": (heads,),
        f"{path}.in_proj.weight": (inner + channels + heads, hidden),
        f"{path}.conv1d.weight": (channels, 1, 4),
        f"{path}.conv1d.bias": (channels,),
        f"{path}.norm.weight": (inner,),
        f"{path}.out_proj.weight": (hidden, inner),
    }


def mamba2_state(heads: int, width: int, groups: int, state: int) -> int:
    """Return the bytes of a layer's state in float32, including three steps of the convolution's input."""
    return 4 * (heads * width * state + 3 * (heads * width + 2 * groups * state))


def attention(path: str, hidden: int, heads: int, kv_heads: int, width: int) -> Shapes:
    return {
        f"{path}.q_proj.weight": (heads * width, hidden),
        f"{path}.k_proj.weight": (kv_heads * width, hidden),
        f"{path}.v_proj.weight": (kv_heads * width, hidden),
        f"{path}.o_proj.weight": (hidden, heads * width),
    }

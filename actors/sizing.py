"""How many slots and pages there are, and why."""

from dataclasses import dataclass

from models.batch import Model

DEFAULT_MEMORY = 0.5


class SizingError(ValueError):
    """The memory does not hold one request."""


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """slots of `slot_bytes` and pages of `page_bytes` each (no pages without attention), and the reasons in words."""

    slots: int
    slot_bytes: int
    pages: int
    page_bytes: int
    page_size: int
    why: str


def size_pools(
    model: Model,
    memory: int,
    max_running: int,
    max_model_len: int,
    page_size: int,
    slots: int | None = None,
    pages: int | None = None,
) -> PoolSizes:
    """Divide `memory` bytes between states and pages, unless their numbers are given.

    By itself: half of the memory to each where the model has attention, but no more than max_running × 4 slots (a
    running request needs one; the rest keep states to go on from), and pages for max_running × 2 full contexts.
    Raises SizingError if not even one request of max_model_len fits.
    """
    slot_bytes = sum(shape.nbytes for shape in model.state_shapes())
    page_bytes = sum(shape.nbytes for shape in model.page_shapes()) * page_size
    per_request = -(-(max_model_len + 1) // page_size)
    chosen = []
    if slots is None:
        share = memory if not page_bytes else memory // 2
        slots = min(share // slot_bytes, max_running * 4)
        chosen.append(
            f"{slots} slots: {_mib(share)} of --memory hold {share // slot_bytes}, wanted are {max_running} × 4"
        )
    if not page_bytes:
        pages = 0
    elif pages is None:
        share = memory - slots * slot_bytes
        pages = min(share // page_bytes, max_running * per_request * 2)
        chosen.append(
            f"{pages} pages: {_mib(share)} hold {share // page_bytes}, wanted are {max_running} × {per_request} × 2"
        )
    if slots < 1:
        raise SizingError(f"one state takes {_mib(slot_bytes)}, and --memory leaves {_mib(memory)}")
    if page_bytes and pages * page_size < 2:
        raise SizingError(f"one page takes {_mib(page_bytes)}, and --memory leaves room for none")
    return PoolSizes(slots, slot_bytes, pages, page_bytes, page_size, "; ".join(chosen) or "as asked for")


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"

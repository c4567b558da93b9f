"""How many slots and pages there are, and why."""

from dataclasses import dataclass

from torch import nn

from baton.actors.cache.worth.order import Costs
from baton.actors.scheduler.strategy import Strategy, slots_per_request
from baton.models.batch import Model
from baton.models.layers.experts import Experts, SigmoidRouter, SoftmaxRouter
from baton.models.layers.linear import Embedding, HeadLinear, Linear

DEFAULT_MEMORY_FRACTION = 0.5


class SizingError(ValueError):
    """The memory does not hold one request."""


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """slots of `slot_bytes` and pages of `page_bytes` each (no pages without attention), and the reasons in words.

    max_running: how many requests the slots let run at once.
    """

    slots: int
    slot_bytes: int
    pages: int
    page_bytes: int
    page_size: int
    max_running: int
    why: list[str]


def size_pools(
    model: Model,
    memory: int,
    max_running: int,
    max_model_len: int,
    page_size: int,
    slots: int | None = None,
    pages: int | None = None,
    tree_slots: int = 0,
    strategy: Strategy = Strategy.JUST_IN_TIME,
    overlap: bool = True,
) -> PoolSizes:
    """Divide `memory` bytes between states and pages, unless their numbers are given.

    By itself: half of the memory to each where the model has attention, but no more than slots for max_running requests
    and three times as many cached states, and pages for max_running × 2 full contexts. tree_slots of the slots are set
    aside for cached states; the others hold slots_per_request(strategy, overlap) each.
    Raises SizingError if not one request fits.
    """
    slot_bytes = sum(shape.nbytes for shape in model.state_specs())
    page_bytes = sum(shape.nbytes for shape in model.kv_specs()) * page_size
    per_request = -(-(max_model_len + 1) // page_size)
    each = slots_per_request(strategy, overlap)
    why = []
    if slots is None:
        share = memory // 2 if page_bytes else memory
        wanted = max_running * (each + 3)
        slots = min(share // slot_bytes, wanted)
        why.append(f"{slots} slots: {_mib(share)} hold {share // slot_bytes}, wanted are {wanted}")
    if not page_bytes:
        pages = 0
    elif pages is None:
        share = memory - slots * slot_bytes
        wanted = max_running * per_request * 2
        pages = min(share // page_bytes, wanted)
        why.append(f"{pages} pages: {_mib(share)} hold {share // page_bytes}, wanted are {wanted}")
    fit = (slots - tree_slots) // each
    if fit < 1:
        raise SizingError(
            f"no request fits: it needs {each} slots of {_mib(slot_bytes)} ({strategy}), and there are {slots}, "
            f"{tree_slots} of them set aside for the tree"
        )
    if page_bytes and pages * page_size < 2:
        raise SizingError(f"no request fits: there are no pages of {_mib(page_bytes)}")
    why.append(f"{fit} requests fit: {slots} slots less {tree_slots} for the tree, {each} a request ({strategy})")
    return PoolSizes(slots, slot_bytes, pages, page_bytes, page_size, min(fit, max_running), why)


def costs_of(model: Model) -> Costs:
    """Operations that a token takes, and bytes that a state and a token's keys and values take."""
    per_kv = sum(shape.nbytes // shape.dtype.itemsize for shape in model.kv_specs())
    parameters = count_active_parameters(model)
    return Costs(
        compute=2.0 * parameters or 1.0,
        attend=2.0 * per_kv if parameters else 0.0,
        slot=float(sum(shape.nbytes for shape in model.state_specs())),
        token=float(sum(shape.nbytes for shape in model.kv_specs())),
    )


def count_parameters(model: Model) -> int:
    """However they are laid out; none in a model that has no weights."""
    return sum(_own_parameters(module) for module in model.modules()) if isinstance(model, nn.Module) else 0


def count_active_parameters(model: Model) -> int:
    """Those that a token has to do with: of experts, as many as are chosen for it."""
    if not isinstance(model, nn.Module):
        return 0
    return count_parameters(model) - sum(_idle_parameters(module) for module in model.modules())


def weight_bytes(model: Model) -> int:
    return sum(tensor.nbytes for tensor in model.parameters()) if isinstance(model, nn.Module) else 0


def _own_parameters(module: nn.Module) -> int:
    """Those that no module in it has: of a packed weight as many as it stands for."""
    count = sum(tensor.numel() for tensor in module.parameters(recurse=False))
    if isinstance(module, Experts):
        return count + sum(packed.numel - packed.data.numel() for packed in module.packed.values())
    if isinstance(module, HeadLinear):
        return count if module.packed is None else module.packed.numel
    packed = module.packed if isinstance(module, Linear | Embedding | SoftmaxRouter | SigmoidRouter) else None
    return count if packed is None else count - packed.data.numel() + packed.outputs * packed.inputs


def _idle_parameters(module: nn.Module) -> int:
    """Of a router's experts that it does not choose for a token, where the module has both."""
    routers = [child for child in module.children() if isinstance(child, SoftmaxRouter | SigmoidRouter)]
    stacks = [child for child in module.children() if isinstance(child, Experts)]
    return sum(
        _own_parameters(stack) // stack.count * (stack.count - router.rule.top_k)
        for router, stack in zip(routers, stacks, strict=True)
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"

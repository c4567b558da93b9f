"""The sizes of the pools, derived from memory, model and settings."""

from dataclasses import dataclass

from torch import nn

from baton.actors.cache.worth.order import Costs
from baton.actors.scheduler.strategy import Strategy, slots_per_request
from baton.models.batch import Model
from baton.models.layers.experts import Experts, SigmoidRouter, SoftmaxRouter
from baton.models.layers.linear import Embedding, HeadLinear, Linear

DEFAULT_MEMORY_FRACTION = 0.5


class SizingError(ValueError):
    """The memory does not hold a single request."""


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """The sizes of the state pool and the KV pool."""

    slots: int
    slot_bytes: int
    pages: int  # 0 without attention
    page_bytes: int
    page_size: int  # tokens of a page
    max_running: int  # how many requests may run at once
    why: list[str]  # how the sizes were derived, as sentences for people


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
    cached_states: int | None = None,
) -> PoolSizes:
    """Divide `memory` bytes between states and pages, except where `slots` or `pages` fix the number.

    With attention, states get half of the memory and pages the rest; without, states get all. Neither gets more than is
    useful: slots for max_running requests and for `cached_states` more, and pages for two full contexts each.

    cached_states: by default three for each request
    tree_slots: slots reserved for cached states; each request needs slots_per_request(strategy, overlap) others.

    Raises SizingError if not even one request fits.
    """
    slot_bytes = sum(shape.nbytes for shape in model.state_specs())
    page_bytes = sum(shape.nbytes for shape in model.kv_specs()) * page_size
    per_request = -(-(max_model_len + 1) // page_size)
    each = slots_per_request(strategy, overlap)
    why = []
    if slots is None:
        share = memory // 2 if page_bytes else memory
        useful = max_running * each + (cached_states if cached_states is not None else 3 * max_running)
        slots = min(share // slot_bytes, useful)
        why.append(f"{slots} slots: {_mib(share)} hold {share // slot_bytes}, {useful} are useful")
    if not page_bytes:
        pages = 0
    elif pages is None:
        share = memory - slots * slot_bytes
        useful = max_running * per_request * 2
        pages = min(share // page_bytes, useful)
        why.append(f"{pages} pages: {_mib(share)} hold {share // page_bytes}, {useful} are useful")
    fit = (slots - tree_slots) // each
    if fit < 1:
        raise SizingError(
            f"no request fits: it needs {each} slots of {_mib(slot_bytes)} ({strategy}), and there are {slots}, "
            f"{tree_slots} of them reserved for cached states"
        )
    if page_bytes and pages * page_size < 2:
        raise SizingError(f"no request fits: there are no pages of {_mib(page_bytes)}")
    why.append(f"{fit} requests fit: {slots} slots less {tree_slots} for the tree, {each} a request ({strategy})")
    return PoolSizes(slots, slot_bytes, pages, page_bytes, page_size, min(fit, max_running), why)


def costs_of(model: Model) -> Costs:
    """Return the operations of a token, and the bytes of a state and of a token's keys and values."""
    per_kv = sum(shape.nbytes // shape.dtype.itemsize for shape in model.kv_specs())
    parameters = count_active_parameters(model)
    return Costs(
        compute=2.0 * parameters or 1.0,
        attend=2.0 * per_kv if parameters else 0.0,
        slot=float(sum(shape.nbytes for shape in model.state_specs())),
        token=float(sum(shape.nbytes for shape in model.kv_specs())),
    )


def count_parameters(model: Model) -> int:
    """Return the number of parameters, with packed ones counted as unpacked; 0 for a model without weights."""
    return sum(_own_parameters(module) for module in model.modules()) if isinstance(model, nn.Module) else 0


def count_active_parameters(model: Model) -> int:
    """Return the number of parameters that one token uses: of the experts, only the chosen ones count."""
    if not isinstance(model, nn.Module):
        return 0
    return count_parameters(model) - sum(_idle_parameters(module) for module in model.modules())


def weight_bytes(model: Model) -> int:
    return sum(tensor.nbytes for tensor in model.parameters()) if isinstance(model, nn.Module) else 0


def _own_parameters(module: nn.Module) -> int:
    """Return the number of a module's parameters without its children's. Packed weights count as unpacked."""
    count = sum(tensor.numel() for tensor in module.parameters(recurse=False))
    if isinstance(module, Experts):
        return count + sum(packed.numel - packed.data.numel() for packed in module.packed.values())
    if isinstance(module, Linear):
        return module.outputs * module.inputs + (0 if module.bias is None else module.bias.numel())
    if isinstance(module, HeadLinear):
        return count if module.packed is None else module.packed.numel
    packed = module.packed if isinstance(module, Embedding | SoftmaxRouter | SigmoidRouter) else None
    return count if packed is None else count - packed.data.numel() + packed.outputs * packed.inputs


def _idle_parameters(module: nn.Module) -> int:
    """Return how many parameters are in experts that are not chosen for a token. 0 without a router and experts."""
    routers = [child for child in module.children() if isinstance(child, SoftmaxRouter | SigmoidRouter)]
    stacks = [child for child in module.children() if isinstance(child, Experts)]
    return sum(
        _own_parameters(stack) // stack.count * (stack.count - router.rule.top_k)
        for router, stack in zip(routers, stacks, strict=True)
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"

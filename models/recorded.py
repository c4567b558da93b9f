"""Steps that only decode, recorded once for each number of rows and replayed: kernels/runtime/cpu_graph/."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from baton.kernels.runtime import triton
from baton.kernels.runtime.cpu_graph import NotRecordable, Recording, SharedMemory, record
from baton.models.batch import Batch, Decode, Model, PagePlan, Pools, TensorSpec
from baton.models.layers.rope import Rotation
from baton.models.layers.step import BatchPlan


@runtime_checkable
class PlannedModel(Model, Protocol):
    """A model whose forward is run(embed(tokens), plan(batch, pools))."""

    def plan(self, batch: Batch, pools: Pools) -> BatchPlan:
        """What the layers need to know of the batch."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """What goes into the first layer: [T, hidden]."""
        ...

    def run(self, residual: Tensor, step: BatchPlan) -> Tensor:
        """Hidden states [T, hidden] after the final norm; updates states and pages in place."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A recorded step, and what it reads: tensors that each replay fills."""

    recording: Recording
    embedded: Tensor
    plan: BatchPlan

    def replay(self, embedded: Tensor, plan: BatchPlan) -> Tensor:
        self.embedded.copy_(embedded)
        for held, new in zip(tensors_of(self.plan), tensors_of(plan), strict=True):
            held.copy_(new)
        if self.plan.pages and plan.pages:
            self.plan.pages.table[:, : plan.pages.table.shape[1]] = plan.pages.table
        return self.recording.replay()


def hold(plan: BatchPlan, table: Tensor) -> BatchPlan:
    """A plan of decoding rows with tensors of its own; table: int32, for as many rows and pages as there may be."""
    pages, rotation = plan.pages, plan.rotation
    if pages:
        held = table[: len(pages.table)]
        pages = PagePlan(pages.offsets.clone(), pages.starts.clone(), held, pages.places.clone(), 0, 0)
    if rotation:
        rotation = Rotation(rotation.cos.clone(), rotation.sin.clone())
    rows = plan.decode
    decode = Decode(rows.slots.clone(), rows.positions.clone(), rows.page_table) if rows else None
    return replace(plan, decode=decode, pages=pages, rotation=rotation)


def tensors_of(plan: BatchPlan) -> list[Tensor]:
    """All but the page table, whose width is the step's."""
    of_rows = [plan.decode.slots, plan.decode.positions] if plan.decode else []
    of_pages = [plan.pages.offsets, plan.pages.starts, plan.pages.places] if plan.pages else []
    of_rotation = [plan.rotation.cos, plan.rotation.sin] if plan.rotation else []
    return [*of_rows, *of_pages, *of_rotation]


class RecordingModel:
    """The same model. What `forward` returns for rows that decode holds until the next such step.

    Its pools are `pools` for good. max_rows: most that decode at once; max_pages: most entries of a row's page table.
    unrecordable: why it only forwards.
    """

    def __init__(self, model: PlannedModel, pools: Pools, max_rows: int, max_pages: int) -> None:
        self.vocab_size, self.chunk_size, self.max_position = model.vocab_size, model.chunk_size, model.max_position
        self.unrecordable = ""
        self._model, self._pools = model, pools
        self._max_rows, self._max_pages = max_rows, max_pages
        self._memory = SharedMemory()
        self._steps: dict[int, DecodeStep] = {}
        self._is_warm = False

    @cached_property
    def _table(self) -> Tensor:
        """Made on the thread that computes: see TorchDevice."""
        return torch.zeros(self._max_rows, self._max_pages, dtype=torch.int32)

    def state_specs(self) -> list[TensorSpec]:
        return self._model.state_specs()

    def kv_specs(self) -> list[TensorSpec]:
        return self._model.kv_specs()

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        assert pools is self._pools
        embedded, plan = self._model.embed(batch.tokens), self._model.plan(batch, pools)
        step = None if plan.prefill or self.unrecordable else self._step(embedded, plan)
        return step.replay(embedded, plan) if step else self._model.run(embedded, plan)

    def _step(self, embedded: Tensor, plan: BatchPlan) -> DecodeStep | None:
        """The one for so many rows. None for the first of all, in which layers work out their constants."""
        rows = len(embedded)
        if rows not in self._steps and self._is_warm:
            try:
                self._steps[rows] = self._record(embedded.clone(), hold(plan, self._table))
            except NotRecordable as reason:
                self.unrecordable = str(reason)
        self._is_warm = True
        return self._steps.get(rows)

    def _record(self, embedded: Tensor, plan: BatchPlan) -> DecodeStep:
        """Raises NotRecordable. The step itself is not run."""
        return DecodeStep(record(lambda: self._model.run(embedded, plan), self._memory), embedded, plan)


def recording(model: Model, pools: Pools, max_rows: int, max_pages: int) -> Model:
    """A RecordingModel of it where that is for something: on a CPU that computes, for models of layers."""
    if not (isinstance(model, PlannedModel) and pools.slots.is_cpu) or triton.takes(pools.slots):
        return model
    return RecordingModel(model, pools, max_rows, max_pages)

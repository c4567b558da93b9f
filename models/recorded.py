"""A model whose decoding steps are recorded once for each number of rows, and replayed without Python."""

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
    """A model whose forward is run(embed(tokens), plan(batch, pools)), followed by `observe`."""

    def plan(self, batch: Batch, pools: Pools) -> BatchPlan:
        """Return what the layers need to know about the batch."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input of the first layer, [tokens, hidden]."""
        ...

    def run(self, residual: Tensor, step: BatchPlan) -> Tensor:
        """Return hidden states [tokens, hidden] after the final norm; update states and pages in place."""
        ...

    def observe(self, embedded: Tensor, hidden: Tensor, step: BatchPlan) -> None:
        """Let a head for further tokens see a step, if there is one. hidden: the result of `run`."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A recorded step, and its input tensors, which each replay fills with new values."""

    recording: Recording
    embedded: Tensor
    plan: BatchPlan

    def replay(self, embedded: Tensor, plan: BatchPlan) -> Tensor:
        """Run the step with these inputs; return the hidden states, which are valid until the next replay."""
        self.embedded.copy_(embedded)
        for held, new in zip(tensors_of(self.plan), tensors_of(plan), strict=True):
            held.copy_(new)
        if self.plan.pages and plan.pages:
            self.plan.pages.table[:, : plan.pages.table.shape[1]] = plan.pages.table
        return self.recording.replay()


def hold(plan: BatchPlan, table: Tensor) -> BatchPlan:
    """Return a copy of a plan for decoding rows. The copy has its own tensors, which a recording reads in each replay.

    table: memory for the page table, int32 [max_rows, max_pages]. All recordings share it: only one runs at a time.
    """
    pages, rotation = plan.pages, plan.rotation
    if pages:
        own_table = table[: len(pages.table)]
        pages = PagePlan(pages.offsets.clone(), pages.starts.clone(), own_table, pages.places.clone(), 0, 0)
    if rotation:
        rotation = Rotation(rotation.cos.clone(), rotation.sin.clone())
    rows = plan.decode
    decode = Decode(rows.slots.clone(), rows.positions.clone(), rows.page_table) if rows else None
    return replace(plan, decode=decode, pages=pages, rotation=rotation)


def tensors_of(plan: BatchPlan) -> list[Tensor]:
    """Return the tensors of a plan, except the page table, whose width differs from step to step."""
    row_tensors = [plan.decode.slots, plan.decode.positions] if plan.decode else []
    page_tensors = [plan.pages.offsets, plan.pages.starts, plan.pages.places] if plan.pages else []
    rotation_tensors = [plan.rotation.cos, plan.rotation.sin] if plan.rotation else []
    return [*row_tensors, *page_tensors, *rotation_tensors]


class RecordingModel:
    """A model that computes the same as `model`, but replays steps that only decode.

    The result of a replayed step is valid until the next step.
    pools: the only pools that may be used, because recordings contain their addresses.
    max_rows: the most rows that decode at once.
    max_pages: the most entries of a row's page table.
    """

    def __init__(self, model: PlannedModel, pools: Pools, max_rows: int, max_pages: int) -> None:
        self.vocab_size, self.chunk_size, self.max_position = model.vocab_size, model.chunk_size, model.max_position
        self.unrecordable = ""  # if not empty, why steps cannot be recorded; then `model` runs them all
        self._model, self._pools = model, pools
        self._max_rows, self._max_pages = max_rows, max_pages
        self._memory = SharedMemory()
        self._steps: dict[int, DecodeStep] = {}
        self._is_warm = False

    @cached_property
    def _table(self) -> Tensor:
        """Memory for the page tables of recorded steps.

        Zeroing so much memory starts OpenMP threads for the calling thread. So the memory is allocated at first use, on
        the device's thread. OpenMP threads of another thread would compete with the kernels for processors.
        """
        return torch.zeros(self._max_rows, self._max_pages, dtype=torch.int32)

    def state_specs(self) -> list[TensorSpec]:
        return self._model.state_specs()

    def kv_specs(self) -> list[TensorSpec]:
        return self._model.kv_specs()

    def ring_specs(self) -> list[TensorSpec]:
        return self._model.ring_specs()

    def replay(self, rows: Decode, pools: Pools) -> None:
        self._model.replay(rows, pools)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        assert pools is self._pools
        embedded, plan = self._model.embed(batch.tokens), self._model.plan(batch, pools)
        only_decodes = plan.decode is not None and plan.decode.drafts is None and not plan.prefill
        step = None if not only_decodes or self.unrecordable else self._step(embedded, plan)
        hidden = step.replay(embedded, plan) if step else self._model.run(embedded, plan)
        self._model.observe(embedded, hidden, plan)
        return hidden

    def _step(self, embedded: Tensor, plan: BatchPlan) -> DecodeStep | None:
        """Return the recorded step for this number of rows, after recording it if necessary.

        Returns None if steps cannot be recorded, and for the very first step: layers compute their constants in it.
        """
        rows = len(embedded)
        if rows not in self._steps and self._is_warm:
            try:
                self._steps[rows] = self._record(embedded.clone(), hold(plan, self._table))
            except NotRecordable as reason:
                self.unrecordable = str(reason)
        self._is_warm = True
        return self._steps.get(rows)

    def _record(self, embedded: Tensor, plan: BatchPlan) -> DecodeStep:
        """Record a step without running it. Raises NotRecordable if an operation cannot be recorded."""
        return DecodeStep(record(lambda: self._model.run(embedded, plan), self._memory), embedded, plan)


def recording(model: Model, pools: Pools, max_rows: int, max_pages: int) -> Model:
    """Return a RecordingModel if the model consists of layers whose kernels run on a CPU; else return `model`."""
    if not (isinstance(model, PlannedModel) and pools.slots.is_cpu) or triton.takes(pools.slots):
        return model
    return RecordingModel(model, pools, max_rows, max_pages)

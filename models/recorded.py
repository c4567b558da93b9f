"""A model whose decoding steps are recorded once for each number of rows and tokens, and replayed without Python."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from baton.kernels.drafts import Drafts
from baton.kernels.runtime import triton
from baton.kernels.runtime.cpu_graph import NotRecordable, Recording, SharedMemory, record
from baton.models.batch import Batch, Decode, Model, PagePlan, Pools, PredictingModel, TensorSpec
from baton.models.layers.rope import Rotation
from baton.models.layers.step import BatchPlan

Computation = Callable[..., Tensor]  # function of input tensors and a BatchPlan
MOST_RECORDINGS = 1024
"""The most recordings that are kept: by number of rows, and of the tokens that they feed."""


@runtime_checkable
class PlannedModel(PredictingModel, Protocol):
    """A model whose forward is run(embed(tokens), plan(batch, pools))."""

    def plan(self, batch: Batch, pools: Pools) -> BatchPlan:
        """Return what the layers need to know about the batch."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input of the first layer, [tokens, hidden]."""
        ...

    def run(self, embedded: Tensor, step: BatchPlan) -> Tensor:
        """Return hidden states [tokens, hidden] after the final norm; update states and pages in place."""
        ...

    def estimate(self, embedded: Tensor, hidden: Tensor, step: BatchPlan) -> Tensor:
        """Return what `predict` returns. embedded: the tokens' embeddings, [rows, hidden]."""
        ...


class StepKind(NamedTuple):
    """A kind of step. Steps of one kind make the same calls, however many tokens each row feeds or replays."""

    computation: Computation
    rows: int
    tokens: int  # how many the rows feed
    drafts: bool  # whether a row feeds or replays drafts


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A recorded computation, and its inputs, which each replay fills with new values."""

    recording: Recording
    plan: BatchPlan
    inputs: tuple[Tensor, ...]

    def ready(self, plan: BatchPlan, inputs: tuple[Tensor, ...]) -> Callable[[], Tensor]:
        """Return a function that computes the step for this plan and these inputs, which are copied at once.

        Call it before the next `ready`. Its result is valid until the next replay.
        """
        held, new = (*self.inputs, *tensors_of(self.plan)), (*inputs, *tensors_of(plan))
        for target, source in zip(held, new, strict=True):
            target.copy_(source)
        if self.plan.pages and plan.pages:
            self.plan.pages.table[:, : plan.pages.table.shape[1]] = plan.pages.table
        return self._replay

    def _replay(self) -> Tensor:
        """Replay the recording. This method keeps the inputs alive, to which the recording only points."""
        return self.recording.replay()


def hold(plan: BatchPlan, table: Tensor, tokens: int) -> BatchPlan:
    """Return a copy of a plan for decoding rows. The copy has its own tensors, which a recording reads in each replay.

    table: memory for the page table, int32 [max_tokens, max_pages]. All recordings share it: only one runs at a time.
    tokens: how many the rows feed.
    """
    pages, rows = plan.pages, plan.decode
    assert rows is not None
    if pages:
        own_table = table[: len(pages.table)]
        pages = PagePlan(pages.offsets.clone(), pages.starts.clone(), own_table, pages.places.clone(), 0, 0)
    rotations = [Rotation(rotation.cos.clone(), rotation.sin.clone()) for rotation in plan.rotations]
    drafts = _hold_drafts(rows.drafts, plan.pools, tokens) if rows.drafts else None
    decode = Decode(rows.slots.clone(), rows.positions.clone(), rows.page_table, drafts=drafts)
    return replace(plan, decode=decode, pages=pages, rotations=rotations)


def _hold_drafts(drafts: Drafts, pools: Pools, tokens: int) -> Drafts:
    """Return a copy for rows that feed `tokens` tokens in total. Each of them may replay as many as a ring holds."""
    most = pools.rings[0].shape[1]
    held = drafts.begins.clone(), drafts.offsets.clone(), drafts.rings.clone()
    return Drafts(*held, tokens + len(drafts.rings) * most, most)


def tensors_of(plan: BatchPlan) -> list[Tensor]:
    """Return the tensors of a plan, except the page table, whose width differs from step to step."""
    row_tensors = [plan.decode.slots, plan.decode.positions] if plan.decode else []
    drafts = plan.decode.drafts if plan.decode else None
    draft_tensors = [drafts.begins, drafts.offsets, drafts.rings] if drafts else []
    page_tensors = [plan.pages.offsets, plan.pages.starts, plan.pages.places] if plan.pages else []
    rotation_tensors = [tensor for rotation in plan.rotations for tensor in rotation]
    return [*row_tensors, *draft_tensors, *page_tensors, *rotation_tensors]


class RecordingModel:
    """A model that computes the same as `model`, but replays steps that only decode, and predictions.

    The result of a replay is valid until the next one.

    pools: the only pools that may be used, because recordings contain their addresses.
    max_rows: the most rows that decode at once.
    max_pages: the most entries of a row's page table.
    """

    def __init__(self, model: PlannedModel, pools: Pools, max_rows: int, max_pages: int) -> None:
        self.vocab_size, self.chunk_size, self.max_position = model.vocab_size, model.chunk_size, model.max_position
        self.predicts = model.predicts
        self.unrecordable = ""  # if not empty, why steps cannot be recorded; then `model` runs them all
        self._model, self._pools = model, pools
        most_drafts = pools.rings[0].shape[1] if pools.rings else 0
        self._table_shape = max_rows * (1 + most_drafts), max_pages
        self._memory = SharedMemory()
        self._steps: dict[StepKind, RecordedStep] = {}  # the least recently used one first
        self._warm: set[Computation] = set()  # computations that have run once in a step without prompts

    @cached_property
    def _table(self) -> Tensor:
        """Memory for the page tables of recorded steps.

        Zeroing so much memory starts OpenMP threads for the calling thread. So the memory is allocated at first use, on
        the device's thread. OpenMP threads of another thread would compete with the kernels for processors.
        """
        return torch.zeros(self._table_shape, dtype=torch.int32)

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
        return self.prepare(batch, pools)()

    def prepare(self, batch: Batch, pools: Pools) -> Callable[[], Tensor]:
        plan = self._plan(batch, pools)
        return self._ready(self._model.run, plan, self._model.embed(batch.tokens))

    def predict(self, tokens: Tensor, hidden: Tensor, rows: Decode, pools: Pools) -> Tensor:
        plan = self._plan(Batch(tokens, rows.positions, None, rows), pools)
        return self._ready(self._model.estimate, plan, self._model.embed(tokens), hidden)()

    def _plan(self, batch: Batch, pools: Pools) -> BatchPlan:
        assert pools is self._pools
        return self._model.plan(batch, pools)

    def _ready(self, computation: Computation, plan: BatchPlan, *inputs: Tensor) -> Callable[[], Tensor]:
        """Return a function that computes computation(*inputs, plan), by a replay where possible."""
        step = self._step(computation, plan, inputs)
        return step.ready(plan, inputs) if step else partial(self._run, computation, plan, inputs)

    def _run(self, computation: Computation, plan: BatchPlan, inputs: tuple[Tensor, ...]) -> Tensor:
        """Return computation(*inputs, plan), without a recording."""
        hidden = computation(*inputs, plan)
        if not plan.prefill:
            self._warm.add(computation)
        return hidden

    def _step(self, computation: Computation, plan: BatchPlan, inputs: tuple[Tensor, ...]) -> RecordedStep | None:
        """Return the recorded step for these numbers of rows and tokens, after recording it if necessary.

        Returns None for steps with prompts, if steps cannot be recorded, and for the very first step: layers compute
        their constants in it.
        """
        rows = plan.decode
        if plan.prefill or rows is None or self.unrecordable:
            return None
        kind = StepKind(computation, len(rows.slots), len(inputs[0]), rows.drafts is not None)
        step = self._steps.pop(kind, None)
        if step is None and computation in self._warm:
            step = self._record(computation, plan, inputs)
        if step:
            self._steps[kind] = step  # the last key is the most recently used one
            if len(self._steps) > MOST_RECORDINGS:
                del self._steps[next(iter(self._steps))]
        return step

    def _record(self, computation: Computation, plan: BatchPlan, inputs: tuple[Tensor, ...]) -> RecordedStep | None:
        """Record a step without running it. Return None, and set `unrecordable`, if that is not possible."""
        own, held = tuple(tensor.clone() for tensor in inputs), hold(plan, self._table, len(inputs[0]))
        try:
            return RecordedStep(record(lambda: computation(*own, held), self._memory), held, own)
        except NotRecordable as reason:
            self.unrecordable = str(reason)
            return None


def recording(model: Model, pools: Pools, max_rows: int, max_pages: int) -> Model:
    """Return a RecordingModel if the model consists of layers whose kernels run on a CPU; else return `model`."""
    if not (isinstance(model, PlannedModel) and pools.slots.is_cpu) or triton.takes(pools.slots):
        return model
    return RecordingModel(model, pools, max_rows, max_pages)

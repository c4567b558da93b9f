"""The torch device: a step's inputs go in one upload; model and draw are enqueued, and the host waits for neither.

The inputs are uploaded to the inbox, one buffer on the device. The next step's upload overwrites them, which is safe
because it is later in stream order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.actors.forward.device import Work, WorkMask
from baton.actors.forward.launching import Pending
from baton.actors.forward.step.captured import CapturedDecode
from baton.actors.forward.step.drawing import draws_of, pack_masks, reported_tokens
from baton.actors.forward.step.packed import PackedStep, pack_step
from baton.actors.forward.step.packing import Inbox
from baton.actors.forward.step.pending import LaunchedWork
from baton.actors.forward.step.reporting import CopiedLogprobs, to_host
from baton.actors.forward.step.rows import DeviceRow, RowTable
from baton.actors.forward.streams import CpuStream, Event, Stream
from baton.actors.forward.transfers.enqueue import Transfers
from baton.actors.messages import Ran, Transferred
from baton.actors.requests import Request
from baton.actors.storage.host_memory import HostStates
from baton.kernels.sampling import TokenCounts, apply_masks, sample
from baton.models.batch import Model, Pools, predictor_of, preparation_of

CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
NOTHING_DRAWN = torch.empty(0, dtype=torch.int64)
INBOX_BYTES = 2**16  # the initial size; the inbox grows if a step uploads more


@dataclass(frozen=True, slots=True)
class ReadyStep:
    """A step that is prepared: commits, the model, its head and the draw are left to be enqueued."""

    step: PackedStep
    forward: Callable[[], Tensor] | None  # returns the hidden states of the batch, [tokens, size]; None without a batch


class TorchDevice:
    """The Device that runs a model with torch on one stream. Copies to and from host memory have their own stream.

    All calls come from one thread. Sampled tokens stay on the device, in the row table, and feed the next step.

    host: the store for copies in host memory.
    """

    def __init__(
        self,
        model: Model,
        pools: Pools,
        max_running: int,
        max_model_len: int,
        host: HostStates | None = None,
        stream: Stream | None = None,
    ) -> None:
        self.model, self.pools, self.max_running = model, pools, max_running
        self._prepare_model, self._predictor = preparation_of(model), predictor_of(model)
        self._host = host if host is not None else HostStates()
        self._stream = stream if stream is not None else CpuStream()
        self._transfers = Transfers(pools, self._host, self._stream)
        with self._stream.active():
            self._table = RowTable(max_running, max_model_len, pools)
            self._counts = TokenCounts(model.vocab_size, pools.slots.device)
            self._inbox = Inbox(INBOX_BYTES, pools.slots.device, self._stream)
            self._late_inbox = Inbox(INBOX_BYTES, pools.slots.device, self._stream)  # while a step still uses `_inbox`
        self._decoder: CapturedDecode | None = None
        self._ready: ReadyStep | None = None  # the step that is launched next

    @property
    def copies_aside(self) -> bool:
        return self._transfers.aside

    def enter_thread(self) -> None:
        self._stream.enter_thread()

    def capture(self, only_largest: bool = False) -> None:
        """Capture decoding steps, if a replay is cheaper. Padding rows then use the last slot and page of the pools."""
        if self._stream.can_capture:
            with self._stream.active(), torch.inference_mode():
                self._decoder = CapturedDecode(self.model, self.pools, self._table, self._stream)
                self._decoder.capture(only_largest)

    def clear(self, slot: int) -> None:
        with self._stream.active():
            self.pools.clear(slot)

    def poison(self, slot: int) -> None:
        with self._stream.active():
            self.pools.poison(slot)

    def copy(self, source: int, target: int) -> None:
        with self._stream.active():
            self.pools.copy(source, target)

    def copy_page(self, source: int, target: int) -> None:
        with self._stream.active():
            self.pools.copy_page(source, target)

    def export(self, key: int, slot: int, pages: list[int], position: int) -> Pending[Transferred]:
        return self._transfers.export(key, slot, pages, position)

    def fill(self, grant: int, key: int, slot: int, pages: list[int], first_page: int) -> Pending[Transferred]:
        return self._transfers.fill(grant, key, slot, pages, first_page)

    def drop(self, key: int) -> None:
        self._host.drop(key)

    def drop_all(self) -> None:
        self._host.clear()

    def open_row(self, row: int, grant: int, slot: int, request: Request, pages: list[int]) -> None:
        tokens, sampling = np.frombuffer(request.tokens, np.int32), request.sampling
        before = self._table.rows.pop(row, None)
        if before is not None and before.counts_index is not None:
            self._counts.close(before.counts_index)
        line = None
        if (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0):
            # A step may have created the inbox's memory in inference mode, and only this mode may write to it then.
            with self._stream.active(), torch.inference_mode():
                seen = self._uploaded(tokens)
                line = self._counts.open(seen[: request.prompt_len], seen[request.prompt_len :])
        self._table.open(row, DeviceRow(grant, request, tokens, 0, line), slot)
        self._table.extend(row, pages)

    def extend_row(self, row: int, pages: list[int]) -> None:
        self._table.extend(row, pages)

    def prepare(self, work: Work) -> None:
        self._ready = None
        with self._stream.active(), torch.inference_mode():
            self._ready = self._prepare(work)

    def launch(self, work: Work) -> Pending[Ran]:
        torch.set_flush_denormal(True)  # Per-thread setting: decaying states reach denormals, which are slow on a CPU.
        with self._stream.active(), torch.inference_mode():
            return self._launch(work)

    def _decoder_for(self, work: Work) -> CapturedDecode | None:
        return self._decoder if work.decodes and self._decoder and self._decoder.takes(work) else None

    def _pack(self, work: Work) -> PackedStep:
        captures, sizes = self._decoder_for(work) is not None, (self.model.chunk_size, self.pools.page_size)
        self._inbox.begin()
        return pack_step(self._inbox, work, self._table, *sizes, captures)

    def _prepare(self, work: Work) -> ReadyStep:
        step, decoder = self._pack(work), self._decoder_for(work)
        self._inbox.send()
        if decoder:
            decoder.send(work)
        if step.page_update:
            self._table.update(step.page_update)
        batch = step.batch.complete(self._table) if step.batch is not None else None
        return ReadyStep(step, self._prepare_model(batch, self.pools) if batch is not None else None)

    def _launch(self, work: Work) -> LaunchedWork:
        ready, self._ready = self._ready, None
        if ready is None or ready.step.work is not work:
            ready = self._prepare(work)
        began = self._stream.record()
        step, decoder = ready.step, self._decoder_for(work)
        if step.commits is not None:
            self.model.replay(step.commits, self.pools)
        hidden = ready.forward() if ready.forward is not None else None
        logits, sound, prompts = self._compute(step, hidden)
        pooled = [chunk.enqueue(hidden, self._stream) for chunk in step.pooled] if hidden is not None else []
        if decoder:
            logits.append(decoder.logits())
        self._keep_decode_checkpoints(work)
        late, waited = self._wait_for_masks(work)
        drawn, reports, last_draws = NOTHING_DRAWN, None, None
        if logits:
            drawn, reports, last_draws = self._draw(step, logits[0] if len(logits) == 1 else torch.cat(logits), late)
        predicted = self._predict(step, hidden, last_draws)
        ended = self._stream.record()
        return LaunchedWork(step, began, ended, waited, drawn, sound, reports, prompts, predicted, pooled)

    def _wait_for_masks(self, work: Work) -> tuple[list[WorkMask], tuple[Event, Event] | None]:
        """Wait until the step's late masks have come. Return them, and LaunchedWork's `waited`."""
        if work.late is None:
            return [], None
        before = self._stream.record()
        late = work.late.result()
        return late, (before, self._stream.record())

    def _compute(
        self, step: PackedStep, hidden: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None, list[CopiedLogprobs]]:
        """Enqueue the head. Return the logits to draw from, if any, and LaunchedWork's `sound` and `prompts`."""
        if hidden is None:
            return [], None, []
        prompts = [prompt.enqueue(hidden, self.model, self._stream) for prompt in step.prompts]
        if step.at is None:
            return [self.model.logits(hidden)], None, prompts
        logits = [self.model.logits(hidden[step.at])] if len(step.at) else []
        sound = None
        if step.ends is not None:
            # Nothing is drawn from these chunks, so no logits show whether their states are finite.
            sound = to_host(hidden[step.ends].isfinite().all(-1), self._stream)
        return logits, sound, prompts

    def _draw(
        self, step: PackedStep, logits: Tensor, late: list[WorkMask]
    ) -> tuple[Tensor, CopiedLogprobs | None, Tensor | None]:
        """Enqueue the draw. Return LaunchedWork's `drawn` and `reports`, and each row's last valid draw with drafts."""
        unadjusted, valid, last_draws = step.reports.copy_logits(logits), None, None
        step.adjustments.apply(logits, self._counts)
        if late:
            self._apply_late_masks(step.work, late, logits)
        if step.draws is None:
            assert self._decoder is not None
            drawn = self._decoder.draw()
        else:
            sampled = sample(logits, step.draws.params)
            drawn = reported_tokens(sampled)
            if step.verification is None:
                self._table.last_token.index_copy_(0, step.draws.rows, sampled.tokens)
        if step.verification is not None:
            last_draws, valid = step.verification.verify(drawn)
            self._table.last_token.index_copy_(0, step.verification.rows, drawn[last_draws].clamp(min=0))
        if step.adjustments.penalties or step.reports.draws is not None:
            tokens = drawn.clamp(min=0)
            step.adjustments.count(tokens, self._counts, valid)
            return to_host(drawn, self._stream), step.reports.enqueue(unadjusted, tokens, self._stream), last_draws
        return to_host(drawn, self._stream), None, last_draws

    def _apply_late_masks(self, work: Work, late: list[WorkMask], logits: Tensor) -> None:
        """Enqueue the masks that have come since the step was prepared. They are uploaded on their own."""
        self._late_inbox.begin()
        masks = pack_masks(self._late_inbox, draws_of(work), late)
        self._late_inbox.send()
        apply_masks(logits, masks.draws, masks.words)

    def _predict(self, step: PackedStep, hidden: Tensor | None, last_draws: Tensor | None) -> Tensor | None:
        """Enqueue the step's predictions. Return LaunchedWork's `predicted`."""
        if not step.predictions or not self._predictor or hidden is None:
            return None
        of_step = self._predictor, self.pools, self._table, hidden, last_draws
        return to_host(step.predictions.predict(*of_step), self._stream)

    def _uploaded(self, tokens: NDArray[np.int32]) -> Tensor:
        """Upload tokens. Return them as int64 on the device, valid until the next upload."""
        self._inbox.begin()
        on_device = self._inbox.put(tokens)
        self._inbox.send()
        return on_device

    def _keep_decode_checkpoints(self, work: Work) -> None:
        """Enqueue the checkpoints of rows that decode: after the step their states are at the right positions."""
        decoding = set(work.decodes)
        for checkpoint in work.checkpoints:
            if checkpoint.row in decoding:
                self.pools.copy(int(self._table.slots[checkpoint.row]), checkpoint.slot)


def survives(error: Exception) -> bool:
    """Return whether the device is usable after this error of one call.

    CUDA reports a lack of memory for one call, such as a host buffer or the code of a kernel, with an error of the same
    class as a fault that ends the device. Only its number differs.
    """
    return not isinstance(error, torch.AcceleratorError) or getattr(error, "error_code", None) == CUDA_OUT_OF_MEMORY

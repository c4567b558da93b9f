"""The torch device: what a step needs goes in one upload; model and draw are enqueued, and nothing is read back.

What a step brings with it lies in the inbox, which the next upload writes over: in stream order, so behind the step.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.actors.forward.device import Pending, Work
from baton.actors.forward.step.captured import CapturedDecode
from baton.actors.forward.step.drawing import told_of
from baton.actors.forward.step.packed import PackedStep, pack_step
from baton.actors.forward.step.packing import Inbox
from baton.actors.forward.step.pending import LaunchedWork
from baton.actors.forward.step.reporting import CopiedLogprobs, to_host
from baton.actors.forward.step.rows import DeviceRow, RowTable
from baton.actors.forward.streams import CpuStream, Stream
from baton.actors.forward.transfers.enqueue import Transfers
from baton.actors.messages import Ran, Transferred
from baton.actors.requests import Request
from baton.actors.storage.host_memory import HostStates
from baton.kernels.sampling import TokenCounts, sample
from baton.models.batch import Model, Pools

NOTHING_DRAWN = torch.empty(0, dtype=torch.int64)
INBOX_BYTES = 2**16


class TorchDevice:
    """The Device that runs a model with torch on one stream; copies to and from host memory have one of their own.

    All calls come from one thread. Sampled tokens stay on the device, in the row table, and feed the next step.
    host: where exported states go.
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
        self._host = host if host is not None else HostStates()
        self._stream = stream if stream is not None else CpuStream()
        self._transfers = Transfers(pools, self._host, self._stream)
        with self._stream.active():
            self._table = RowTable(max_running, max_model_len, pools)
            self._counts = TokenCounts(model.vocab_size, pools.slots.device)
            self._inbox = Inbox(INBOX_BYTES, pools.slots.device, self._stream)
        self._decoder: CapturedDecode | None = None

    @property
    def copies_aside(self) -> bool:
        return self._transfers.aside

    def capture(self, only_largest: bool = False) -> None:
        """Record steps that decode, where replaying them costs less; the pools' last slot and page are for padding."""
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
            with self._stream.active(), torch.inference_mode():  # In which a step may have made the inbox larger.
                seen = self._uploaded(tokens)
                line = self._counts.open(seen[: request.prompt_len], seen[request.prompt_len :])
        self._table.open(row, DeviceRow(grant, request, tokens, 0, line), slot)
        self._table.extend(row, pages)

    def extend_row(self, row: int, pages: list[int]) -> None:
        self._table.extend(row, pages)

    def launch(self, work: Work) -> Pending[Ran]:
        torch.set_flush_denormal(True)  # Of this thread: states decay into numbers on which a CPU is slow.
        with self._stream.active(), torch.inference_mode():
            return self._launch(work)

    def _launch(self, work: Work) -> LaunchedWork:
        inbox, decoder = self._inbox, self._decoder if work.decodes else None
        packing = inbox.packing()
        step = pack_step(packing, work, self._table, self.model.chunk_size, self.pools.page_size, decoder is not None)
        began = self._stream.record()
        inbox.send(packing)
        if decoder:
            decoder.send(work)
        if step.moved:
            self._table.update(step.moved, inbox)
        logits, sound, prompts = self._compute(step, inbox)
        if decoder:
            logits.append(decoder.logits())
        self._keep_decode_checkpoints(work)
        drawn, reports = NOTHING_DRAWN, None
        if logits:
            drawn, reports = self._draw(step, logits[0] if len(logits) == 1 else torch.cat(logits), inbox)
        return LaunchedWork(step, began, self._stream.record(), drawn, sound, reports, prompts)

    def _compute(self, step: PackedStep, inbox: Inbox) -> tuple[list[Tensor], Tensor | None, list[CopiedLogprobs]]:
        """The logits of the rows that are drawn for, if there are any here, LaunchedWork's sound, and what is reported
        of prompts.
        """
        if step.batch is None:
            return [], None, []
        hidden = self.model.forward(step.batch.unpack(inbox, self._table), self.pools)
        prompts = [prompt.enqueue(hidden, self.model, self._stream, inbox) for prompt in step.prompts]
        if step.at is None:
            return [self.model.logits(hidden)], None, prompts
        at = inbox.view(step.at)
        logits = [self.model.logits(hidden[at])] if len(at) else []
        sound = to_host(hidden[inbox.view(step.ends)].isfinite().all(-1), self._stream) if step.ends else None
        return logits, sound, prompts

    def _draw(self, step: PackedStep, logits: Tensor, inbox: Inbox) -> tuple[Tensor, CopiedLogprobs | None]:
        """LaunchedWork's drawn and reports."""
        kept = step.reports.keep(logits, inbox)
        step.adjustments.apply(logits, self._counts, inbox)
        if step.draws is None:
            assert self._decoder is not None
            told = self._decoder.draw()
        else:
            sampled = sample(logits, step.draws.params(inbox))
            self._table.last_token.index_copy_(0, inbox.view(step.draws.rows), sampled.tokens)
            told = told_of(sampled)
        if step.adjustments.penalties or step.reports.at:
            tokens = told.clamp(min=0)
            step.adjustments.count(tokens, self._counts, inbox)
            return to_host(told, self._stream), step.reports.enqueue(kept, tokens, self._stream, inbox)
        return to_host(told, self._stream), None

    def _uploaded(self, tokens: NDArray[np.int32]) -> Tensor:
        """int64, on the device."""
        packing = self._inbox.packing()
        section = packing.put(tokens)
        self._inbox.send(packing)
        return self._inbox.view(section)

    def _keep_decode_checkpoints(self, work: Work) -> None:
        """A decoding row's state stands at the wanted position when its step is done."""
        decoding = set(work.decodes)
        for checkpoint in work.checkpoints:
            if checkpoint.row in decoding:
                self.pools.copy(int(self._table.slots[checkpoint.row]), checkpoint.slot)


def survives(error: Exception) -> bool:
    """Whether the device can go on after this error of one call."""
    return not isinstance(error, torch.AcceleratorError)

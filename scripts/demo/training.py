"""The training loop: Muon and AdamW, a rate that falls at the end, and a file from which it can go on."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.demo.lessons import LESSONS, PARTS, Batches, Lesson
from scripts.demo.model import DemoModel

MUON_RATE, ADAM_RATE, WARM_UP, COOL_DOWN = 0.02, 3e-3, 100, 0.4
DECAY = 0.02
SAVED_EVERY_S = 180.0
SHOWN_EVERY = 50


@dataclass
class Training:
    """A model on its way through the lessons. seen: tokens so far, padding included; seconds: what that took."""

    model: DemoModel
    batches: Batches
    tokens: int
    forward: Callable[[Tensor], Tensor]
    autocast: bool = True
    seen: int = 0
    step: int = 0
    seconds: float = 0.0
    optimizers: list[torch.optim.Optimizer] = field(init=False)

    def __post_init__(self) -> None:
        self.optimizers = optimizers_for(self.model)
        self._threads = ThreadPoolExecutor(PARTS)
        self._peaks = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]

    def run(self, file: Path) -> None:
        """To the end, with a line every SHOWN_EVERY steps; what it takes to go on goes to `file` every few minutes."""
        begin, saved = time.monotonic() - self.seconds, time.monotonic()
        while self.seen < self.tokens:
            lesson, limit = self._lesson()
            for parts in self.batches.of(lesson):
                loss = self._learn(parts)
                self.seconds = time.monotonic() - begin
                if self.step % SHOWN_EVERY == 0:
                    self._show(loss)
                if time.monotonic() - saved > SAVED_EVERY_S:
                    self.save(file)
                    saved = time.monotonic()
                if self.seen >= limit:
                    break
        self.save(file)

    def save(self, file: Path) -> None:
        content: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "at": {name: getattr(self, name) for name in ("seen", "step", "seconds", "tokens")},
            "batches": {name: getattr(self.batches, name) for name in ("seed", "pool", "batch")},
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        torch.save(content, partial)
        os.replace(partial, file)

    def resume(self, file: Path) -> None:
        """Go on from `file`. ValueError if that is of another seed or length."""
        content = torch.load(file, weights_only=True)
        if content["batches"]["seed"] != self.batches.seed or content["at"]["tokens"] != self.tokens:
            raise ValueError(f"{file} is of another training: seed or tokens differ")
        self.model.load_state_dict(content["model"])
        for optimizer, state in zip(self.optimizers, content["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        for name, value in content["at"].items():
            setattr(self, name, value)
        for name, value in content["batches"].items():
            setattr(self.batches, name, value)

    def _lesson(self) -> tuple[Lesson, int]:
        """The lesson that is due, and at how many tokens it ends."""
        limit = 0.0
        for share, lesson in LESSONS:
            limit += share * self.tokens
            if self.seen < limit - 1:
                return lesson, round(limit)
        return lesson, self.tokens

    def _learn(self, parts: Sequence[tuple[Tensor, Tensor]]) -> float:
        """One step on a batch, each part and then each optimizer in a thread; the mean loss of its answers' tokens."""
        for optimizer, peak in zip(self.optimizers, self._peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate(self.step, self.seen / self.tokens)
        total = sum(float(weights[:, 1:].sum()) for _, weights in parts)
        losses, gradients = zip(*self._threads.map(lambda part: self._gradients(*part, total), parts), strict=True)
        for parameter, *found in zip(self.model.parameters(), *gradients, strict=True):
            parameter.grad = torch.stack(found).sum(0)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        list(self._threads.map(lambda optimizer: optimizer.step(), self.optimizers))
        self.seen += sum(ids[:, 1:].numel() for ids, _ in parts)
        self.step += 1
        return sum(losses) / sum(int((weights[:, 1:] == 1).sum()) for _, weights in parts)

    def _gradients(self, ids: Tensor, weights: Tensor, total: float) -> tuple[float, tuple[Tensor, ...]]:
        """The loss of the answers' tokens of a part, and its share in the gradient of the loss by `total` weights."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            logits = self.forward(ids[:, :-1])
        losses = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        weight = weights[:, 1:].flatten()
        gradients = torch.autograd.grad((losses * weight).sum() / total, list(self.model.parameters()))
        return float(losses.detach()[weight == 1].sum()), gradients

    def _show(self, loss: float) -> None:
        speed, left = self.seen / self.seconds, (self.tokens - self.seen) * self.seconds / self.seen / 60
        print(
            f"step {self.step}  tokens {self.seen / 1e6:.2f}M  answers' loss {loss:.4f}  "
            f"{speed:.0f} tokens/s  {left:.0f} min left",
            flush=True,
        )


def rate(step: int, done: float) -> float:
    """Share of the peak learning rate: linear warm-up, level, and a straight line to 1% over the last COOL_DOWN."""
    return min(1.0, (step + 1) / WARM_UP, max(0.01, (1 - done) / COOL_DOWN))


def optimizers_for(model: DemoModel) -> list[torch.optim.Optimizer]:
    """Muon for the projections, which needs about half the tokens here, AdamW for everything else."""
    projections = [p for name, p in model.named_parameters() if name.endswith(("proj.weight", "linear.weight"))]
    projections.sort(key=Tensor.numel)
    others = [p for name, p in model.named_parameters() if not name.endswith(("proj.weight", "linear.weight"))]
    return [
        *(torch.optim.Muon(projections[at::PARTS], lr=MUON_RATE, weight_decay=DECAY) for at in range(PARTS)),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]

"""The training loop: Muon and AdamW, a learning rate that falls at the end, and a file to resume from."""

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

MUON_RATE, ADAM_RATE = 0.02, 3e-3  # peak learning rates
WARM_UP, COOL_DOWN = 100, 0.4  # length in steps of the warm-up; length of the cool-down as a share of the training
DECAY = 0.02  # weight decay of Muon
SAVED_EVERY_S = 180.0
SHOWN_EVERY = 50


@dataclass
class Training:
    """A training in progress."""

    model: DemoModel
    batches: Batches
    tokens: int  # tokens to train on in all, padding included
    forward: Callable[[Tensor], Tensor]
    autocast: bool = True  # whether to compute matrix products in bfloat16
    seen: int = 0  # tokens that were trained on so far, padding included
    step: int = 0
    seconds: float = 0.0  # time of the training so far
    optimizers: list[torch.optim.Optimizer] = field(init=False)

    def __post_init__(self) -> None:
        self.optimizers = optimizers_for(self.model)
        self._threads = ThreadPoolExecutor(PARTS)
        self._peaks = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]

    def run(self, file: Path) -> None:
        """Train to the end. Print a line every SHOWN_EVERY steps, and save to `file` every SAVED_EVERY_S seconds."""
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
        """Write all that `resume` needs."""
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
        """Continue the training in `file`. Raises ValueError if the seed or the number of tokens differs."""
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
        """Return the current lesson, and the number of training tokens at which the lesson ends."""
        limit = 0.0
        for share, lesson in LESSONS:
            limit += share * self.tokens
            if self.seen < limit - 1:
                return lesson, round(limit)
        return lesson, self.tokens

    def _learn(self, parts: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Learn from one batch; return the mean loss of the answers' tokens.

        Each part has a thread that computes gradients. Then each optimizer has a thread that takes its step.
        """
        for optimizer, peak in zip(self.optimizers, self._peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate(self.step, self.seen / self.tokens)
        total = sum(float(weights[:, 1:].sum()) for _, weights in parts)
        found = list(self._threads.map(lambda part: self._gradients(part[0], part[1], total), parts))
        for parameter, *shares in zip(self.model.parameters(), *(gradients for _, gradients in found), strict=True):
            parameter.grad = torch.stack(shares).sum(0)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        list(self._threads.map(lambda optimizer: optimizer.step(), self.optimizers))
        self.seen += sum(ids[:, 1:].numel() for ids, _ in parts)
        self.step += 1
        return sum(loss for loss, _ in found) / sum(int((weights[:, 1:] == 1).sum()) for _, weights in parts)

    def _gradients(self, ids: Tensor, weights: Tensor, total: float) -> tuple[float, tuple[Tensor, ...]]:
        """Return the summed loss of a part's answer tokens, and the part's share of the gradient.

        total: sum of the weights of the whole batch.
        """
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
    """Return the learning rate relative to its peak: linear warm-up, constant, then linear to 1% during COOL_DOWN.

    done: share of the training that is done.
    """
    return min(1.0, (step + 1) / WARM_UP, max(0.01, (1 - done) / COOL_DOWN))


def optimizers_for(model: DemoModel) -> list[torch.optim.Optimizer]:
    """Return Muon for the projections (Muon needs about half the tokens here) and AdamW for everything else."""
    projections = [p for name, p in model.named_parameters() if name.endswith(("proj.weight", "linear.weight"))]
    projections.sort(key=Tensor.numel)
    others = [p for name, p in model.named_parameters() if not name.endswith(("proj.weight", "linear.weight"))]
    return [
        *(torch.optim.Muon(projections[at::PARTS], lr=MUON_RATE, weight_decay=DECAY) for at in range(PARTS)),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]

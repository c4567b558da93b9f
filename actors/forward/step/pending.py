"""A step that has been enqueued on the device's stream."""

from dataclasses import dataclass
from itertools import compress

from torch import Tensor

from baton.actors.forward.launching import Done
from baton.actors.forward.step.packed import PackedStep
from baton.actors.forward.step.reporting import CopiedLogprobs
from baton.actors.forward.streams import Event
from baton.actors.messages import Ran
from baton.actors.requests import RowLogprobs, RowPooled
from baton.actors.tokens import pack


@dataclass(frozen=True, slots=True)
class LaunchedWork:
    """The Pending of a step. Its tensors are in host memory, and complete when `ended` has passed."""

    step: PackedStep
    began: Event
    ended: Event
    waited: tuple[Event, Event] | None  # the points between which the device waited for late masks; None: it did not
    drawn: Tensor  # int64 [draws]: the tokens, -1 where the logits were not finite
    sound: Tensor | None  # bool: whether each chunk of step.unsampled ended in finite hidden states; None without any
    reports: CopiedLogprobs | None  # the log probabilities of the draws that report
    prompts: list[CopiedLogprobs]  # one for each of step.prompts
    predicted: Tensor | None  # the result of step.predictions.predict
    pooled: list[Tensor | None]  # the results of PooledChunk.enqueue, one for each of step.pooled

    def passed(self) -> bool:
        return self.ended.passed()

    def collect(self) -> Done[Ran]:
        self.ended.wait()
        step, drawn = self.step, self.drawn.tolist()
        of_prompts = zip(step.prompts, self.prompts, strict=True)
        of_pooled = zip(step.pooled, self.pooled, strict=True)
        of_draws = zip(step.reports.of, self.reports.items() if self.reports else [], strict=True)
        ran = Ran(
            step.work.step,
            pack([max(token, 0) for token in drawn]),
            [RowLogprobs(grant, at, [item]) for (grant, at), item in of_draws],
            step.first + [RowLogprobs(prompt.grant, prompt.first, copied.items()) for prompt, copied in of_prompts],
            not_finite=[row for row, token in enumerate(drawn) if token < 0],
            unsound=list(compress(step.unsampled, (~self.sound).tolist())) if self.sound is not None else [],
            predicted=step.predictions.by_row(self.predicted.tolist())
            if step.predictions and self.predicted is not None
            else {},
            pooled=[RowPooled(c.row.grant, mean.numpy().tobytes()) for c, mean in of_pooled if mean is not None],
        )
        seconds = self.ended.seconds_since(self.began)
        if self.waited is not None:
            before, after = self.waited
            seconds -= after.seconds_since(before)
        return Done(ran, seconds)

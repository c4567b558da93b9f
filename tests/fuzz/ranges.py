"""Ranges of the numbers in a request that reaches the device. The device does not check them again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from baton.actors.forward.torch_device import TorchDevice
from baton.actors.requests import Request
from baton.actors.tokens import unpack

MAX_TOP = 20


def wrong_numbers(request: Request, vocab: int, max_model_len: int) -> list[str]:
    """Return the names of the fields that are out of range.

    A parameter that clients may only set above 0 may be 0 here: the device's thread flushes denormals to 0.
    """
    sampling, stops, ids = request.sampling, request.stops, unpack(request.tokens)
    begin, end = request.pooled or (0, 1)
    start, most = request.prompt_logprobs_from, max_model_len - request.prompt_len
    sound = {
        "tokens": bool(ids) and all(0 <= id < vocab for id in ids),
        "logit_bias": all(0 <= id < vocab and abs(bias) <= 100 for id, bias in sampling.logit_bias.items()),
        "stop tokens": all(0 <= id < vocab for id in stops.token_ids),
        "seed": 0 <= sampling.seed < 2**63,
        "top_k": 0 <= sampling.top_k < 2**31,
        "probabilities": 0 <= sampling.top_p <= 1 and 0 <= sampling.min_p <= 1,
        "temperature": 0 <= sampling.temperature <= 100,
        "repetition": 0.01 <= sampling.repetition_penalty <= 10,
        "penalties": max(abs(sampling.presence_penalty), abs(sampling.frequency_penalty)) <= 2,
        "limits": 0 <= stops.min_tokens <= stops.max_tokens and 1 <= stops.max_tokens <= most,
        "logprobs": request.logprobs is None or 0 <= request.logprobs <= MAX_TOP,
        "logprob_ids": all(0 <= id < vocab for id in request.logprob_ids),
        "prompt_logprobs_from": start is None or 0 <= start < request.prompt_len,
        "pooled": 0 <= begin < end <= request.prompt_len,
        "message_ends": all(0 < end <= request.prompt_len for end in request.message_ends),
        "checkpoints": all(0 < position < request.prompt_len for position in request.checkpoints),
        "priority": -(2**31) <= request.priority < 2**31,
    }
    return [name for name, is_sound in sound.items() if not is_sound]


@contextmanager
def watching(report: Callable[[Request], None]) -> Iterator[None]:
    """Call `report` with each request that reaches the device while the block runs, before the device handles it."""

    def open_row(device: TorchDevice, row: int, grant: int, slot: int, request: Request, pages: list[int]) -> None:
        report(request)
        real(device, row, grant, slot, request, pages)

    real = TorchDevice.open_row
    with mock.patch.object(TorchDevice, "open_row", open_row):
        yield

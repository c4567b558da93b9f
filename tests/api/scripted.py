"""A model with scripted replies: its n-th answer in a chat is the n-th reply.

The model's state counts the answers that have begun, and the tokens of the current answer. So a lost, stale or foreign
state shows as a wrong answer.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from baton.models.batch import Batch, Pools, TensorSpec

LOGIT = 100.0
ANSWERS = 2**20  # a state is (answers begun) · ANSWERS + (tokens so far of the current answer's header and reply)
SPECIAL, PLAIN = ("<|im_start|>", "<|im_end|>", "<think>"), ("</think>", "<tool_call>", "</tool_call>")
TEMPLATE = Path(__file__).parents[1] / "models" / "text" / "templates" / "hermes.jinja"


class ScriptedModel:
    """An implementation of models.batch.Model."""

    def __init__(self, vocab_size: int, header: list[int], replies: list[list[int]], end: int) -> None:
        """header: the tokens that begin an answer. end: the token that ends it."""
        self.vocab_size = vocab_size
        self.chunk_size = 8
        self.max_position = 2**17
        self._header = header
        self._replies = replies
        self._end = end

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ScriptedModel":
        return cls(config["vocab_size"], config["header"], config["replies"], config["eos_token_id"])

    def state_specs(self) -> list[TensorSpec]:
        return [TensorSpec((), torch.int64)]

    def kv_specs(self) -> list[TensorSpec]:
        return []

    def ring_specs(self) -> list[TensorSpec]:
        return []

    def forward(self, batch: Batch, pools: Pools) -> Tensor:
        """Return the state after each token: int64 [tokens, 1]."""
        slots, states, tokens = pools.state[0], list[int](), batch.tokens.tolist()
        if (prefill := batch.prefill) is not None:
            for segment, (start, slot) in enumerate(zip(prefill.starts, prefill.slots, strict=True)):
                state, saved = (
                    int(slots[slot]),
                    {c.position: c.slot for c in prefill.checkpoints if c.segment == segment},
                )
                for index in range(prefill.offsets[segment], prefill.offsets[segment + 1]):
                    state = self._next(state, tokens[index])
                    states.append(state)
                    position = start + index - prefill.offsets[segment] + 1
                    if position in saved:
                        slots[saved[position]] = state
                slots[slot] = state
        if batch.decode is not None:
            for slot, token in zip(batch.decode.slots.tolist(), tokens[len(states) :], strict=True):
                slots[slot] = self._next(int(slots[slot]), token)
                states.append(int(slots[slot]))
        return torch.tensor(states)[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        ids = torch.tensor([[self._says(state)] for state in hidden[:, 0].tolist()])
        return torch.zeros(len(hidden), self.vocab_size).scatter_(1, ids, LOGIT)

    def _next(self, state: int, token: int) -> int:
        answers, come = divmod(state, ANSWERS)
        if token == self._header[0]:
            return answers * ANSWERS + 1
        if 0 < come < len(self._header):
            matches = token == self._header[come]
            begun = matches and come + 1 == len(self._header)
            return (answers + begun) * ANSWERS + (come + 1 if matches else 0)
        return answers * ANSWERS + (come + 1 if come and token == self._says(state) else 0)

    def _says(self, state: int) -> int:
        answers, come = divmod(state, ANSWERS)
        if come < len(self._header):
            return self._end
        reply = self._replies[(answers - 1) % len(self._replies)]
        index = come - len(self._header)
        return reply[index] if index < len(reply) else self._end


def make_checkpoint(folder: Path, replies: Sequence[str], template: str | None = None) -> Path:
    """Make a checkpoint with these replies for tests.api.scripted_server. template: by default one like Qwen3's."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in PLAIN])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template or TEMPLATE.read_text(encoding="utf-8"), encoding="utf-8")
    config = {
        "model_type": "scripted",
        "vocab_size": tokenizer.get_vocab_size(),
        "header": tokenizer.encode("<|im_start|>assistant\n").ids,
        "replies": [tokenizer.encode(reply).ids for reply in replies],
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder

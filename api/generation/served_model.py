"""The loaded model for request handlers: tokenizer, chat template, output formats and limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.api.generation.structured import GrammarCompiler, no_grammars
from baton.models.loading.pooling import NO_EMBEDDINGS, EmbeddingRecipe
from baton.models.text.detokenizer import Detokenizer
from baton.models.text.formats.picking import OutputFormats
from baton.models.text.template import Beginning, KeptReasoning


class Text(Protocol):
    """The interface of tokenizer and chat template, which models/text implements."""

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def max_token_bytes(self) -> int | None:
        """The maximum bytes of text that one token stands for; None if unknown."""
        ...

    @property
    def generation_defaults(self) -> dict[str, Any]: ...

    def detokenizer(self, prompt_tail: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        """Return the incremental decoder of an output that follows the tokens `prompt_tail`."""
        ...

    @property
    def added_tokens(self) -> frozenset[str]:
        """The texts of the tokens that were added to the vocabulary, special or not."""
        ...

    @property
    def templates(self) -> Mapping[str, str]:
        """The sources of the chat templates, by name."""
        ...

    @property
    def template_variables(self) -> frozenset[str]:
        """All variables that the chat templates read."""
        ...

    @property
    def kept_reasoning(self) -> KeptReasoning | None:
        """How the chat template shows the reasoning of earlier turns; None if it cannot."""
        ...

    @property
    def between_parts(self) -> str:
        """The string that the chat template puts between two parts of a message's text."""
        ...

    @property
    def tokenizer_info(self) -> dict[str, Any]:
        """The content of tokenizer_config.json, and the chat template."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> tuple[list[int], list[int]]:
        """Return a prompt's tokens and the positions where messages end. Raises ValueError if the template refuses."""
        ...

    def encode_marked_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        beginnings: Sequence[Beginning],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        salt: str = "",
        **variables: Any,
    ) -> tuple[list[int], list[int], list[int]]:
        """Return the result of `encode_chat` and, for each beginning of the chat, the position where it ends.

        The tokens of rendered text are remembered, and reused only under the same `salt`.
        """
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, id: int) -> bytes | None:
        """Return the bytes that a token stands for; None if they are not known."""
        ...


@dataclass(frozen=True)
class ServedModel:
    """The loaded model, with everything that handlers need to know about it."""

    text: Text
    vocab_size: int
    max_model_len: int  # maximum tokens of prompt and answer together
    info: dict[str, Any] = field(default_factory=dict)  # the answer of /model_info
    formats: OutputFormats = field(default_factory=OutputFormats)  # how the model writes reasoning and tool calls
    grammars: GrammarCompiler = field(default_factory=no_grammars)
    max_running: int = 16  # maximum requests that run at once
    reasoning_budget: int | None = None  # the most tokens of reasoning, unless a request states its own
    preserves_reasoning: bool = False  # chats show the reasoning of earlier turns, unless a request says otherwise
    embedding: EmbeddingRecipe = NO_EMBEDDINGS
    hidden_size: int = 0  # numbers of a hidden state, and so of an embedding
    weights: str = ""  # fingerprint of the weights and of the layout of states; empty: unknown

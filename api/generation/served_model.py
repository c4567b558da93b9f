"""The loaded model as requests see it: its text side, and its limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.api.generation.structured import GrammarCompiler, no_grammars
from baton.models.text.formats.picking import OutputFormats
from baton.models.text.template import Beginning


class Text(Protocol):
    """The tokenizer and chat template, as models.text has them."""

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def max_token_bytes(self) -> int | None:
        """No token stands for more bytes of a text than this; None where that cannot be told."""
        ...

    @property
    def generation_defaults(self) -> dict[str, Any]: ...

    @property
    def added_tokens(self) -> frozenset[str]:
        """The texts for which the tokenizer has a token each, special or not."""
        ...

    @property
    def templates(self) -> Mapping[str, str]:
        """The sources of its chat templates by name."""
        ...

    @property
    def template_variables(self) -> frozenset[str]:
        """All names that its chat templates read."""
        ...

    @property
    def between_parts(self) -> str:
        """What its chat template puts between two parts of a message's text."""
        ...

    @property
    def tokenizer_info(self) -> dict[str, Any]:
        """tokenizer_config.json, and the chat template."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> tuple[list[int], list[int]]:
        """The prompt's tokens, and the positions at which messages end. ValueError if the template refuses the chat."""
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
        """As `encode_chat`, and the positions up to which the chat's tokens are those of its beginnings.

        What is remembered of it serves those of the same salt only.
        """
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True)
class ServedModel:
    """A loaded model. max_model_len counts prompt and answer together; `info` is shown by /model_info.

    formats: how it writes reasoning and calls of tools.
    grammars: compiles what an output has to follow.
    """

    text: Text
    vocab_size: int
    max_model_len: int
    info: dict[str, Any] = field(default_factory=dict)
    formats: OutputFormats = field(default_factory=OutputFormats)
    grammars: GrammarCompiler = field(default_factory=no_grammars)

"""A chat whose final message is left open is rendered up to the same character as in transformers."""

from pathlib import Path

import pytest

from baton.models.text.tokenizer import TemplateError
from tests.models.oracle import Oracle
from tests.models.text.test_tokenizer import CHATML, loaded

TRIMMING = CHATML.replace("m.content", "m.content | trim")
NEWEST_ONLY = "{% for m in messages %}{{ '[' + m.role + ']' + (m.content if loop.last else '') + '\n' }}{% endfor %}"
TEMPLATES = {
    "chatml": CHATML,
    "trimming": TRIMMING,
    "newest only": NEWEST_ONLY,
    "shouting": CHATML.replace("m.content", "m.content | upper"),
    "without the last": CHATML.replace("in messages", "in messages[:-1]"),
    "thinking left out": CHATML.replace("m.content", "m.content.split('</think>')[-1]"),
}
CONTENTS = ["The answer is", "The answer is ", " two\n\n", "", "  ", "Hé <b>", "so</think>I say", "x", "<|im_end|>"]
ROLES = ["assistant", "user"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_it_ends_as_in_transformers(tmp_path: Path, oracle: Oracle, name: str) -> None:
    text = loaded(tmp_path, TEMPLATES[name])
    refused = 0
    for content in CONTENTS:
        for role in ROLES:
            chat = [{"role": "user", "content": "x is so</think>"}, {"role": role, "content": content}]
            right = oracle.continued(TEMPLATES[name], chat)
            if right is None:
                refused += 1
                with pytest.raises(TemplateError, match="cannot be continued"):
                    text.encode_chat(chat, add_generation_prompt=False, continue_final_message=True)
                continue
            ids, ends = text.encode_chat(chat, add_generation_prompt=False, continue_final_message=True)
            assert text.decode(ids, skip_special_tokens=False) == right
            assert all(right.startswith(text.render_chat(chat[:1], False)) for end in ends)
    assert (refused > 0) == (name in ("shouting", "without the last", "thinking left out"))


def test_earlier_messages_end_where_they_did(tmp_path: Path) -> None:
    text = loaded(tmp_path, CHATML)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]
    ids, ends = text.encode_chat(chat, add_generation_prompt=False, continue_final_message=True)
    assert text.decode(ids, False) == text.render_chat(chat[:1], True) + "Hel"
    assert [text.decode(ids[:end], False) for end in ends] == [text.render_chat(chat[:1], False)]

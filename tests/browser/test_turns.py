"""Turns: sending a message, reading the answer as it streams, stopping it, coming back to it."""

import re
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import expect

from tests.api.scripted import make_checkpoint
from tests.api.server_process import ServerProcess
from tests.browser.driving import PATIENCE_MS, WATCH, Tab


def test_an_answer_streams(tab: Tab) -> None:
    tab.page.evaluate(WATCH)
    assert tab.talk("What can you do?") == [
        "I can remember what you tell me, calculate, count, sort, spell backwards and call tools."
    ]
    lengths = tab.page.evaluate("lengths")
    assert lengths == sorted(lengths)
    assert len(lengths) >= 5
    expect(tab.page.locator("#spoken")).to_have_text(tab.answers()[0])
    expect(tab.page.locator("#title")).to_have_text("What can you do?")


def test_a_turn_resumes_from_the_state(tab: Tab) -> None:
    assert tab.talk("My name is Clara.", "What is my name?") == ["Nice to meet you, Clara!", "Your name is Clara."]
    first, second = tab.stored()["turns"]  # type: ignore[misc]
    # The state lacks the turn's last token unless another step was in flight when that token was drawn.
    assert second["cached_tokens"] in (first["position"], first["position"] - 1)
    read = first["position"] + second["input_tokens"] - second["cached_tokens"]
    figures = tab.turns.nth(1).locator(".figures")
    expect(figures).to_contain_text(f"{second['cached_tokens']} from the state, {read} read")
    expect(figures).to_contain_text(f"{second['output_tokens']} tokens")
    expect(figures).to_contain_text(re.compile(r"\d+ tokens/s"))
    expect(figures).to_contain_text(re.compile(r"first token [\d.]+ m?s"))
    expect(tab.page.locator("#subtitle")).to_contain_text(f"2 turns · {second['position']} of 8,192 tokens")


def test_stop_keeps_the_text_so_far(tab: Tab) -> None:
    tab.begin_long()
    tab.page.get_by_role("button", name="Stop the answer").click()
    tab.sees("Stopped")
    expect(tab.box).to_be_focused()
    [turn] = tab.stored()["turns"]  # type: ignore[misc]
    assert turn["status"] == "aborted"
    assert tab.answers() == [turn["text"]]
    tab.talk("What is 7 plus 5?")
    assert [turn["status"] for turn in tab.stored()["turns"]] == ["aborted", "completed"]  # type: ignore[attr-defined]


def test_a_chat_survives_a_reload(tab: Tab) -> None:
    before = tab.talk("My favourite colour is teal.", "What is my favourite colour?")
    figures = tab.page.locator(".figures").all_text_contents()
    tab.box.fill("What was")
    tab.page.reload()
    expect(tab.turns).to_have_count(2)
    assert tab.answers() == before
    assert tab.page.locator(".figures").all_text_contents() == figures
    expect(tab.box).to_have_value("What was")
    assert tab.connected().talk("What is my favourite colour?")[-1] == before[-1]


def test_a_running_answer_survives_a_reload(tab: Tab) -> None:
    tab.begin_long()
    text = tab.writing.text_content() or ""
    tab.page.reload()
    expect(tab.writing).to_have_text(re.compile(re.escape(text) + ".{20}", re.DOTALL), timeout=PATIENCE_MS)
    tab.page.keyboard.press("Escape")
    tab.sees("Stopped")
    [turn] = tab.stored()["turns"]  # type: ignore[misc]
    assert tab.answers() == [turn["text"]]


def test_two_chats_are_answered_at_once(tab: Tab) -> None:
    tab.begin_long()
    long = tab.session
    tab.page.get_by_role("button", name="New chat").click()
    assert tab.talk("My name is Clara.") == ["Nice to meet you, Clara!"]
    tab.page.locator(f"[data-id='{long}']").click()
    length = len(tab.writing.text_content() or "")
    expect(tab.writing).to_have_text(re.compile(f".{{{length + 5}}}", re.DOTALL))
    tab.page.keyboard.press("Escape")
    tab.sees("Stopped")


def test_an_example_is_one_click_away(tab: Tab) -> None:
    expect(tab.page.get_by_role("heading", name="Say something")).to_be_visible()
    tab.page.get_by_role("button", name="What is 7 plus 5?").click()
    expect(tab.turns).to_have_count(1)
    assert tab.answers() == ["7 plus 5 is 12."]


def test_markup_is_only_text(tab: Tab) -> None:
    tab.talk("<img src=x onerror=alert(1)> **bold** &amp;")
    expect(tab.page.locator(".said .words")).to_have_text("<img src=x onerror=alert(1)> **bold** &amp;")


def test_reasoning_is_shown_separately(new_tab: Callable[..., Tab], tmp_path: Path) -> None:
    """The reasoning of a finished answer is folded, opens with a click, and survives a reload."""
    folder = make_checkpoint(tmp_path, ["<think>\nIs it <b>late</b>?\n</think>\n\nIt is."])
    with ServerProcess(["tests.api.scripted_server", str(folder)]) as server:
        tab = new_tab(server).open()
        assert tab.talk("Hi") == ["It is."]
        for _ in range(2):
            thought = tab.page.locator(".thought div")
            expect(thought).to_be_hidden()
            tab.page.get_by_text("Reasoning", exact=True).click()
            expect(thought).to_have_text("Is it <b>late</b>?")
            tab.page.reload()
            expect(tab.turns).to_have_count(1)
        assert tab.answers() == ["It is."] and tab.errors == []

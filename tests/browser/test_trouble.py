"""Errors in the page: they are shown where they happen, the page recovers if it can, and no typed text is lost."""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.api.server_process import SERVE, ServerProcess
from tests.browser.driving import PATIENCE_MS, Tab, delete

KEY = "s3cret/ key (100%)"


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.fixture
def rough_tab(new_tab: Callable[..., Tab], server: ServerProcess) -> Tab:
    """Return a tab whose requests may fail, so that its console may report errors."""
    return new_tab(server)


def test_a_chat_that_is_gone(rough_tab: Tab) -> None:
    tab = rough_tab.open()
    tab.talk("My name is Clara.")
    delete(tab.server, tab.session)
    tab.say("What is my name?")
    tab.sees("This chat is gone")
    expect(tab.box).to_have_value("What is my name?")
    assert tab.answers() == ["Nice to meet you, Clara!"]
    tab.button("Start a new chat").click()
    expect(tab.box).to_have_value("What is my name?")
    tab.box.press("Enter")
    expect(tab.turns).to_have_count(1)
    assert tab.answers() == ["You have not told me your name yet."]


def test_a_link_to_an_unknown_chat(rough_tab: Tab) -> None:
    tab = rough_tab.open("/#nothing-here")
    tab.sees("This chat is gone")
    tab.button("Start a new chat").click()
    assert tab.talk("My name is Clara.") == ["Nice to meet you, Clara!"]


def test_a_turn_that_runs_elsewhere(rough_tab: Tab) -> None:
    tab = rough_tab.open()
    tab.talk("My name is Clara.")
    body = {"messages": [{"role": "user", "content": "Hello!"}], "ignore_eos": True, "max_tokens": 2500}
    elsewhere = threading.Thread(target=tab.server.post, args=(f"/v1/sessions/{tab.session}/turns", body))
    elsewhere.start()
    tab.server.wait_until(lambda: tab.stored()["status"] == "busy")
    tab.say("What is my name?")
    tab.sees("A turn is running in this chat. Your message is back in the box.")
    expect(tab.box).to_have_value("What is my name?")
    elsewhere.join()
    expect(tab.turns).to_have_count(2, timeout=PATIENCE_MS)
    tab.box.press("Enter")
    expect(tab.turns).to_have_count(3, timeout=PATIENCE_MS)


def test_a_chat_that_went_on_elsewhere(rough_tab: Tab) -> None:
    tab = rough_tab.open()
    tab.talk("My name is Clara.")
    tab.server.post(f"/v1/sessions/{tab.session}/turns", {"messages": [{"role": "user", "content": "Hello!"}]})
    tab.say("What is my name?")
    tab.sees("This chat has gone on elsewhere. Your message is back in the box.")
    expect(tab.turns).to_have_count(2)
    tab.box.press("Enter")
    expect(tab.turns).to_have_count(3)
    assert tab.answers()[-1] == "Your name is Clara."


def test_a_message_that_is_too_long(rough_tab: Tab) -> None:
    tab = rough_tab.open()
    tab.say("qxz " * 2500)
    expect(tab.page.get_by_role("alert")).to_contain_text("8192")
    expect(tab.box).to_have_value("qxz " * 2500)
    tab.talk("What is 7 plus 5?")


def test_a_lost_connection_comes_back(rough_tab: Tab) -> None:
    tab = rough_tab.open()
    tab.begin_long()
    text = tab.writing.text_content() or ""
    tab.page.evaluate("link.socket.close()")
    expect(tab.page.locator("#link")).not_to_have_attribute("data-state", "open")
    tab.connected()
    expect(tab.writing).to_have_text(re.compile(re.escape(text) + ".{20}", re.DOTALL), timeout=PATIENCE_MS)
    tab.page.keyboard.press("Escape")
    tab.sees("Stopped")
    assert [turn["text"] for turn in tab.stored()["turns"]] == tab.answers()  # type: ignore[attr-defined]


def test_a_restart_of_the_server(new_tab: Callable[..., Tab], browser: Browser, tmp_path: Path) -> None:
    port = free_port()
    arguments = (*SERVE, "--port", str(port), "--session-dir", str(tmp_path))
    with ServerProcess(arguments) as server:
        tab = new_tab(server).open()
        tab.talk("My name is Clara.")
        tab.box.fill("What is my name?")
    expect(tab.page.locator("#link[data-state=waiting]")).to_be_visible()
    expect(tab.button("Send")).to_be_disabled()
    tab.box.press("Enter")
    tab.sees("Not connected: your message stays in the box.")
    with ServerProcess(arguments):
        tab.connected()
        tab.box.press("Enter")
        expect(tab.turns).to_have_count(2, timeout=PATIENCE_MS)
        assert tab.answers()[-1] == "Your name is Clara."


@pytest.fixture(scope="module")
def locked(browser: Browser) -> Iterator[ServerProcess]:
    with ServerProcess((*SERVE, "--api-key", KEY)) as server:
        yield server


def test_an_api_key(new_tab: Callable[..., Tab], locked: ServerProcess) -> None:
    tab = new_tab(locked)
    tab.page.goto(locked.url)
    field = tab.page.get_by_label("API key", exact=True)
    field.fill("wrong")
    field.press("Enter")
    tab.sees("That key was not accepted.")
    field.fill(KEY)
    field.press("Enter")
    tab.connected()
    assert tab.talk("My name is Clara.", "What is my name?")[-1] == "Your name is Clara."
    tab.page.reload()
    tab.connected()
    expect(tab.turns).to_have_count(2)
    assert tab.page.evaluate("JSON.stringify(localStorage)").find("s3cret") == -1
    assert not [url for url in tab.requests if "s3cret" in url]
    other = tab.context.new_page()
    other.goto(tab.page.url)
    expect(other.get_by_label("API key", exact=True)).to_be_visible()

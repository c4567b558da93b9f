"""The map of the slots: it is live, shows every slot, and marks the slots of this chat."""

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.api.server_process import SERVE, ServerProcess
from tests.browser.driving import PATIENCE_MS, Tab

# Whether each turn has a marked slot. The slot's state may lack the last token of the turn.
ALL_MARKED = """
(positions) => {
  const marked = [...document.querySelectorAll(".slot[data-place=cached].mine")].map((cell) => cell.entry.position);
  return positions.every((position) => marked.includes(position) || marked.includes(position - 1));
}
"""


def counted(tab: Tab) -> dict[str, int]:
    rows = tab.page.locator("#legend li")
    names = rows.locator("span").evaluate_all("spans => spans.map((span) => span.firstChild.data)")
    return dict(zip(names, map(int, rows.locator("b").all_text_contents()), strict=True))


def test_every_slot_is_shown(tab: Tab) -> None:
    tab.talk("My name is Clara.")
    expect(tab.page.locator(".slot[data-place=cached]").first).to_be_visible()
    places = [entry["place"] for entry in tab.server.get("/debug/slots")]
    expect(tab.page.locator(".slot")).to_have_count(len(places))
    expect(tab.page.locator(".slot[data-place=cached]")).to_have_count(places.count("cached"))
    legend = counted(tab)
    assert legend["Cached"] == places.count("cached") > 0
    assert sum(legend.values()) - legend["This chat"] == len(places)


def test_a_running_answer_holds_a_slot(tab: Tab) -> None:
    tab.begin_long()
    own = tab.page.locator(".slot[data-place=owned].mine[aria-label*=forward]")
    expect(own).to_have_text("F", timeout=PATIENCE_MS)
    own.hover()
    about = tab.page.locator("#about")
    expect(about).to_contain_text("owned by forward")
    expect(about).to_contain_text("this chat")
    tab.page.keyboard.press("Escape")
    tab.sees("Stopped")
    expect(own).to_have_count(0)


def test_the_states_of_this_chat_are_marked(tab: Tab) -> None:
    tab.talk("My name is Ottilie.", "What is my name?")
    mine = tab.page.locator(".slot[data-place=cached].mine")
    expect(mine.first).to_be_visible()
    positions = {turn["position"] for turn in tab.stored()["turns"]}  # type: ignore[attr-defined]
    # The map is polled once a second, and a turn's state returns to the cache after its last token.
    tab.page.wait_for_function(ALL_MARKED, arg=sorted(positions), timeout=PATIENCE_MS)
    tab.page.get_by_role("button", name="New chat").click()
    expect(mine).to_have_count(0)


def test_other_engines_are_shown_with_the_states_on_their_way(new_tab: Callable[..., Tab], tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'link'}"
    serve = (*SERVE, "--engine-name")
    with (
        ServerProcess((*serve, "first", "--role", "prefill", "--peer-listen", address)),
        ServerProcess((*serve, "second", "--peer", address)) as second,
    ):
        peer = new_tab(second).open().page.locator("#peers li")
        expect(peer).to_contain_text("first", timeout=PATIENCE_MS)
        expect(peer).to_contain_text("peer (prefill): 0 asked for, 0 for it")


def test_the_slots_are_not_polled_while_hidden(tab: Tab) -> None:
    expect(tab.page.locator(".slot").first).to_be_visible()
    tab.page.get_by_role("button", name="Close the state slots").click()
    count = len(tab.requests)
    tab.page.wait_for_timeout(1500)
    assert len(tab.requests) == count
    tab.page.get_by_role("button", name="State slots").click()
    tab.page.wait_for_timeout(1500)
    assert len([url for url in tab.requests[count:] if "/debug/slots" in url]) >= 2


@pytest.mark.soak  # starts three servers
def test_a_router_shows_the_slots_of_all_engines(server: ServerProcess, new_tab: Callable[..., Tab]) -> None:
    with ServerProcess([*SERVE, "--engine-name", "second"]) as second:
        urls = [part for engine in (server, second) for part in ("--engine", engine.url)]
        with ServerProcess(["baton.api.cli", "route", "--port", "0", "--log-format", "json", *urls]) as router:
            tab = new_tab(router).open()
            tab.talk("My name is Clara.")
            expect(tab.page.locator("#slots h3")).to_have_count(2)
            both = sum(len(engine.get("/debug/slots")) for engine in (server, second))
            expect(tab.page.locator(".slot")).to_have_count(both)
            expect(tab.page.locator(".slot[data-place=cached].mine").first).to_be_visible()
            tab.page.locator(".slot").last.hover()
            expect(tab.page.locator("#about")).to_contain_text("of second")

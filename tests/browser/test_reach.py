"""Accessibility: keyboard only, phones, light and dark themes, reduced motion, screen readers."""

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.api.server_process import ServerProcess
from tests.browser.driving import Tab

PHONE = {"viewport": {"width": 360, "height": 640}, "has_touch": True, "is_mobile": True}
# A name that is wider than the phone's screen, and that the model can repeat.
LONG_WORD = "Bergenkrakovalenciamarsellebristolhiroshimajakartamelbourne"
ENOUGH_CONTRAST = 4.5
# Returns [contrast to the background, text] for every text, lowest contrast first.
# A canvas converts all colours to plain RGB.
CONTRASTS = """
() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const paint = (colours) => {
    for (const colour of ["white", ...colours]) {
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
    }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const luminance = (colours) => {
    const [red, green, blue] = paint(colours).map((part) => linear(part / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05;
  };
  const behind = (node) => (node ? [...behind(node.parentElement), getComputedStyle(node).backgroundColor] : []);
  const isText = (child) => child.nodeType === Node.TEXT_NODE && child.data.trim();
  const shown = (node) => node.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const texts = [...document.body.querySelectorAll("*")].filter(
    (node) => [...node.childNodes].some(isText) && shown(node) && !node.matches(":disabled, :disabled *"),
  );
  const contrast = (node) => {
    const ground = behind(node);
    const both = [luminance(ground), luminance([...ground, getComputedStyle(node).color])];
    return [Math.max(...both) / Math.min(...both), node.textContent.trim().slice(0, 40)];
  };
  return texts.map(contrast).sort(([a], [b]) => a - b);
}
"""


def focused(page: Page) -> str:
    return str(
        page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent.trim()")
    )


def tab_to(page: Page, name: str, key: str = "Tab") -> None:
    """Press Tab until the element called `name` has the focus; check that the focus is visible at every stop."""
    for _ in range(40):
        page.keyboard.press(key)
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none" or page.evaluate(
            "document.activeElement.id === 'text'"  # The box around the text field has its outline.
        )
        if focused(page) == name:
            return
    raise AssertionError(f"{name!r} cannot be reached")


def overflows(page: Page) -> bool:
    places = "[document.documentElement, document.querySelector('#scroll'), document.querySelector('#map .body')]"
    return bool(page.evaluate(f"{places}.some((place) => place.scrollWidth > place.clientWidth)"))


def test_by_keyboard_alone(tab: Tab) -> None:
    keys = tab.page.keyboard
    expect(tab.box).to_be_focused()
    keys.type("My name is")
    keys.press("Shift+Enter")
    keys.type("Clara.")
    expect(tab.box).to_have_value("My name is\nClara.")
    keys.press("Enter")
    expect(tab.turns).to_have_count(1)
    expect(tab.box).to_be_focused()
    keys.type("Tell me at length.")
    keys.press("Enter")
    expect(tab.writing).not_to_be_empty()
    keys.press("Escape")
    tab.sees("Stopped")
    tab_to(tab.page, "Rewind to turn 1", "Shift+Tab")
    keys.press("Enter")
    tab_to(tab.page, "Rewind")
    keys.press("Enter")
    expect(tab.turns).to_have_count(1)
    expect(tab.box).to_be_focused()
    tab_to(tab.page, "Fork at turn 1", "Shift+Tab")
    keys.press("Enter")
    tab.sees("Forked at turn 1.")
    expect(tab.box).to_be_focused()
    tab_to(tab.page, "Delete this chat", "Shift+Tab")
    keys.press("Enter")
    keys.press("Escape")
    expect(tab.page.locator("#confirm")).to_be_hidden()
    expect(tab.button("Delete this chat")).to_be_focused()
    tab_to(tab.page, "New chat", "Shift+Tab")
    keys.press("Enter")
    expect(tab.box).to_be_focused()
    expect(tab.turns).to_have_count(0)


def test_the_focus_stays_when_the_chat_is_rendered_again(tab: Tab) -> None:
    tab.talk("My name is Clara.", "What is my name?")
    for place, name in (("#log", "Copy the answer of turn 1"), ("#chats", "My name is Clara.")):
        button = tab.page.locator(place).get_by_role("button", name=name)
        button.focus()
        tab.page.evaluate("showChat()")
        expect(button).to_be_focused()


def test_the_slots_by_keyboard(tab: Tab) -> None:
    tab.talk("My name is Clara.")
    tab_to(tab.page, "Close the state slots")
    tab.page.keyboard.press("Tab")
    about = tab.page.locator("#about")
    expect(about).to_contain_text("Slot 0: ")
    tab.page.keyboard.press("ArrowRight")
    expect(about).to_contain_text("Slot 1: ")
    tab.page.keyboard.press("End")
    expect(about).to_contain_text("Slot 63: free")
    tab.page.keyboard.press("Shift+Tab")
    tab.page.keyboard.press("Enter")
    expect(tab.page.locator("#map")).to_be_hidden()
    assert focused(tab.page) == "State slots"


def test_on_a_phone(new_tab: Callable[..., Tab], server: ServerProcess) -> None:
    tab = new_tab(server, **PHONE).open()
    assert not overflows(tab.page)
    tab.talk("My name is Clara.", "What is my name?", f"My name is {LONG_WORD}.")
    assert not overflows(tab.page)
    assert tab.box.evaluate("box => parseFloat(getComputedStyle(box).fontSize)") >= 16
    for name in ("Chats", "State slots", "Send", "Delete this chat"):
        size = tab.page.locator("main").get_by_role("button", name=name, exact=True).bounding_box()
        assert size is not None
        assert min(size["width"], size["height"]) >= 38, name
    tab.page.get_by_role("button", name="Chats").tap()
    drawer = tab.page.get_by_role("navigation", name="Chats")
    expect(drawer.get_by_role("button", name="New chat")).to_be_in_viewport()
    assert tab.page.evaluate("document.querySelector('main').inert")
    tab.page.keyboard.press("Escape")
    expect(drawer).not_to_be_in_viewport()
    tab.page.get_by_role("button", name="State slots").tap()
    expect(tab.page.locator("#slots .slot").first).to_be_in_viewport()
    assert not overflows(tab.page)
    tab.page.get_by_role("button", name="Close the state slots").tap()
    tab.page.get_by_role("button", name="Chats").tap()
    drawer.get_by_role("button", name="New chat").tap()
    expect(tab.page.get_by_role("heading", name="Say something")).to_be_in_viewport()
    assert tab.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(new_tab: Callable[..., Tab], server: ServerProcess, scheme: str, tmp_path: Path) -> None:
    # Use reduced motion: during a colour transition, a slot would have neither its old nor its new colour.
    tab = new_tab(server, color_scheme=scheme, device_scale_factor=1, reduced_motion="reduce").open()
    assert tab.page.evaluate(CONTRASTS)[0][0] >= ENOUGH_CONTRAST
    tab.talk("My name is Clara.", "What is my name?")
    expect(tab.page.locator(".slot[data-place=cached]").first).to_be_visible()
    least, text = tab.page.evaluate(CONTRASTS)[0]
    assert least >= ENOUGH_CONTRAST, text
    tab.page.screenshot(path=tmp_path / f"chat-{scheme}.png")
    assert brightness(tab.page) == scheme
    other = {"light": "dark", "dark": "light"}[scheme]
    change = tab.page.locator("#theme")
    while change.get_attribute("title") != f"Colours: {other}":
        change.click()
    assert brightness(tab.page) == other
    tab.page.reload()
    assert brightness(tab.page) == other


def brightness(page: Page) -> str:
    red = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
    return "light" if int(red) > 127 else "dark"


def test_without_motion(new_tab: Callable[..., Tab], server: ServerProcess) -> None:
    tab = new_tab(server, reduced_motion="reduce").open()
    tab.begin_long()
    assert tab.page.evaluate("document.getAnimations().length") == 0
    tab.page.keyboard.press("Escape")
    tab.sees("Stopped")


def test_every_control_has_an_accessible_name(tab: Tab) -> None:
    tab.talk("My name is Clara.", "What is my name?")
    unnamed = tab.page.evaluate(
        "[...document.querySelectorAll('button, input:not([hidden]), textarea')].filter((one) =>"
        " !(one.ariaLabel || one.textContent.trim() || one.labels?.length)).map((one) => one.outerHTML)"
    )
    assert unnamed == []
    assert tab.page.locator("h1").count() == 1
    expect(tab.page.locator("#spoken")).to_have_attribute("aria-live", "polite")

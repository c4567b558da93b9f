"""Pictures of the page: the same after a reload as before, and the same as those in a folder.

    BATON_PICTURES=DIR scripts/test tests/browser/test_pictures.py

takes the pictures that DIR lacks, and compares all others with DIR. Run it before and after a change of the page.
"""

import os
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.api.server_process import ServerProcess
from tests.browser.driving import Tab

SIZES: dict[str, dict[str, Any]] = {
    "desktop": {"viewport": {"width": 1200, "height": 800}},
    "phone": {"viewport": {"width": 360, "height": 640}, "has_touch": True, "is_mobile": True},
}
FOLDER = os.environ.get("BATON_PICTURES")
SLOT_POLL_MS = 1100
# Chromium draws the dashes around the slots a little differently from run to run.
MAX_DIFFERING_PIXELS = 400
# Hide the durations and speeds below an answer, which differ from run to run.
HIDE_TIMES = """
for (const time of document.querySelectorAll(".figures > span:nth-child(n + 3)")) time.style.display = "none";
"""
COUNT_DIFFERING = """
async (pictures) => {
  const pixels = await Promise.all(pictures.map(async (picture) => {
    const image = await createImageBitmap(await (await fetch("data:image/png;base64," + picture)).blob());
    const context = new OffscreenCanvas(image.width, image.height).getContext("2d");
    context.drawImage(image, 0, 0);
    return new Uint32Array(context.getImageData(0, 0, image.width, image.height).data.buffer);
  }));
  const [before, after] = pixels;
  return before.length === after.length ? before.reduce((sum, pixel, at) => sum + (pixel !== after[at]), 0) : Infinity;
}
"""


@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        ("desktop", "light"),
        pytest.param("phone", "dark", marks=pytest.mark.soak),
        pytest.param("desktop", "dark", marks=pytest.mark.soak),
        pytest.param("phone", "light", marks=pytest.mark.soak),
    ],
)
def test_the_same_pictures(
    new_tab: Callable[..., Tab], server: ServerProcess, size: str, scheme: str, tmp_path: Path
) -> None:
    tab = new_tab(server, color_scheme=scheme, reduced_motion="reduce", device_scale_factor=1, **SIZES[size]).open()
    easel = tab.context.new_page()
    folder = Path(FOLDER) if FOLDER else tmp_path
    for name in scenes(tab, size):
        picture, before = take(tab.page), folder / f"{name}-{size}-{scheme}.png"
        if not before.exists():
            before.write_bytes(picture)
        differing = count_differing(easel, before.read_bytes(), picture)
        assert differing <= MAX_DIFFERING_PIXELS, before
    assert tab.errors == []


def scenes(tab: Tab, size: str) -> Iterator[str]:
    """Show each scene in the page, and yield its name. "chat" is yielded before and after a reload."""
    yield "welcome"
    tab.talk("My name is Clara.", "What is my name?", "What is 7 plus 5?")
    if size == "desktop":
        expect(tab.page.locator(".slot[data-place=cached]").first).to_be_visible()
    yield "chat"
    tab.button("Delete this chat").click()
    yield "question"
    tab.page.keyboard.press("Escape")
    if size == "phone":
        tab.page.get_by_role("button", name="State slots").tap()
        expect(tab.page.locator(".slot[data-place=cached]").first).to_be_in_viewport()
        yield "slots"
        tab.page.get_by_role("button", name="Close the state slots").tap()
        tab.page.get_by_role("button", name="Chats").tap()
        expect(tab.page.get_by_role("navigation", name="Chats")).to_be_in_viewport()
        yield "chats"
    tab.page.reload()
    tab.connected()
    expect(tab.turns).to_have_count(3)
    if size == "desktop":
        expect(tab.page.locator(".slot[data-place=cached]").first).to_be_visible()
    yield "chat"


def take(page: Page) -> bytes:
    """Take a picture after the next poll of the slots, with no element hovered or focused."""
    page.mouse.move(0, 0)
    page.wait_for_timeout(SLOT_POLL_MS)
    page.evaluate("document.querySelector('#text').blur()")
    page.evaluate(HIDE_TIMES)
    return page.screenshot(animations="disabled", caret="hide")


def count_differing(page: Page, before: bytes, after: bytes) -> float:
    """Return the number of pixels in which two pictures differ."""
    pictures = [b64encode(picture).decode() for picture in (before, after)]
    return float(page.evaluate(COUNT_DIFFERING, pictures))

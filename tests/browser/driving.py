"""Driving the chat page as a user does: a tab of a real Chromium on a real server."""

import re
from urllib.parse import quote
from urllib.request import Request, urlopen

from playwright.sync_api import Browser, Locator, expect

from tests.api.server_process import ServerProcess

PATIENCE_MS = 20_000
PROSE = re.compile(r".{20}", re.DOTALL)
# Makes the answer to any message that contains "at length" continue until it is stopped.
AT_LENGTH = """
const send = WebSocket.prototype.send;
WebSocket.prototype.send = function (text) {
  const event = JSON.parse(text);
  const long = event.type === "response.create" && event.input.includes("at length");
  send.call(this, JSON.stringify(long ? { ...event, ignore_eos: true, max_output_tokens: 6000 } : event));
};
"""
# Records the length of the running answer's text each time it changes.
WATCH = """
window.lengths = [];
new MutationObserver(() => {
  const words = document.querySelector(".writing .words");
  if (words && words.textContent.length !== lengths.at(-1)) lengths.push(words.textContent.length);
}).observe(document, { subtree: true, childList: true, characterData: true });
"""


def delete(server: ServerProcess, session: str) -> None:
    with urlopen(Request(f"{server.url}/v1/sessions/{quote(session, safe='')}", method="DELETE"), timeout=60):
        pass


class Tab:
    """A tab of the browser. `errors`: the console's errors and warnings; `requests`: the URLs of all requests."""

    def __init__(self, browser: Browser, server: ServerProcess, **options: object) -> None:
        options = {"viewport": {"width": 1200, "height": 800}, **options}
        self.server = server
        self.context = browser.new_context(**options)  # type: ignore[arg-type]
        self.context.set_default_timeout(PATIENCE_MS)
        self.context.add_init_script(AT_LENGTH)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on(
            "console", lambda entry: self.errors.append(entry.text) if entry.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("websocket", lambda socket: self.requests.append(socket.url))

    def open(self, address: str = "/") -> "Tab":
        self.page.goto(self.server.url + address)
        return self.connected()

    def connected(self) -> "Tab":
        expect(self.page.locator("#link[data-state=open]")).to_be_visible(timeout=PATIENCE_MS)
        return self

    @property
    def box(self) -> Locator:
        return self.page.get_by_label("Message", exact=True)

    @property
    def turns(self) -> Locator:
        return self.page.locator("article[data-turn]")

    @property
    def writing(self) -> Locator:
        return self.page.locator(".writing .words")

    @property
    def session(self) -> str:
        return self.page.url.partition("#")[2]

    def say(self, text: str) -> None:
        self.box.fill(text)
        self.box.press("Enter")

    def talk(self, *texts: str) -> list[str]:
        """Send each message and wait for its answer; return all answers."""
        for text in texts:
            before = self.turns.count()
            self.say(text)
            expect(self.turns).to_have_count(before + 1, timeout=PATIENCE_MS)
        return self.answers()

    def begin_long(self, text: str = "Tell me at length.") -> None:
        """Send a message with a long answer, and wait until the answer begins."""
        self.say(text)
        expect(self.writing).to_have_text(PROSE, timeout=PATIENCE_MS)

    def answers(self) -> list[str]:
        return self.page.locator("article[data-turn] .answer .words").all_text_contents()

    def stored(self) -> dict[str, object]:
        """Return the chat's session as the server stores it."""
        info: dict[str, object] = self.server.get(f"/v1/sessions/{self.session}")
        return info

    def button(self, name: str, turn: int | None = None) -> Locator:
        place = self.page if turn is None else self.page.locator(f"article[data-turn='{turn}']")
        return place.get_by_role("button", name=name)

    def sees(self, text: str) -> None:
        expect(self.page.get_by_text(text)).to_be_visible(timeout=PATIENCE_MS)

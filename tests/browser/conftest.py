import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.api.server_process import ServerProcess
from tests.browser.driving import Tab, delete

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


# Package scope ends both fixtures with this package: tests of other packages run event loops of their own, and could
# not while playwright's loop is running in the same thread.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def started(browser: Browser) -> Iterator[ServerProcess]:
    with ServerProcess() as server:
        yield server


@pytest.fixture
def server(started: ServerProcess) -> ServerProcess:
    """Return the running server, without the chats and states of earlier tests."""
    for session in started.get("/v1/sessions")["data"]:
        delete(started, session["id"])
    started.post("/flush_cache", {})
    return started


@pytest.fixture
def new_tab(browser: Browser) -> Iterator[Callable[..., Tab]]:
    tabs: list[Tab] = []

    def open_tab(server: ServerProcess, **options: Any) -> Tab:
        tabs.append(Tab(browser, server, **options))
        return tabs[-1]

    yield open_tab
    for tab in tabs:
        tab.context.close()


@pytest.fixture
def tab(new_tab: Callable[..., Tab], server: ServerProcess) -> Iterator[Tab]:
    """Yield a new tab. Check at the end that it logged no error and made requests only to its server."""
    tab = new_tab(server).open()
    yield tab
    assert tab.errors == []
    own = (server.url, server.url.replace("http", "ws"), "data:")
    assert [url for url in tab.requests if not url.startswith(own)] == []

"""GET /: the chat page, which asks nothing of anybody but this server.

Its parts are files of one purpose each; the browser gets them as one, with its styles and scripts in it, so that a
digest of each is all that the content policy lets in. The scripts share one scope.
"""

import base64
import hashlib
from functools import cache
from pathlib import Path

from aiohttp import web

routes = web.RouteTableDef()
FOLDER = Path(__file__).parent
# In the order in which they are read: a rule overrules those before it, a constant is known to those behind it.
STYLES = ("base", "sides", "chat", "welcome", "composer", "slots", "dialogs", "adapt")
SCRIPTS = (
    *("elements", "storage", "state", "http", "link", "chats", "turns"),
    *("view", "turn_view", "composer", "dialogs", "slots", "drawers", "theme", "start"),
)


@routes.get("/")
async def page(request: web.Request) -> web.Response:
    text, headers = load()
    return web.Response(text=text, content_type="text/html", headers=headers)


@cache
def load() -> tuple[str, dict[str, str]]:
    """The page, and headers under which nothing runs in it but its own script and style."""
    style = joined([FOLDER / "styles" / f"{name}.css" for name in STYLES])
    script = '\n"use strict";\n' + joined([FOLDER / "scripts" / f"{name}.js" for name in SCRIPTS])
    text = (FOLDER / "index.html").read_text(encoding="utf-8")
    text = text.replace("<style></style>", f"<style>{style}</style>")
    text = text.replace("<script></script>", f"<script>{script}</script>")
    return text, {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": policy(style, script),
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
    }


def joined(files: list[Path]) -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def policy(style: str, script: str) -> str:
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {digest_of(script)}",
            f"style-src {digest_of(style)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def digest_of(content: str) -> str:
    """The policy's source for what stands in an inline element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

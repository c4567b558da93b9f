"""GET /: the chat page, which makes requests to this server only.

The page is built from small files. The browser gets one document with one inline style and one inline script, which
the content security policy allows by their digests. All script files share one scope.
"""

import base64
import hashlib
from functools import cache
from pathlib import Path

from aiohttp import web

routes = web.RouteTableDef()
FOLDER = Path(__file__).parent
# The order matters: a later rule overrides earlier ones, and a script sees only the constants of earlier ones.
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
    """Build the page and its HTTP headers. The headers allow only the page's own scripts and styles."""
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
    """Return the expression with which a Content-Security-Policy allows an inline element with this content."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

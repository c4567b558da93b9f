"""GET /: the chat page, one file that asks nothing of anybody but this server."""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from aiohttp import web

routes = web.RouteTableDef()

FILE = Path(__file__).with_name("index.html")


@routes.get("/")
async def page(request: web.Request) -> web.Response:
    text, headers = load()
    return web.Response(text=text, content_type="text/html", headers=headers)


@cache
def load() -> tuple[str, dict[str, str]]:
    """The page, and headers under which nothing runs in it but its own script and style."""
    text = FILE.read_text(encoding="utf-8")
    return text, {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": policy(text),
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
    }


def policy(text: str) -> str:
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {hash_of(text, 'script')}",
            f"style-src {hash_of(text, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def hash_of(text: str, element: str) -> str:
    """The policy's source for the one inline `element`."""
    [content] = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

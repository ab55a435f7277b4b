"""The page at `/`: one file, which asks nobody else and runs nothing but what is in it."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files


@cache
def read_page() -> tuple[str, dict[str, str]]:
    """Read the page.

    Returns:
        Its text, and the headers that it is sent with: a policy by which a browser runs its own script and style alone.
    """
    text = files(__package__).joinpath("page.html").read_text("utf-8")
    allowed = {}
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        allowed[tag] = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    policy = [
        "default-src 'none'", "connect-src 'self'", "img-src data: blob:", f"script-src 'sha256-{allowed['script']}'",
        f"style-src 'sha256-{allowed['style']}'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
    ]  # fmt: skip
    return text, {
        "Content-Security-Policy": "; ".join(policy), "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
    }  # fmt: skip

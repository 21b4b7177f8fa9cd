"""How a user of this machine reaches its agent: the address, and the header that the agent's token makes."""

import json
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from rolecall.agent.data_dir import TOKEN_NAME
from rolecall.core.http import is_loopback
from rolecall.core.rundir import bearer_token


def own_authorization(data_dir: Path, token_file: Path | None = None) -> str:
    """Authorization header from the token of the agent in `data_dir`; empty if this user cannot read it."""
    try:
        return f"Bearer {bearer_token((token_file or data_dir / TOKEN_NAME).read_text(encoding='utf-8').strip())}"
    except (OSError, UnicodeDecodeError):
        return ""


def served_url(data_dir: Path) -> str:
    """Where the agent of `data_dir` serves, by its own file; empty if none runs, or this user cannot read it."""
    try:
        return str(json.loads((data_dir / "agent.json").read_bytes())["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def reached(url: str) -> str:
    """`url` as this node reaches it."""
    for everywhere, loopback in (("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:"), ("//:", "//127.0.0.1:")):
        url = url.replace(everywhere, loopback)
    return url


def local_authorization(url: str, data_dirs: Iterable[Path]) -> str:
    """Authorization header for `url` if the agent of one of `data_dirs` serves there, on loopback; else empty: another
    port may be forwarded to another machine, or be another user's."""
    watched = urlsplit(url)
    if not is_loopback(watched.hostname or ""):
        return ""
    for data_dir in data_dirs:
        served = urlsplit(reached(served_url(data_dir)))
        same = (served.scheme, served.port) == (watched.scheme, watched.port)
        if same and is_loopback(served.hostname or ""):
            return own_authorization(data_dir)
    return ""

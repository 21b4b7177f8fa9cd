"""Query parameters and the bearer token of a request; each check raises HTTPException with the reason."""

import hmac

from starlette.exceptions import HTTPException
from starlette.requests import Request

NUMBER_MAX = (1 << 63) - 1


def only(request: Request, *names: str) -> None:
    """Refuses a parameter that is not among `names`."""
    for name in request.query_params:
        if name not in names:
            raise HTTPException(400, f"unknown parameter {name[:40]!r}")


def number(request: Request, name: str, default: int) -> int:
    """A whole number from 0 to 2^63 - 1."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) <= NUMBER_MAX):
        raise HTTPException(400, f"{name}: expected a whole number, got {text[:40]!r}")
    return int(text)


def seconds(request: Request, name: str, largest: float) -> float:
    """A number from 0 to `largest`; 0 where it is not given."""
    text = request.query_params.get(name, "0")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= largest:  # NaN fails this, too
        raise HTTPException(400, f"{name}: expected 0 to {largest:g} seconds, got {text[:40]!r}")
    return value


def authorize(request: Request, bearer: str) -> None:
    """Refuses a request without the right bearer token."""
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {bearer}".encode()):
        raise HTTPException(401, "this needs the run's bearer token")

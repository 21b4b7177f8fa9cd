"""What the tests of dashboards share."""

import sys
from collections.abc import Iterator

import pytest

from tests.dashboards.prometheus_of_demo import demo_prometheus

__all__ = ["demo_prometheus"]


@pytest.fixture(autouse=True)
def _main_stays_what_it_was() -> Iterator[None]:
    """Streamlit runs a page as `__main__` and leaves it so; processes that later tests spawn would run that page."""
    before = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = before

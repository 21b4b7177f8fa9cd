"""The journal's tests run on each kind of database that it supports."""

from collections.abc import Callable, Iterator

import pytest

from tests import postgres


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.Server]:
    with postgres.server() as running:
        yield running


@pytest.fixture(scope="session", params=["sqlite", "postgresql"])
def fresh_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], str]:
    """Gives, at each call, the URL of a database that is still empty."""
    if request.param == "postgresql":
        server: postgres.Server = request.getfixturevalue("postgres_server")
        return server.fresh_url
    return lambda: f"sqlite:///{tmp_path_factory.mktemp('j') / 'journal.db'}"


@pytest.fixture
def url(fresh_url: Callable[[], str]) -> str:
    return fresh_url()

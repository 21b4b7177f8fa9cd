from collections.abc import Iterator

import pytest

from tests.recovery.notifications.service import Service, serving


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as service:
        yield service

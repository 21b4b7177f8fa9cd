import fcntl
import os
import resource

import pytest

from rolecall.core.descriptors import is_readable

HIGH = 1500


def test_descriptors_that_select_refuses() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= HIGH:
        pytest.skip(f"this process may not open {HIGH} files")
    reading, writing = os.pipe()
    high = fcntl.fcntl(reading, fcntl.F_DUPFD_CLOEXEC, HIGH)
    try:
        assert not is_readable(high, 0.0) and not is_readable(high, -1.0)
        os.write(writing, b"x")
        assert is_readable(high, 60.0)
        os.read(high, 1)
        os.close(writing)
        assert is_readable(high, 60.0), "it has ended"
    finally:
        os.close(high)
        os.close(reading)

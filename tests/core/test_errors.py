"""The tree drawn at the top of errors.py is the tree that is there, and facts are attributes."""

import inspect
import re

from rolecall.core import errors
from rolecall.core.errors import ConfigError, DeadlineExceeded, RolecallError


def test_the_drawn_tree_is_the_tree() -> None:
    drawn = dict[str, str]()
    above = {0: "RolecallError"}
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^([│ ]*)[├└]── (\w+)", line)
        if found:
            depth = len(found.group(1)) // 4 + 1
            drawn[found.group(2)] = above[depth - 1]
            above[depth] = found.group(2)
    classes = {n: c for n, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__}
    real = {n: c.__mro__[1].__name__ for n, c in classes.items() if c is not RolecallError}
    assert drawn == real


def test_messages_are_made_of_the_facts() -> None:
    late = DeadlineExceeded(waited_for="rollout/1", seconds=2.0)
    assert (late.waited_for, late.seconds) == ("rollout/1", 2.0)
    assert str(late) == "timed out after 2.0 s waiting for rollout/1" and isinstance(late, TimeoutError)
    wrong = ConfigError(["a.b: bad", "c: worse"], "job.yaml")
    assert str(wrong) == "job.yaml: 2 problems\n  a.b: bad\n  c: worse"

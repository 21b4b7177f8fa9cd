"""Whose files among the state pages may be those of a process.

Every process of the agent's group may create files there, also under the name of another process: what is read counts
only with the owner that it must have."""

import re
from pathlib import Path

from rolecall.agent.collectors.counters import read_at_most

_PROC_BYTES_MAX = 16_384
_UIDS = re.compile(rb"^Uid:([\d\s]+)$", re.MULTILINE)


def owners_of_files(proc: Path, pid: int, pages: Path) -> set[int] | None:
    """The users whose files in `pages` may be those of the process. None: its users cannot be read.

    They are its own, the agent's (the owner of `pages`, also where NFS maps all users to one) and root. Of a process in
    another user namespace also the users that it has there: an idmapped mount stores these.
    """
    found = _UIDS.search(read_at_most(f"{proc}/{pid}/status", _PROC_BYTES_MAX))
    if found is None:
        return None
    users = {int(uid) for uid in found[1].split()}
    there = set()
    for line in read_at_most(f"{proc}/{pid}/uid_map", _PROC_BYTES_MAX).splitlines():
        first, outside, count = map(int, line.split())
        there |= {first + uid - outside for uid in users if 0 <= uid - outside < count}
    return users | there | {0, pages.stat().st_uid}

"""A process that writes to a journal and prints what was acknowledged: `python -m tests.core.writer URL NAME NUM`.

Each line on stdout is `<seq> <hash>` of an event whose append has returned. NUM 0 writes until it is killed.
"""

import itertools
import sys

from rolecall.core.journal.events import EventKind
from rolecall.core.journal.journal import Journal
from tests.events import filled


def main(url: str, name: str, num: int) -> None:
    journal = Journal(url)
    for n in itertools.count() if num == 0 else range(num):
        if n % 5 == 4:
            journal.grow_epoch([("trainer/0", n)], because=name)
        event = journal.append(filled(EventKind.REPLICA_LOST, {"replica": name, "incarnation": n}), key=f"{name}-{n}")
        print(event.seq, event.hash, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

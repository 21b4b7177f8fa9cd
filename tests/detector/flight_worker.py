"""A gloo job of four ranks that do what they are reported, line by line, and dump their Flight Recorders while blocked.

    flight_worker.py FOLDER

torch is loaded once, then the ranks are forked. Lines on stdin begin with a rank: `2 dump NAME`, or an operation of
that rank's main thread: `2 reduce GROUP [SIZE]`, `2 start GROUP` (reduces, not waited for), `2 gather GROUP`,
`2 send RANK`, `2 recv RANK`. Groups: `world`, `left` (ranks 0 and 1), `right` (2 and 3), `odd` (1, 2 and 3). Each line
is answered by itself when it is done, each rank's start by `RANK ready PID`. At the end of stdin all ranks are killed.
"""

import os
import queue
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path

os.environ["TORCH_FR_BUFFER_SIZE"] = "64"  # read when torch is loaded

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

NUM_RANKS = 4
TIMEOUT = timedelta(seconds=120)
folder = Path(sys.argv[1])


def answer(rank: int, words: str) -> None:
    os.write(1, f"{rank} {words}\n".encode())


def dump(rank: int, name: str) -> None:
    """As PyTorch's own writer does it, and once more as JSON."""
    pickled, text = c10d._dump_fr_trace(includeStackTraces=False), c10d._dump_fr_trace_json()
    (folder / name / f"gloo_trace_rank_{rank}").write_bytes(pickled)
    (folder / f"{name}_json" / f"trace{rank}.json").write_bytes(text)


def perform(rank: int, words: list[str], groups: dict[str, dist.ProcessGroup]) -> object:
    tensor = torch.ones(int(words[2]) if len(words) > 2 else 8)
    if words[0] in ("reduce", "start"):
        return dist.all_reduce(tensor, group=groups[words[1]], async_op=words[0] == "start")
    if words[0] == "gather":
        group = groups[words[1]]
        return dist.all_gather([torch.empty(8) for _ in range(group.size())], tensor, group=group)
    return dist.send(tensor, int(words[1])) if words[0] == "send" else dist.recv(tensor, int(words[1]))


def run(rank: int, lines: int) -> None:
    work: queue.SimpleQueue[list[str]] = queue.SimpleQueue()

    def listen() -> None:
        with os.fdopen(lines) as stream:
            for line in stream:
                words = line.split()
                if words[0] == "dump":
                    dump(rank, words[1])
                    answer(rank, line.strip())
                else:
                    work.put(words)
        os._exit(0)

    store = dist.FileStore(str(folder / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=TIMEOUT)
    world = dist.group.WORLD
    assert world is not None
    groups = {"world": world}
    for name, ranks in (("left", [0, 1]), ("right", [2, 3]), ("odd", [1, 2, 3])):
        groups[name] = dist.new_group(ranks)
    threading.Thread(target=listen, daemon=True).start()
    answer(rank, f"ready {os.getpid()}")
    unfinished = []
    while True:
        words = work.get()
        try:
            unfinished.append(perform(rank, words, groups))
            answer(rank, " ".join(words))
        except RuntimeError:
            answer(rank, "failed")


def main() -> None:
    pipes = [os.pipe() for _ in range(NUM_RANKS)]
    ranks: list[int] = []
    for rank, (lines, _) in enumerate(pipes):
        pid = os.fork()
        if pid == 0:
            for _, write in pipes:
                os.close(write)
            try:
                run(rank, lines)
            finally:
                os._exit(1)
        ranks.append(pid)
    for line in sys.stdin:
        rank_word, _, words = line.partition(" ")
        os.write(pipes[int(rank_word)][1], words.encode())
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


main()

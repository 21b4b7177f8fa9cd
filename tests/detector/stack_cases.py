"""Stacks as they are written down in tests: who waits where."""

from collections.abc import Sequence

from rolecall.core.diagnosis import Finding
from rolecall.detector.artifacts.stacks.dumps import Frame, StackDump, Thread
from rolecall.detector.base.findings import SETTLE

C10D = "torch/distributed/distributed_c10d.py"
WRAPPER = "torch/distributed/c10d_logger.py:wrapper"

# Innermost first, as py-spy has them.
REDUCE = (f"{C10D}:all_reduce", WRAPPER, "train.py:sync_gradients", "train.py:step", "train.py:main")
GATHER = (
    f"{C10D}:all_gather_into_tensor",
    WRAPPER,
    "layers.py:gather_along_first_dim",
    "layers.py:forward",
    "train.py:main",
)
SYNC = ("distributed/param_and_grad_buffer.py:start_grad_sync", "schedules.py:forward_backward", "train.py:main")
RECEIVE = (f"{C10D}:irecv", "p2p_communication.py:recv_backward", "schedules.py:forward_backward", "train.py:main")
LOADER = (
    "selectors.py:select",
    "multiprocessing/queues.py:get",
    "torch/utils/data/dataloader.py:_next_data",
    "train.py:main",
)
COMPUTE = ("layers.py:forward", "train.py:step", "train.py:main")


def frames(*texts: str) -> tuple[Frame, ...]:
    return tuple(Frame(*text.split(":", 1)) for text in texts)


def thread(*texts: str, name: str = "MainThread", active: bool = False, owns_gil: bool = False) -> Thread:
    return Thread(name=name, frames=frames(*texts), active=active, owns_gil=owns_gil)


def dump(
    rank: int, *texts: str, active: bool = False, at: float = 100.0, role: str = "trainer", **more: object
) -> StackDump:
    fields = {"node": f"m{rank // 2:02d}", "threads": (thread(*texts, active=active),), **more}
    return StackDump(path=f"rank_{rank}-{at}.json", at=at, role=role, rank=rank, **fields)  # type: ignore[arg-type]


def only(found: Sequence[Finding]) -> Finding:
    assert len(found) == 1, found
    return found[0]


def ranks(found: Finding) -> list[int | None]:
    return [s.rank for s in found.suspects]


def settle(found: Finding) -> str:
    return "; ".join(e.text for e in found.evidence if e.kind == SETTLE)


def py_spy_json(*texts: str, pid: int = 7, name: str = "MainThread") -> list[dict[str, object]]:
    shown = [{"name": f.name, "filename": f"/x/{f.file}", "short_filename": f.file, "line": 3} for f in frames(*texts)]
    common = {"pid": pid, "thread_id": 1, "os_thread_id": pid, "active": False, "owns_gil": False}
    return [{**common, "thread_name": name, "frames": shown}]

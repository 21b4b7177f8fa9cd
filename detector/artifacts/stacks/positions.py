"""Classifies the activity of a process from its stacks: the wait it is in, or its activity otherwise. Pure.

The most informative thread represents the process: the main thread, unless it only waits for another. From the
innermost frame outward, frames that wait on behalf of their caller (locks, sockets, torch wrappers) are skipped; the
first other frame is the place. If its name is a wait for other processes (`all_reduce`, `recv_forward`, a GPU
synchronization), the process waits for others; otherwise it does not.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from rolecall.detector.artifacts.stacks.dumps import Frame, StackDump, Thread

NUM_CALLERS = 2
"""Two waits are equal when the call and this many callers are: further out, rank 0 often has additional wrappers."""
FRAME_CHARS_SHOWN = 120


class StackActivity(StrEnum):
    """Activity of a process, as used in text. Waits for other processes: `WAITS`."""

    COLLECTIVE = "waits in a collective"
    PIPELINE = "waits for its neighbour in the pipeline"
    RENDEZVOUS = "waits in a rendezvous"
    DEVICE = "waits for its GPU"
    BACKWARD = "waits in backward, where gradients are reduced"
    STOOD = "is where most processes are, now as in an older dump"
    DATA = "is in its data loader"
    CHECKPOINT = "reads or writes a checkpoint"
    COMPILE = "compiles"
    GARBAGE = "collects garbage"
    LOCK = "waits for a lock or for another thread of its own"
    IO = "reads or writes"
    STILL = "is stuck in its own code"
    STOPPED = "is stopped"
    WORK = "is at work in its own code"


WAITS = frozenset(
    (
        *(StackActivity.COLLECTIVE, StackActivity.PIPELINE, StackActivity.RENDEZVOUS),
        *(StackActivity.DEVICE, StackActivity.BACKWARD, StackActivity.STOOD),
    )
)
"""For other processes: a GPU that computes a collective waits for its peers, and DDP reduces inside of backward."""

_COLLECTIVE = re.compile(
    r"_?(?:all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|(?:monitored_)?barrier|(?:start|finish)_(?:grad|param)_sync)(?:_|\Z)"
)
_COLLECTIVE_OF_TORCH = re.compile(r"_?(?:reduce|gather|scatter|broadcast)(?:_|\Z)")
_PIPELINE = re.compile(
    r"_?(?:isend|irecv|batch_isend_irecv|batched_p2p_ops|p2p_ops|(?:send|recv)_(?:forward|backward))(?:_|\Z)"
)
_PIPELINE_OF_TORCH = re.compile(r"(?:send|recv)(?:_|\Z)")
_RENDEZVOUS = re.compile(r"_?(?:init_process_group|new_group|store_based_barrier|next_rendezvous|rendezvous)\Z")
_DEVICE = re.compile(r"cu(?:da)?(?:stream|device|event|ctx)synchronize")
_NATIVE = re.compile(r"nccl|gloo::|c10d::")
_CHECKPOINT = re.compile(r"(?:save|load|write|read)_\w*checkpoint|checkpoint_(?:save|load)")
_THROUGH = (
    *("threading.py", "queue.py", "socket.py", "selectors.py", "ssl.py", "contextlib.py", "functools.py", "asyncio/"),
    *("multiprocessing/", "concurrent/futures/", "subprocess.py", "torch/distributed/", "torch/multiprocessing/"),
    *("torch/utils/_contextlib.py", "torch/autograd/", "torch/_ops.py", "torch/nn/modules/module.py"),
)
"""Frames of these files wait on behalf of their caller."""
_LOCK = ("threading.py", "queue.py", "multiprocessing/", "concurrent/futures/", "filelock")
_IO = ("socket.py", "ssl.py", "selectors.py", "subprocess.py", "shutil.py", "http/", "urllib", "requests/", "fsspec/")
_LAUNCH = (
    *("runpy.py", "<frozen runpy>"),
    *("multiprocessing/spawn.py", "multiprocessing/process.py", "multiprocessing/popen"),
)
_HELPER_NAME = re.compile(
    r"\Arolecall-|queuefeeder|pin_memory|heartbeat|\bbeat|watchdog|monitor|tqdm|tensorboard|wandb|autograd|event.?writer",
    re.IGNORECASE,
)
_HELPER_FILES = (
    *("torch/utils/data/_utils/pin_memory.py", "torch/_inductor/compile_worker/", "multiprocessing/pool.py"),
    *("tqdm/_monitor.py", "tensorboard/", "wandb/", "prometheus_client/"),
)
_HELPER_FUNCTIONS = re.compile(r"_feed\Z|_?(?:heart)?beat(?:_loop|_forever|s)?\Z", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Stack:
    """The place of a process. `key` is equal for processes at the same place. `gil_holder`: another thread with the
    GIL."""

    doing: StackActivity
    frames: tuple[Frame, ...]
    key: tuple[Frame, ...]
    gil_holder: str = ""

    @property
    def waits(self) -> bool:
        return self.doing in WAITS

    @property
    def at(self) -> str:
        """`all_reduce (torch/distributed/distributed_c10d.py), called by step (train.py)`."""
        return ", called by ".join(shown(f) for f in self.key[:2])


def shown(frame: Frame) -> str:
    text = str(frame)
    return text if len(text) <= FRAME_CHARS_SHOWN else text[: FRAME_CHARS_SHOWN - 1] + "…"


def stack_of(dump: StackDump) -> Stack:
    """The place of the process, by its most informative thread."""
    main, *others = dump.threads
    kept = [t for t in others if not is_background_thread(t)]
    thread = main
    if kept and (not main.frames or _awaits_a_thread(main)):
        waits = [any(_wait_of(f, t.active) for f in t.frames) for t in kept]
        ranked = zip(waits, kept, strict=True)
        _, thread = max(ranked, key=lambda p: (p[0], p[1].owns_gil, p[1].active, len(p[1].frames)))
    if not thread.frames:  # at process start or end: a helper thread is better than nothing
        thread = max(dump.threads, key=lambda t: len(t.frames))
    holder = next((t for t in dump.threads if t.owns_gil and t is not thread), None)
    gil_holder = f"{holder.name or 'unnamed'} in {shown(holder.frames[0])}" if holder and holder.frames else ""
    frames = thread.frames
    while len(frames) > 1 and (
        frames[-1].file.startswith(_LAUNCH)
        or (frames[-1].file == "threading.py" and _bare(frames[-1]) in ("_bootstrap", "_bootstrap_inner", "run"))
    ):
        frames = frames[:-1]
    for n, frame in enumerate(frames if not dump.is_stopped else ()):
        doing = _wait_of(frame, thread.active)
        if doing is not None:
            callers = [f for f in frames[n + 1 :] if not _passes_on(f)]
            return Stack(doing, frames, (frame, *callers[:NUM_CALLERS]), gil_holder)
        if not _passes_on(frame):
            break
    own = next((n for n, f in enumerate(frames) if not _passes_on(f)), 0)
    doing = StackActivity.STOPPED if dump.is_stopped else _outside(thread, frames, own)
    return Stack(doing, frames, frames[own:], gil_holder)


def is_background_thread(thread: Thread) -> bool:
    """A helper thread: queue feeders, pin-memory, heartbeats, writers, idle pool threads."""
    frames = thread.frames
    if not frames or _HELPER_NAME.search(thread.name):
        return True
    if frames[0].file == "concurrent/futures/thread.py" and _bare(frames[0]) == "_worker":
        return True
    return any(f.file.startswith(_HELPER_FILES) or _HELPER_FUNCTIONS.match(_bare(f)) for f in frames)


def _awaits_a_thread(thread: Thread) -> bool:
    """In an event loop with nothing to do (asyncio, a Ray worker), or joining a thread."""
    if thread.owns_gil or any(_wait_of(f, thread.active) for f in thread.frames):
        return False
    inner = (thread.frames[0].file, _bare(thread.frames[0]))
    where = {(f.file, _bare(f)) for f in thread.frames}
    if inner[0] == "selectors.py":
        return ("asyncio/base_events.py", "run_forever") in where
    return inner == ("ray/_private/worker.py", "main_loop") or (
        inner[0] == "threading.py" and ("threading.py", "join") in where
    )


def _bare(frame: Frame) -> str:
    """`Trainer.step` -> `step`: newer interpreters give qualified names."""
    return frame.name.rpartition(".")[2]


def _passes_on(frame: Frame) -> bool:
    return frame.file.startswith(_THROUGH) or ".so" in frame.file


def _wait_of(frame: Frame, active: bool = False) -> StackActivity | None:
    """The wait for other processes that this frame represents, or None."""
    name, file = _bare(frame).lower(), frame.file
    of_torch = file.startswith("torch/distributed/")
    if _RENDEZVOUS.match(name) or file == "torch/distributed/rendezvous.py":
        return StackActivity.RENDEZVOUS
    if (
        _PIPELINE.match(name)
        or (of_torch and _PIPELINE_OF_TORCH.match(name))
        or ("p2p" in file and name == "_communicate")
    ):
        return StackActivity.PIPELINE
    if _COLLECTIVE.match(name) or (of_torch and _COLLECTIVE_OF_TORCH.match(name)):
        return StackActivity.COLLECTIVE
    if _DEVICE.match(name) or (file.startswith("torch/cuda/") and name in ("synchronize", "wait")):
        return StackActivity.DEVICE
    if not active and file == "torch/autograd/graph.py" and name == "_engine_run_backward":
        return StackActivity.BACKWARD
    return StackActivity.COLLECTIVE if ".so" in file and _NATIVE.search(frame.name.lower()) else None


def _outside(thread: Thread, frames: tuple[Frame, ...], own: int) -> StackActivity:
    for frame in frames:
        name, file = _bare(frame).lower(), frame.file.lower()
        if file.startswith("torch/utils/data/") or re.search(r"data_?loader|dataset", f"{file}:{name}"):
            return StackActivity.DATA
        if file.startswith(("torch/_dynamo/", "torch/_inductor/", "triton/compiler/")):
            return StackActivity.COMPILE
        if file.startswith(("torch/serialization.py", "torch/distributed/checkpoint/", "safetensors/")):
            return StackActivity.CHECKPOINT
        if _CHECKPOINT.search(name):
            return StackActivity.CHECKPOINT
        if name.startswith("gc_collect"):
            return StackActivity.GARBAGE
    inner = frames[: own + 1]
    if any(f.file.startswith(_LOCK) for f in inner):
        return StackActivity.LOCK
    if any(f.file.startswith(_IO) for f in inner):
        return StackActivity.IO
    return StackActivity.WORK if thread.active else StackActivity.STILL

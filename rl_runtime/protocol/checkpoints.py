"""Which of the checkpoints in a folder belong to the run's history, and which are no longer needed. Pure.

The ledger decides whenever it is asked, because a checkpoint may appear late: a writer outlives the controller that
told it to write, and the run may have gone back to an older step since.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rolecall.rl_runtime.protocol.messages import CommitRecord

InHistory = Callable[[CommitRecord], bool]
"""Whether the ledger has the commit's step as trained, and has not undone it since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint in a folder. Its tensors have not been read."""

    path: str
    step: int  # last optimizer step included
    commit: CommitRecord | None  # None: damaged
    damage: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCheckpoint:
    """`found`: all checkpoints in its folder after it was written."""

    path: str
    found: tuple[CheckpointInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`usable`: newest first. `refused`: the others, each with the reason."""

    usable: tuple[CheckpointInfo, ...]
    refused: tuple[str, ...]


def choose(found: Sequence[CheckpointInfo], in_history: InHistory) -> Choice:
    """The checkpoints that the run may go on from."""
    usable, refused = list[CheckpointInfo](), list[str]()
    for info in sorted(found, key=lambda i: -i.step):
        if info.commit is None:
            refused.append(info.damage)
        elif in_history(info.commit):
            usable.append(info)
        else:
            refused.append(f"{info.path}: its last step was undone, or is of another run")
    return Choice(usable=tuple(usable), refused=tuple(refused))


def surplus(found: Sequence[CheckpointInfo], in_history: InHistory, *, keep: int) -> list[CheckpointInfo]:
    """All but the newest `keep` of the run's history. A damaged one stays while it is newer than these, or fewer are
    whole: it may only be unreadable for now."""
    kept = choose(found, in_history).usable[:keep]
    oldest = kept[-1].step if len(kept) == keep else -1
    return [i for i in found if i not in kept and (i.commit is not None or i.step < oldest)]

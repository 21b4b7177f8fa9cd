"""Identifies process and round of a stack dump from the names of its file and folders.

    trainer-1_rank3.json    rank_3.json    trainer_rank3_of_8.txt    node-2/trainer-0-pid123.txt    dp0_pp1_tp0.json
    round_2/rank_3.json     rank_3_round2.json    2/rank_3.json    rank_3.2.json

Missing parts stay unknown.
"""

import re
from pathlib import Path
from typing import Any

WORLD_SIZE_MAX = 200_000
AXES = ("tp", "pp", "dp", "ep", "cp")
"""Kinds of parallel group that file names may contain: tensor, pipeline, data, expert, context."""

# A `local_rank` exists on every node, and a `node_rank` identifies the node: neither identifies a process of the role.
_RANK = re.compile(
    r"(?<![a-z])(?<!local[-_.])(?<!node[-_.])(?:global_?)?rank[-_=.]?(\d{1,7})(?:[-_]?of[-_]?(\d{1,7}))?(?!\d)"
)
_PID = re.compile(r"(?<![a-z])pid[-_=.]?(\d{1,10})(?!\d)")
_AXIS = re.compile(rf"(?<![a-z])({'|'.join(AXES)})[-_=]?(\d{{1,6}})(?!\d)")
_NODE = re.compile(r"(?<![a-z])((?:node|host|machine)(?:=[^_,]+|[-_]?[a-z0-9]*\d[a-z0-9]*))", re.IGNORECASE)
_NODE_FOLDER = re.compile(r"(?:node|host|machine)(?:[-_]?[\w.-]*\d[\w.-]*|=.+)\Z", re.IGNORECASE)
_KNOWN_ROLE = r"trainer|rollout|reward|reference|critic|controller|standby"
_ROLE = re.compile(rf"(?<![a-z0-9])({_KNOWN_ROLE})(?![a-z])(?:[-/]?(\d{{1,6}})(?!\d))?")
_OTHER_ROLE = re.compile(r"([a-z]{2,30})-(\d{1,6})(?=[-_.]?(?:rank|pid|round)|\Z)")
_ROUND_WORD = r"round|look|sample|snapshot|take"
_ROUND = re.compile(rf"(?<![a-z])(?:{_ROUND_WORD})[-_=.]?(\d{{1,18}})(?!\d)", re.IGNORECASE)
_ROUND_FOLDER = re.compile(r"\d{1,18}\Z")
_ROUND_LAST = re.compile(r"[-_.](\d{1,18})\Z")
_NO_ROLES = frozenset(
    (
        *(*AXES, *_ROUND_WORD.split("|"), "rank", "local", "pid", "node", "host", "machine", "stack", "stacks", "dump"),
        *("process", "pyspy", "spy", "worker"),
    )
)
NUM_FOLDERS_READ = 3
"""Above the file: `job/round_2/node-3/rank_5.json`."""


def place_of(path: Path) -> dict[str, Any]:
    """Fields of a dumps.StackDump from the names."""
    stem = path.stem.lower()
    place: dict[str, Any] = _round(path)
    if found := _RANK.search(stem):
        place["rank"] = int(found.group(1))
        if found.group(2):
            place["world_size"] = min(int(found.group(2)), WORLD_SIZE_MAX)
    if found := _PID.search(stem):
        place["pid"] = int(found.group(1))
    if axes := _AXIS.findall(stem):
        place["axes"] = tuple(sorted({axis: int(index) for axis, index in axes}.items()))
    folders = [folder.name for folder in path.absolute().parents[:NUM_FOLDERS_READ]]
    if found := _NODE.search(path.stem):
        place["node"] = found.group(1).partition("=")[2] or found.group(1)
    elif of_node := [name for name in folders if _NODE_FOLDER.match(name)]:
        place["node"] = of_node[0].partition("=")[2] or of_node[0]
    found = _ROLE.search(stem)
    if found is None and (other := _OTHER_ROLE.match(stem)) and other.group(1) not in _NO_ROLES:
        found = other
    if found:
        place["role"] = found.group(1)
        if found.group(2):
            place["replica"] = f"{found.group(1)}/{int(found.group(2))}"
    return place


def _round(path: Path) -> dict[str, Any]:
    """The number of the round: the one that a name calls a round, else the last number of the file name, else a numeric
    folder name."""
    folders = path.absolute().parents[:NUM_FOLDERS_READ]
    for named in (path, *folders):
        if found := _ROUND.search(named.stem if named is path else named.name):
            return {"round_index": int(found.group(1)), "series": _ROUND.sub("", str(path.absolute()))}
    rest = path.stem.lower()
    for known in (_RANK, _PID, _AXIS, _NODE, _ROLE, _OTHER_ROLE):
        rest = known.sub("", rest)
    if rest != path.stem.lower() and (found := _ROUND_LAST.search(path.stem)) and _ROUND_LAST.search(rest):
        return {"round_index": int(found.group(1))}
    numbers = [folder.name for folder in folders if _ROUND_FOLDER.match(folder.name)]
    return {"round_index": int(numbers[0])} if numbers else {}

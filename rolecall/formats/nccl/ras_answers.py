"""Parses RAS answers: acknowledgements, JSON (strict first, then repaired), or text.

Pitfalls and sources: ras.py.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from rolecall.formats.nccl.ras import (
    COLLECTIVES,
    NUM_COMMUNICATORS_MAX,
    NUM_RANKS_MAX,
    NUM_STATUSES_MAX,
    Communicator,
    CommunicatorMember,
    Condition,
    LaunchLevel,
    MalformedRasStatus,
    Missing,
    NcclResult,
    Rank,
    RankFailure,
    RankState,
    RasStatus,
    Spread,
    communicator_hash,
    word,
)
from rolecall.formats.nccl.ras_text import all_text

_COUNT_MAX = 1 << 63
NUM_CONTAINERS_MAX = 3 * NUM_RANKS_MAX + 16 * NUM_COMMUNICATORS_MAX
"""Objects and lists: a rank has three. Two bytes make one of up to 64."""
_RESULTS = (NcclResult.CUDA, NcclResult.SYSTEM, NcclResult.INTERNAL, NcclResult.ARGUMENT, NcclResult.USAGE)
_SUCCESS, _REMOTE, _IN_PROGRESS = 0, 6, 7


_ACKNOWLEDGED = re.compile(r"\s*(?:(?:SERVER PROTOCOL [0-9]{1,9}|OK)\r?\n\s*)+", re.IGNORECASE)
_TEXT_BEGINS = re.compile(r"^(?:Job summary|Communicators\.\.\.)", re.MULTILINE)


def statuses(raw: bytes) -> list[RasStatus]:
    """All answers that stand one after the other, in order: at least one.

    Raises:
        Malformed: there is none, or one of them is cut short or not what it begins as.
    """
    text = raw.decode("utf-8", "replace")
    if found := _ACKNOWLEDGED.match(text):
        text = text[found.end() :]
    if text.lstrip()[:1] == "{":
        return _all_json(text)
    if _TEXT_BEGINS.search(text):
        return all_text(text)
    head = " ".join(text[:80].split())
    raise MalformedRasStatus(f"neither JSON nor the text of STATUS: {word(head)!r}" if head else "an empty answer")


_COMMA_MISSING = re.compile(r'([0-9}\]"]|true|false|null)([ \t]*\r?\n[ \t]*)(?="[A-Za-z0-9_]{1,64}"[ \t]*:)')


def _all_json(text: str) -> list[RasStatus]:
    if text.count("{") + text.count("[") > NUM_CONTAINERS_MAX:
        raise MalformedRasStatus(f"it may hold more than {NUM_CONTAINERS_MAX:,} lists and objects")
    try:
        return [_status(v, repaired=False) for v in _values(text)]
    except ValueError as e:
        if isinstance(e, MalformedRasStatus):
            raise
        repaired_text = _COMMA_MISSING.sub(r"\1,\2", text)
        if repaired_text == text:
            raise MalformedRasStatus(f"not JSON, or cut short: {word(str(e))}") from None
    try:
        return [_status(v, repaired=True) for v in _values(repaired_text)]
    except MalformedRasStatus:
        raise
    except ValueError as e:
        raise MalformedRasStatus(f"not JSON, or cut short: {word(str(e))}") from None


def _values(text: str) -> list[Any]:
    """Raises ValueError."""
    decoder, found, at = json.JSONDecoder(), list[Any](), 0
    try:
        while True:
            if ack := _ACKNOWLEDGED.match(text, at):
                at = ack.end()
            at = _skip_space(text, at)
            if at == len(text):
                return found
            if len(found) == NUM_STATUSES_MAX:
                raise MalformedRasStatus(f"more than {NUM_STATUSES_MAX:,} answers")
            value, at = decoder.raw_decode(text, at)
            found.append(value)
    except RecursionError:
        raise MalformedRasStatus("nested too deep") from None


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n\0":
        at += 1
    return at


def _status(value: Any, *, repaired: bool) -> RasStatus:
    if not isinstance(value, dict) or not isinstance(value.get("communicators"), list):
        raise MalformedRasStatus("a JSON value without a list `communicators`")
    listed = value["communicators"]
    if len(listed) > NUM_COMMUNICATORS_MAX:
        raise MalformedRasStatus(f"{len(listed):,} communicators, and {NUM_COMMUNICATORS_MAX:,} are read")
    num_ranks = sum(len(_list(c, key)) for c in listed for key in ("ranks", "missing_ranks"))
    if num_ranks > NUM_RANKS_MAX:
        raise MalformedRasStatus(f"{num_ranks:,} ranks, and {NUM_RANKS_MAX:,} are read")
    ras = value.get("ras")
    return RasStatus(
        form="json",
        nccl_version=word(value.get("nccl_version")),
        communicators=tuple(_communicator(c) for c in listed),
        num_communicators=len(listed),
        num_timeouts=_number(ras.get("timeouts_count")) or 0 if isinstance(ras, dict) else 0,
        repaired=repaired,
    )


def _list(value: Any, key: str) -> list[Any]:
    if not isinstance(value, dict):
        raise MalformedRasStatus("a communicator that is not an object")
    listed = value.get(key) or []
    if not isinstance(listed, list) or not all(isinstance(v, dict) for v in listed):
        raise MalformedRasStatus(f"{key} is not a list of objects")
    return listed


def _communicator(value: Any) -> Communicator:
    listed = _list(value, "ranks")
    collectives = _collectives(listed)
    ranks, failures = [], []
    for one in listed:
        status = one.get("status")
        status = status if isinstance(status, dict) else {}
        member = _member(one)
        ranks.append(Rank(member=member, state=_state(status), counts=_counts(one, collectives)))
        for key in ("init_state", "async_error"):
            if (result := _result(status.get(key))) is not None:
                failures.append(RankFailure(member=member, result=result))
                break
    missing = tuple(_missing(one) for one in _list(value, "missing_ranks"))
    num_missing = sum(m.unresponsive or m.dead for m in missing)
    spreads = _spreads(ranks, collectives)
    found = {
        Condition.MISMATCH: bool(spreads) or len({r.state for r in ranks}) > 1,
        Condition.INCOMPLETE: num_missing > 0,
        Condition.DEAD: any(m.dead for m in missing),
        Condition.ERROR: bool(failures),
    }
    return Communicator(
        hash=communicator_hash(value.get("hash")),
        size=_number(value.get("size")) or len(ranks) + len(missing),
        collectives=collectives,
        ranks=tuple(ranks),
        spreads=spreads,
        missing=missing,
        num_missing=num_missing,
        failures=tuple(failures),
        conditions=frozenset(c for c, holds in found.items() if holds),
    )


def _member(one: dict[str, Any]) -> CommunicatorMember:
    rank = _number(one.get("rank"))
    if rank is None:
        raise MalformedRasStatus("a rank without its number")
    gpu = _number(one.get("nvml_dev"))
    gpu = _number(one.get("cuda_dev")) if gpu is None else gpu
    return CommunicatorMember(rank, word(one.get("host")), _number(one.get("pid")), gpu)


def _missing(one: dict[str, Any]) -> Missing:
    # Without the object (a form not known), who is listed as missing counts as not reached.
    status = one.get("status")
    status = status if isinstance(status, dict) else {"unresponsive": True}
    return Missing(
        member=_member(one),
        unresponsive=status.get("unresponsive") is True,
        dead=status.get("considered_dead") is True,
    )


def _state(status: dict[str, Any]) -> RankState:
    if status.get("abort_flag") is True:
        return RankState.ABORT
    if status.get("finalize_called") is True or status.get("destroy_flag") is True:
        return RankState.FINALIZE
    return RankState.RUNNING if _number(status.get("init_state")) in (None, _SUCCESS) else RankState.INIT


def _result(value: Any) -> NcclResult | None:
    code = _number(value)
    if code is None or code in (_SUCCESS, _IN_PROGRESS):
        return None
    if code == _REMOTE:
        return NcclResult.REMOTE
    return _RESULTS[code - 1] if code <= len(_RESULTS) else NcclResult.OTHER


def _collectives(listed: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Names of the counts, as the first rank has them."""
    for one in listed:
        counts = one.get("collective_counts")
        if isinstance(counts, dict):
            return tuple(word(name) for name in list(counts)[:64])
    return COLLECTIVES


def _counts(one: dict[str, Any], collectives: tuple[str, ...]) -> tuple[int, ...]:
    counts = one.get("collective_counts")
    if isinstance(counts, dict):
        return tuple(_number(counts.get(name)) or 0 for name in collectives)
    if isinstance(counts, list):
        return tuple(_number(n) or 0 for n in counts[: len(collectives)]) + (0,) * (len(collectives) - len(counts))
    return (0,) * len(collectives)


def _spreads(ranks: Sequence[Rank], collectives: tuple[str, ...]) -> tuple[Spread, ...]:
    spreads = []
    for n, name in enumerate(collectives):
        by_count: dict[int, list[CommunicatorMember]] = {}
        for r in ranks:
            by_count.setdefault(r.counts[n], []).append(r.member)
        if len(by_count) > 1:
            levels = (LaunchLevel(launched=k, num_ranks=len(m), members=tuple(m)) for k, m in by_count.items())
            ordered = sorted(levels, key=lambda level: -level.launched)
            spreads.append(Spread(collective=name, levels=tuple(ordered)))
    return tuple(spreads)


def _number(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < _COUNT_MAX else None

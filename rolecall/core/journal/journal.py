"""The journal of a run: an append-only chain of events, and the small records that control loops compare.

Tables: `events` (the chain), `desired` and `actual` (written by recovery and by the runtime), `epochs`, `leases` (who
may act, with a fencing number that only grows), `flags` (paused, stop requested) and `windows` (the input of a
diagnosis, for replay). Related writes share one transaction.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import sqlalchemy as sa

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.errors import ConcurrentWrite, JournalCorrupt, LeaseFenced
from rolecall.core.ids import ReplicaId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads.contract import Payload
from rolecall.core.journal.payloads.run import ChainHead, EpochAdvanced
from rolecall.core.journal.rows import DamagedLine, Row, actual_of, epoch_of, event_of, packed, unpacked
from rolecall.core.journal.store import GENESIS, Store, canonical, chain_hash, chain_head
from rolecall.core.journal.tables import ACTUAL, DESIRED, EPOCHS, EVENTS, FLAGS, LEASES, WINDOWS
from rolecall.core.membership import Actual, Desired, Epoch, ReplicaState


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to act. `fence` grows with every change of holder and accompanies every action."""

    name: str
    holder: str
    fence: int
    expires_at: float  # wall seconds of the holder; see `Journal.acquire`


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalPage:
    """Lines of the journal. `full`: there may be more. `last`: everything up to this line has been read."""

    last: int
    full: bool
    events: list[Event] = field(default_factory=list)
    damaged: list[DamagedLine] = field(default_factory=list)


# Queries of every tick of a watch are built once: to build and compile one takes several times as long as to run it.
_DESIRED = sa.select(DESIRED)
_NEWEST = (
    sa.select(ACTUAL.c.replica, sa.func.max(ACTUAL.c.incarnation).label("incarnation"))
    .group_by(ACTUAL.c.replica)
    .subquery()
)
_CURRENT = sa.select(ACTUAL).join(
    _NEWEST, (ACTUAL.c.replica == _NEWEST.c.replica) & (ACTUAL.c.incarnation == _NEWEST.c.incarnation)
)
_FLAG = sa.select(FLAGS.c.value).where(FLAGS.c.name == sa.bindparam("name"))
_LEASE = sa.select(LEASES).where(LEASES.c.name == sa.bindparam("name"))
_LAST_SEQ = sa.select(sa.func.max(EVENTS.c.seq))


@cache
def _page_query(kinds: tuple[str, ...] | None, of_incident: bool) -> sa.Select[Any]:
    """Parameters: `after`, `limit`, and `incident` if `of_incident`."""
    query = sa.select(EVENTS).where(EVENTS.c.seq > sa.bindparam("after")).order_by(EVENTS.c.seq)
    if kinds is not None:
        # As text: a list of parameters is expanded again at each execution.
        query = query.where(EVENTS.c.kind.in_([sa.literal_column(f"'{kind}'") for kind in kinds]))
    if of_incident:
        query = query.where(EVENTS.c.incident_id == sa.bindparam("incident"))
    return query.limit(sa.bindparam("limit", type_=sa.Integer))


class Journal:
    """Reads and writes a run's journal. Every method is one transaction; reads within `view` share theirs."""

    def __init__(self, url: str, *, clock: Clock | None = None, create: bool = True) -> None:
        self.store = Store(url, create=create)
        self.clock = clock or SystemClock()

    def close(self) -> None:
        self.store.close()

    def view(self) -> AbstractContextManager[object]:
        """Reads of this thread within it see one state of the journal, and nothing that is written meanwhile."""
        return self.store.read()

    def append(
        self,
        payload: Payload,
        *,
        incident_id: str | None = None,
        caused_by: str | None = None,
        key: str | None = None,
        lease: Lease | None = None,
        unless: Collection[EventKind] = (),
        since: int = 0,
    ) -> Event:
        """Adds one event and returns it once it is on disk.

        With `key`, an existing event with that key is returned and nothing is written, so a writer that died may safely
        repeat its write. With `lease`, the write is refused when another holder's fencing number is newer. With
        `unless`, also when this incident has an event of these kinds after line `since`, the last one that the writer
        has read: an operator and a watch may write at the same time.

        Raises:
            LeaseFenced: `lease` is over. ConcurrentWrite: such an event was written in between.
        """
        entry = {"kind": str(payload.kind), "incident_id": incident_id, "caused_by": caused_by, "key": key}
        with self.store.write() as conn:
            row: Row | None = None
            if key is not None:
                row = conn.execute(sa.select(EVENTS).where(EVENTS.c.key == key)).mappings().first()
            if row is None:
                newer = (EVENTS.c.incident_id == incident_id) & (EVENTS.c.seq > since)
                meant = newer & EVENTS.c.kind.in_([str(k) for k in unless])
                found = conn.execute(sa.select(EVENTS.c.seq, EVENTS.c.kind).where(meant)).first() if unless else None
                if found is not None:
                    by = f"e{found.seq} {found.kind}"
                    raise ConcurrentWrite(incident_id=str(incident_id), event=str(payload.kind), by=by)
                row = self._append(conn, {**entry, "body": payload.to_body()}, lease)
        return event_of(row, self.store.where)

    def append_unchecked(self, kind: EventKind, body: Mapping[str, Any], *, incident_id: str | None = None) -> None:
        """Adds an event with any body, for tests of readers with damaged lines."""
        with self.store.write() as conn:
            self._append(conn, {"kind": str(kind), "incident_id": incident_id, "body": body})

    def _append(self, conn: sa.Connection, entry: Mapping[str, Any], lease: Lease | None = None) -> Row:
        """`entry`: columns of the line; missing ones are empty."""
        if lease is not None:
            self._check_fence(conn, lease)
        head = chain_head(conn, EVENTS)
        line = {
            **dict.fromkeys(("incident_id", "caused_by", "key")),
            **entry,
            "seq": head.position + 1,
            "wall_at": self.clock.wall(),
            "body": canonical(entry["body"]),
        }
        link = chain_hash(head.hash, line)
        conn.execute(EVENTS.insert().values(**line, hash=link))
        return {**line, "hash": link}

    def events(
        self,
        *,
        after: int = 0,
        kinds: Iterable[EventKind] | None = None,
        incident_id: str | None = None,
        limit: int = 100_000,
        damaged: list[DamagedLine] | None = None,
    ) -> list[Event]:
        """Events with `seq > after`, oldest first. `damaged`: receives unreadable lines, for a reader that continues
        without them.

        Raises:
            JournalCorrupt: a line cannot be read, and `damaged` is None.
        """
        page = self.page(after=after, kinds=kinds, incident_id=incident_id, limit=limit)
        if damaged is None and page.damaged:
            raise page.damaged[0].error
        if damaged is not None:
            damaged += page.damaged
        return page.events

    def page(
        self,
        *,
        after: int = 0,
        kinds: Iterable[EventKind] | None = None,
        incident_id: str | None = None,
        limit: int,
        wanted: Callable[[str], bool] | None = None,
    ) -> JournalPage:
        """At most `limit` lines with `seq > after`, oldest first. `wanted`: called with the kind of each line in order;
        a rejected line is not parsed."""
        query = _page_query(None if kinds is None else tuple(map(str, kinds)), incident_id is not None)
        parameters = {"after": after, "limit": limit, **({} if incident_id is None else {"incident": incident_id})}
        with self.store.read() as conn:
            rows = conn.execute(query, parameters).mappings().all()
            last = rows[-1]["seq"] if rows else after
            full = len(rows) == limit
            if not full and kinds is not None:
                # No line of these kinds follows: the next page starts here.
                last = max(last, conn.execute(_LAST_SEQ).scalar() or 0)
        page = JournalPage(last=last, full=full)
        for row in rows:
            if wanted is not None and not wanted(row["kind"]):
                continue
            try:
                page.events.append(event_of(row, self.store.where))
            except JournalCorrupt as e:
                page.damaged.append(DamagedLine(seq=row["seq"], incident_id=row["incident_id"], error=e))
        return page

    def last(self, kind: EventKind) -> Event | None:
        """The newest event of a kind."""
        query = sa.select(EVENTS).where(EVENTS.c.kind == str(kind)).order_by(EVENTS.c.seq.desc()).limit(1)
        return next((event_of(row, self.store.where) for row in self.store.rows(query)), None)

    def head(self) -> ChainHead:
        with self.store.read() as conn:
            return chain_head(conn, EVENTS)

    def verify(self) -> ChainHead:
        """Walks the whole chain. Raises JournalCorrupt: the first link that does not hold."""
        self.store.check_file()
        previous, position = GENESIS, 0
        with self.store.read() as conn:
            for row in conn.execute(sa.select(EVENTS).order_by(EVENTS.c.seq)).mappings():
                position += 1
                where = f"{self.store.where}: events line {position}"
                if row["seq"] != position:
                    raise JournalCorrupt(where=where, reason=f"line is missing, found {row['seq']}")
                entry = {k: row[k] for k in ("seq", "kind", "wall_at", "incident_id", "caused_by", "key", "body")}
                if chain_hash(previous, entry) != row["hash"]:
                    raise JournalCorrupt(where=where, reason="hash does not match the line")
                previous = row["hash"]
        return ChainHead(position=position, hash=previous)

    def acquire(self, name: str, holder: str, ttl_seconds: float, *, lapsed: Lease | None = None) -> Lease | None:
        """Takes the lease if it is free or already ours, or if it is still `lapsed`, which another one has not renewed
        for too long by the monotonic clock of this process; None while another one holds it.

        A new holder's fencing number is one higher than all earlier ones; a renewal keeps its number.
        """
        with self.store.write() as conn:
            row = conn.execute(sa.select(LEASES).where(LEASES.c.name == name)).mappings().first()
            if row is not None and row["holder"] not in ("", holder) and Lease(**row) != lapsed:
                return None
            fence = 1 if row is None else row["fence"] + (row["holder"] != holder)
            lease = Lease(name=name, holder=holder, fence=fence, expires_at=self.clock.wall() + ttl_seconds)
            if row is None:
                conn.execute(LEASES.insert().values(**asdict(lease)))
            else:
                conn.execute(LEASES.update().where(LEASES.c.name == name).values(**asdict(lease)))
            return lease

    def release(self, lease: Lease) -> None:
        """Releases the lease; does nothing when it is over already."""
        with self.store.write() as conn:
            mine = (LEASES.c.name == lease.name) & (LEASES.c.fence == lease.fence)
            conn.execute(LEASES.update().where(mine).values(expires_at=0.0, holder=""))

    def lease(self, name: str) -> Lease | None:
        return next((Lease(**row) for row in self.store.rows(_LEASE, name=name)), None)

    def _check_fence(self, conn: sa.Connection, lease: Lease) -> None:
        row = conn.execute(sa.select(LEASES).where(LEASES.c.name == lease.name)).mappings().first()
        if row is None or row["fence"] != lease.fence or row["holder"] != lease.holder:
            raise LeaseFenced(lease=lease.name, fence=lease.fence, holder=row["holder"] if row else "no one")

    def set_desired(
        self, record: Desired, *, expect_incarnation: int | None = None, lease: Lease | None = None
    ) -> bool:
        """Writes the desired state if the record is still at `expect_incarnation`; False otherwise.

        Idempotent: writing the current record again returns True.

        Raises:
            LeaseFenced: `lease` is over.
        """
        with self.store.write() as conn:
            if lease is not None:
                self._check_fence(conn, lease)
            row = conn.execute(sa.select(DESIRED).where(DESIRED.c.replica == record.replica)).mappings().first()
            if row is not None and row["incarnation"] == record.incarnation and row["node"] == record.node:
                return True
            if row is None:
                conn.execute(DESIRED.insert().values(**asdict(record)))
                return True
            if expect_incarnation is not None and row["incarnation"] != expect_incarnation:
                return False
            if record.incarnation <= row["incarnation"]:
                return False
            conn.execute(DESIRED.update().where(DESIRED.c.replica == record.replica).values(**asdict(record)))
            return True

    def remove_desired(self, replica: ReplicaId) -> None:
        """The replica is no longer desired: the runtime stops it."""
        with self.store.write() as conn:
            conn.execute(DESIRED.delete().where(DESIRED.c.replica == replica))

    def forget_replicas(self, replicas: Collection[str], *, lease: Lease) -> None:
        """Removes their desired and actual state. Raises LeaseFenced: `lease` is over."""
        with self.store.write() as conn:
            self._check_fence(conn, lease)
            for table in (DESIRED, ACTUAL):
                conn.execute(table.delete().where(table.c.replica.in_(list(replicas))))

    def desired(self) -> dict[ReplicaId, Desired]:
        return {ReplicaId(r["replica"]): Desired(**r) for r in self.store.rows(_DESIRED)}

    def set_actual(self, record: Actual, *, unless: Iterable[ReplicaState] = (), lease: Lease | None = None) -> bool:
        """Writes the actual state. False, without a write, when the record is in one of the states `unless`.

        A late message must not mark a LOST replica SERVING again: pass `unless=(LOST, STOPPED)` with every working
        state.

        Raises:
            LeaseFenced: `lease` is over.
        """
        values = {**asdict(record), "state": str(record.state), "changed_at": self.clock.wall()}
        this = (ACTUAL.c.replica == record.replica) & (ACTUAL.c.incarnation == record.incarnation)
        with self.store.write() as conn:
            if lease is not None:
                self._check_fence(conn, lease)
            row = conn.execute(sa.select(ACTUAL.c.state).where(this)).first()
            if row is not None and row.state in [str(u) for u in unless]:
                return False
            conn.execute(
                ACTUAL.insert().values(**values) if row is None else ACTUAL.update().where(this).values(**values)
            )
            return True

    def change_actual(
        self, replica: ReplicaId, incarnation: int, *, unless: Iterable[ReplicaState] = (), **values: Any
    ) -> bool:
        """Writes some columns of the actual state and leaves those of other writers as they are. False, without a
        write, when there is no such record, or when it is in one of the states `unless`.
        """
        this = (ACTUAL.c.replica == replica) & (ACTUAL.c.incarnation == incarnation)
        allowed = ACTUAL.c.state.not_in([str(u) for u in unless])
        with self.store.write() as conn:
            changed = ACTUAL.update().where(this & allowed).values(**values, changed_at=self.clock.wall())
            return bool(conn.execute(changed).rowcount)

    def actual(self, replicas: Collection[ReplicaId] | None = None) -> dict[tuple[ReplicaId, int], Actual]:
        """All incarnations ever seen, by (replica, incarnation); of these replicas, if given."""
        wanted = sa.select(ACTUAL)
        if replicas is not None:
            wanted = wanted.where(ACTUAL.c.replica.in_(list(replicas)))
        records = (actual_of(r, self.store.where) for r in self.store.rows(wanted))
        return {(record.replica, record.incarnation): record for record in records}

    def current(self) -> dict[ReplicaId, Actual]:
        """The newest incarnation of each replica, without reading the many older ones."""
        records = (actual_of(r, self.store.where) for r in self.store.rows(_CURRENT))
        return {record.replica: record for record in records}

    def grow_epoch(self, members: Iterable[tuple[ReplicaId, int]], because: str) -> Epoch:
        """The next membership epoch. Only the runtime calls this. The event is written in the same transaction."""
        sorted_members = tuple(sorted((str(r), i) for r, i in members))
        with self.store.write() as conn:
            last = conn.execute(sa.select(sa.func.max(EPOCHS.c.number))).scalar() or 0
            number, now = last + 1, self.clock.wall()
            text = canonical([list(m) for m in sorted_members])
            conn.execute(EPOCHS.insert().values(number=number, members=text, because=because, wall_at=now))
            advanced = EpochAdvanced(epoch=number, members=sorted_members, because=because)
            self._append(conn, {"kind": str(advanced.kind), "body": advanced.to_body()})
        typed = tuple((ReplicaId(r), i) for r, i in sorted_members)
        return Epoch(number=number, members=typed, because=because, wall_at=now)

    def epoch(self) -> Epoch | None:
        query = sa.select(EPOCHS).order_by(EPOCHS.c.number.desc()).limit(1)
        return next((epoch_of(row, self.store.where) for row in self.store.rows(query)), None)

    def set_flag(self, name: str, value: str | None, *, lease: Lease | None = None) -> None:
        """Sets a flag, or removes it with None. Known: `paused`, `stop`, `run` (see `core.rundir`),
        `observed_incarnations`, `observed_former` (see `watch.observed_fleet`), `watched_nodes` (see `recovery.nodes`),
        and `observed_ranks`, `observed_course`, `observed_capabilities` (see `views`).

        Raises:
            LeaseFenced: `lease` is over.
        """
        with self.store.write() as conn:
            if lease is not None:
                self._check_fence(conn, lease)
            conn.execute(FLAGS.delete().where(FLAGS.c.name == name))
            if value is not None:
                conn.execute(FLAGS.insert().values(name=name, value=value))

    def flag(self, name: str) -> str | None:
        with self.store.read() as conn:
            return conn.execute(_FLAG, {"name": name}).scalar()

    def save_window(self, incident_id: str, name: str, value: Any) -> None:
        """Stores the input of a diagnosis (JSON, compressed). The first one saved under a name is kept."""
        blob = packed(value)
        with self.store.write() as conn:
            this = (WINDOWS.c.incident_id == incident_id) & (WINDOWS.c.name == name)
            if conn.execute(sa.select(WINDOWS.c.name).where(this)).first() is None:
                conn.execute(WINDOWS.insert().values(incident_id=incident_id, name=name, blob=blob))

    def windows(self, incident_id: str) -> dict[str, Any]:
        rows = self.store.rows(sa.select(WINDOWS).where(WINDOWS.c.incident_id == incident_id))
        where = self.store.where
        return {r["name"]: unpacked(r["blob"], where, f"window {r['name']!r} of {incident_id}") for r in rows}

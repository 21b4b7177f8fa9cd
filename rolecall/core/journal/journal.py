"""The memory of a run: an append-only chain of events, and the small records that control loops compare.

Tables: `events` (the chain), `desired` and `actual` (the border between recovery and runtime), `epochs`, `leases`
(who may act, with a fencing number that only grows), `flags` (paused, stop requested) and `windows` (what a
diagnosis had read, for replay). All writes that belong together go in one transaction.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from rolecall.core.clock import Clock, SystemClock
from rolecall.core.errors import ConcurrentWrite, JournalCorrupt, LeaseFenced
from rolecall.core.ids import ReplicaId
from rolecall.core.journal.events import Event, EventKind
from rolecall.core.journal.payloads import ChainHead, EpochAdvanced, Payload
from rolecall.core.journal.rows import DamagedLine, Row, actual_of, epoch_of, event_of, packed, storable, unpacked
from rolecall.core.journal.store import GENESIS, Store, canonical, chain_hash
from rolecall.core.journal.tables import ACTUAL, DESIRED, EPOCHS, EVENTS, FLAGS, LEASES, WINDOWS
from rolecall.core.membership import Actual, Desired, Epoch, ReplicaState


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to act. `fence` grows with every change of holder and goes with every action."""

    name: str
    holder: str
    fence: int
    expires_at: float  # wall seconds


class Journal:
    """Reads and writes a run's memory. Every method is one transaction."""

    def __init__(self, url: str, *, clock: Clock | None = None, create: bool = True) -> None:
        self.store = Store(url, create=create)
        self.clock = clock or SystemClock()

    def close(self) -> None:
        self.store.close()

    # --- events -------------------------------------------------------------------------------------------------

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

        With `key`, an existing event with that key is returned and nothing is written: a writer that died
        between writing and remembering repeats itself without harm. With `lease`, the write is refused when another
        holder's fencing number is newer. With `unless`, when this incident has an event of these kinds after line
        `since`, up to which the writer had read: a person and a watch may speak at the same moment.

        Raises:
            LeaseFenced: `lease` is over.
            ConcurrentWrite: such an event came in between.
        """
        with self.store.write() as conn:
            if unless:
                self._check_overtaken(conn, payload.kind, incident_id, key, unless, since)
            row = self._append(conn, payload.kind, payload.to_body(), incident_id, caused_by, key, lease)
        return event_of(row, self.store.where)

    def append_unchecked(self, kind: EventKind, body: Mapping[str, Any], *, incident_id: str | None = None) -> None:
        """Adds an event whatever its body holds: for tests of what readers do with damage."""
        with self.store.write() as conn:
            self._append(conn, kind, body, incident_id, None, None, None)

    def _check_overtaken(
        self,
        conn: sa.Connection,
        kind: EventKind,
        incident_id: str | None,
        key: str | None,
        unless: Collection[EventKind],
        since: int,
    ) -> None:
        if key is not None and conn.execute(sa.select(EVENTS.c.seq).where(EVENTS.c.key == key)).first() is not None:
            return  # already recorded
        newer = (EVENTS.c.incident_id == incident_id) & (EVENTS.c.seq > since)
        meant = newer & EVENTS.c.kind.in_([str(k) for k in unless])
        found = conn.execute(sa.select(EVENTS.c.seq, EVENTS.c.kind).where(meant)).first()
        if found is not None:
            raise ConcurrentWrite(incident_id=str(incident_id), event=str(kind), by=f"e{found.seq} {found.kind}")

    def _append(
        self,
        conn: sa.Connection,
        kind: EventKind,
        body: Mapping[str, Any],
        incident_id: str | None,
        caused_by: str | None,
        key: str | None,
        lease: Lease | None,
    ) -> Row:
        if key is not None:
            row = conn.execute(sa.select(EVENTS).where(EVENTS.c.key == key)).mappings().first()
            if row is not None:
                return row
        if lease is not None:
            self._check_fence(conn, lease)
        last = conn.execute(sa.select(EVENTS.c.seq, EVENTS.c.hash).order_by(EVENTS.c.seq.desc()).limit(1)).first()
        seq, previous = (last.seq + 1, last.hash) if last else (1, GENESIS)
        entry = {
            "seq": seq,
            "kind": str(kind),
            "wall_at": self.clock.wall(),
            "incident_id": incident_id,
            "caused_by": caused_by,
            "key": key,
            "body": canonical(storable(body)),
        }
        link = chain_hash(previous, entry)
        conn.execute(EVENTS.insert().values(**entry, hash=link))
        return {**entry, "hash": link}

    def events(
        self,
        *,
        after: int = 0,
        kinds: Iterable[EventKind] | None = None,
        incident_id: str | None = None,
        limit: int = 100_000,
        damaged: list[DamagedLine] | None = None,
    ) -> list[Event]:
        """Events with `seq > after`, oldest first.

        `damaged`: takes the lines that cannot be read, for a reader that must go on without them.

        Raises:
            JournalCorrupt: a line cannot be read, and `damaged` was not given.
        """
        query = sa.select(EVENTS).where(EVENTS.c.seq > after).order_by(EVENTS.c.seq).limit(limit)
        if kinds is not None:
            query = query.where(EVENTS.c.kind.in_([str(k) for k in kinds]))
        if incident_id is not None:
            query = query.where(EVENTS.c.incident_id == incident_id)
        with self.store.read() as conn:
            rows = conn.execute(query).mappings().all()
        found = []
        for row in rows:
            try:
                found.append(event_of(row, self.store.where))
            except JournalCorrupt as e:
                if damaged is None:
                    raise
                damaged.append(DamagedLine(seq=row["seq"], incident_id=row["incident_id"], error=e))
        return found

    def last(self, kind: EventKind) -> Event | None:
        """The newest event of a kind."""
        query = sa.select(EVENTS).where(EVENTS.c.kind == str(kind)).order_by(EVENTS.c.seq.desc()).limit(1)
        with self.store.read() as conn:
            row = conn.execute(query).mappings().first()
        return event_of(row, self.store.where) if row else None

    def head(self) -> ChainHead:
        with self.store.read() as conn:
            row = conn.execute(sa.select(EVENTS.c.seq, EVENTS.c.hash).order_by(EVENTS.c.seq.desc()).limit(1)).first()
        return ChainHead(position=row.seq, hash=row.hash) if row else ChainHead(position=0, hash=GENESIS)

    def verify(self) -> ChainHead:
        """Walks the whole chain.

        Raises:
            JournalCorrupt: the first link that does not hold.
        """
        self.store.check_file()
        previous, position = GENESIS, 0
        with self.store.read() as conn:
            for row in conn.execute(sa.select(EVENTS).order_by(EVENTS.c.seq)).mappings():
                position += 1
                if row["seq"] != position:
                    raise JournalCorrupt(
                        where=f"{self.store.where}: events line {position}",
                        reason=f"line is missing, found {row['seq']}",
                    )
                entry = {k: row[k] for k in ("seq", "kind", "wall_at", "incident_id", "caused_by", "key", "body")}
                if chain_hash(previous, entry) != row["hash"]:
                    raise JournalCorrupt(
                        where=f"{self.store.where}: events line {position}", reason="hash does not match the line"
                    )
                previous = row["hash"]
        return ChainHead(position=position, hash=previous)

    # --- leases -------------------------------------------------------------------------------------------------

    def acquire(self, name: str, holder: str, ttl_seconds: float) -> Lease | None:
        """Takes the lease if it is free, expired or already ours; None while another holds it.

        A new holder gets a fencing number one above all before it; a renewal keeps its number.
        """
        now = self.clock.wall()
        with self.store.write() as conn:
            row = conn.execute(sa.select(LEASES).where(LEASES.c.name == name)).mappings().first()
            if row is not None and row["holder"] != holder and row["expires_at"] > now:
                return None
            fence = 1 if row is None else row["fence"] + (row["holder"] != holder)
            lease = Lease(name=name, holder=holder, fence=fence, expires_at=now + ttl_seconds)
            if row is None:
                conn.execute(LEASES.insert().values(**asdict(lease)))
            else:
                conn.execute(LEASES.update().where(LEASES.c.name == name).values(**asdict(lease)))
            return lease

    def release(self, lease: Lease) -> None:
        """Gives the lease back; does nothing when it is over already."""
        with self.store.write() as conn:
            mine = (LEASES.c.name == lease.name) & (LEASES.c.fence == lease.fence)
            conn.execute(LEASES.update().where(mine).values(expires_at=0.0, holder=""))

    def lease(self, name: str) -> Lease | None:
        with self.store.read() as conn:
            row = conn.execute(sa.select(LEASES).where(LEASES.c.name == name)).mappings().first()
        return Lease(**row) if row else None

    def _check_fence(self, conn: sa.Connection, lease: Lease) -> None:
        row = conn.execute(sa.select(LEASES).where(LEASES.c.name == lease.name)).mappings().first()
        if row is None or row["fence"] != lease.fence or row["holder"] != lease.holder:
            raise LeaseFenced(lease=lease.name, fence=lease.fence, holder=row["holder"] if row else "nobody")

    # --- desired and actual -------------------------------------------------------------------------------------

    def set_desired(
        self, record: Desired, *, expect_incarnation: int | None = None, lease: Lease | None = None
    ) -> bool:
        """Writes what should be, if the record still is at `expect_incarnation`; False when it is not.

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
        """The replica should not be: the runtime stops it."""
        with self.store.write() as conn:
            conn.execute(DESIRED.delete().where(DESIRED.c.replica == replica))

    def desired(self) -> dict[ReplicaId, Desired]:
        with self.store.read() as conn:
            rows = conn.execute(sa.select(DESIRED)).mappings().all()
        return {ReplicaId(r["replica"]): Desired(**r) for r in rows}

    def set_actual(self, record: Actual, *, unless: Iterable[ReplicaState] = ()) -> bool:
        """Writes the actual state. False, without a write, when the record is in one of the states `unless`.

        A LOST replica must not be called SERVING again by a message that was under way: pass
        `unless=(LOST, STOPPED)` whenever the new state is one of work.
        """
        with self.store.write() as conn:
            return self._set_actual(conn, record, tuple(unless))

    def _set_actual(self, conn: sa.Connection, record: Actual, unless: tuple[ReplicaState, ...]) -> bool:
        values = {**asdict(record), "state": str(record.state), "changed_at": self.clock.wall()}
        this = (ACTUAL.c.replica == record.replica) & (ACTUAL.c.incarnation == record.incarnation)
        row = conn.execute(sa.select(ACTUAL.c.state).where(this)).first()
        if row is None:
            conn.execute(ACTUAL.insert().values(**values))
            return True
        if row.state in [str(u) for u in unless]:
            return False
        conn.execute(ACTUAL.update().where(this).values(**values))
        return True

    def actual(self) -> dict[tuple[ReplicaId, int], Actual]:
        """All incarnations ever seen, by (replica, incarnation)."""
        with self.store.read() as conn:
            rows = conn.execute(sa.select(ACTUAL)).mappings().all()
        records = (actual_of(r, self.store.where) for r in rows)
        return {(record.replica, record.incarnation): record for record in records}

    def current(self) -> dict[ReplicaId, Actual]:
        """The newest incarnation of each replica. The others stay where they are: they are many, and it is read
        often."""
        newest = sa.select(ACTUAL.c.replica, sa.func.max(ACTUAL.c.incarnation).label("incarnation"))
        last = newest.group_by(ACTUAL.c.replica).subquery()
        these = (ACTUAL.c.replica == last.c.replica) & (ACTUAL.c.incarnation == last.c.incarnation)
        with self.store.read() as conn:
            rows = conn.execute(sa.select(ACTUAL).join(last, these)).mappings().all()
        records = (actual_of(r, self.store.where) for r in rows)
        return {record.replica: record for record in records}

    # --- epochs -------------------------------------------------------------------------------------------------

    def grow_epoch(self, members: Iterable[tuple[ReplicaId, int]], because: str) -> Epoch:
        """The next membership epoch. Only the runtime calls this. The event is written in the same transaction."""
        sorted_members = tuple(sorted((str(r), i) for r, i in members))
        with self.store.write() as conn:
            last = conn.execute(sa.select(sa.func.max(EPOCHS.c.number))).scalar() or 0
            number, now = last + 1, self.clock.wall()
            text = canonical([list(m) for m in sorted_members])
            conn.execute(EPOCHS.insert().values(number=number, members=text, because=because, wall_at=now))
            advanced = EpochAdvanced(epoch=number, members=sorted_members, because=because)
            self._append(conn, advanced.kind, advanced.to_body(), None, None, None, None)
        typed = tuple((ReplicaId(r), i) for r, i in sorted_members)
        return Epoch(number=number, members=typed, because=because, wall_at=now)

    def epoch(self) -> Epoch | None:
        with self.store.read() as conn:
            row = conn.execute(sa.select(EPOCHS).order_by(EPOCHS.c.number.desc()).limit(1)).mappings().first()
        return None if row is None else epoch_of(row, self.store.where)

    # --- flags and windows --------------------------------------------------------------------------------------

    def set_flag(self, name: str, value: str | None) -> None:
        """Sets a flag, or removes it with None. Known: `paused`, `stop`, `run` (see `core.rundir`)."""
        with self.store.write() as conn:
            conn.execute(FLAGS.delete().where(FLAGS.c.name == name))
            if value is not None:
                conn.execute(FLAGS.insert().values(name=name, value=value))

    def flag(self, name: str) -> str | None:
        with self.store.read() as conn:
            return conn.execute(sa.select(FLAGS.c.value).where(FLAGS.c.name == name)).scalar()

    def save_window(self, incident_id: str, name: str, value: Any) -> None:
        """Keeps what a diagnosis had read (JSON, compressed). The first one saved under a name stays."""
        blob = packed(value)
        with self.store.write() as conn:
            this = (WINDOWS.c.incident_id == incident_id) & (WINDOWS.c.name == name)
            if conn.execute(sa.select(WINDOWS.c.name).where(this)).first() is None:
                conn.execute(WINDOWS.insert().values(incident_id=incident_id, name=name, blob=blob))

    def windows(self, incident_id: str) -> dict[str, Any]:
        with self.store.read() as conn:
            rows = conn.execute(sa.select(WINDOWS).where(WINDOWS.c.incident_id == incident_id)).all()
        return {r.name: unpacked(r.blob, self.store.where, f"window {r.name!r} of {incident_id}") for r in rows}

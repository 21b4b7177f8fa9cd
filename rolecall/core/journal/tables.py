"""Tables of a run's database (SQLAlchemy). `events` and `ledger` are hash chains: rows are only appended."""

from typing import Any

import sqlalchemy as sa

METADATA = sa.MetaData()


def _table(name: str, *columns: sa.Column[Any]) -> sa.Table:
    return sa.Table(name, METADATA, *columns)


META = _table("meta", sa.Column("name", sa.Text, primary_key=True), sa.Column("value", sa.Text))
EVENTS = _table(
    "events",
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.Text, nullable=False, index=True),
    sa.Column("wall_at", sa.Float, nullable=False),
    sa.Column("incident_id", sa.Text, index=True),
    sa.Column("caused_by", sa.Text),
    sa.Column("key", sa.Text, unique=True),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("hash", sa.Text, nullable=False),
)
DESIRED = _table(
    "desired",
    sa.Column("replica", sa.Text, primary_key=True),
    sa.Column("incarnation", sa.Integer, nullable=False),
    sa.Column("node", sa.Text, nullable=False),
    sa.Column("prefer_standby", sa.Boolean, nullable=False),
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("because", sa.Text, nullable=False),
    sa.Column("incident_id", sa.Text),
)
ACTUAL = _table(
    "actual",
    sa.Column("replica", sa.Text, primary_key=True),
    sa.Column("incarnation", sa.Integer, primary_key=True),
    sa.Column("node", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("start_ticks", sa.BigInteger, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("because", sa.Text, nullable=False),
    sa.Column("policy_version", sa.Integer, nullable=False),
    sa.Column("changed_at", sa.Float, nullable=False),
)
EPOCHS = _table(
    "epochs",
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("members", sa.Text, nullable=False),
    sa.Column("because", sa.Text, nullable=False),
    sa.Column("wall_at", sa.Float, nullable=False),
)
LEASES = _table(
    "leases",
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("holder", sa.Text, nullable=False),
    sa.Column("fence", sa.Integer, nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False),
)
FLAGS = _table("flags", sa.Column("name", sa.Text, primary_key=True), sa.Column("value", sa.Text, nullable=False))
WINDOWS = _table(
    "windows",
    sa.Column("incident_id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("blob", sa.LargeBinary, nullable=False),
)
LEDGER = _table(
    "ledger",
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("group_id", sa.Text, nullable=False, index=True),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("num_tokens", sa.Integer, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("wall_at", sa.Float, nullable=False),
    sa.Column("hash", sa.Text, nullable=False),
)
LEDGER_GROUPS = _table(
    "ledger_groups",
    sa.Column("group_id", sa.Text, primary_key=True),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("step", sa.Integer, nullable=False),
)

"""Location of a journal: the database URLs that a job may use, and their display without passwords.

SQLite needs no server and is the default. PostgreSQL is for nodes that share no file system: each run has a schema of
its own there, so that one URL serves any number of runs. Nothing else is accepted: writers take turns by locks that
only these two have.
"""

import re

from rolecall.core.ids import RunId

DRIVERS = {
    "sqlite": "sqlite",
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}
_PASSWORDS = (
    re.compile(r"(?<=://)([^\s/@:]*):[^\s/]*@"),  # up to the last @: a password may contain one
    re.compile(r"\b((?:ssl)?password)=[^&\s'\"]*", re.IGNORECASE),
)
SCHEMA_LENGTH_MAX = 63
"""PostgreSQL truncates longer names."""


def redacted(text: str) -> str:
    """`text` with the password of every URL in it as `***`."""
    return _PASSWORDS[1].sub(r"\1=***", _PASSWORDS[0].sub(r"\1:***@", text))


def sqlite_path(url: str) -> str:
    """The file of a SQLite URL: all that follows `sqlite:///`, as it is. A path may have `?`, `#` and `%`, which mean
    something else to SQLAlchemy and to SQLite."""
    return url.removeprefix("sqlite:///")


def checked_url(text: str) -> str:
    """`text` with its driver.

    Raises:
        ValueError: it is not a supported database URL. The reason contains no password.
    """
    import sqlalchemy as sa  # imported here: agents read run directories, and start five times as fast without it

    wanted = "postgresql://USER@HOST/DATABASE or sqlite:////PATH/TO/FILE"
    try:
        url = sa.make_url(text)
    except sa.exc.ArgumentError:
        raise ValueError(f"is no database URL; expected {wanted}") from None
    except ValueError:
        raise ValueError(f"its port is no number; expected {wanted}") from None
    driver = DRIVERS.get(url.drivername)
    if driver is None:
        raise ValueError(f"{url.drivername} is not supported; expected {wanted}")
    if not url.database:
        raise ValueError(f"names no database; expected {wanted}")
    if driver == "sqlite":
        if not sqlite_path(text).startswith("/"):
            raise ValueError(f"names no file by its absolute path; expected {wanted}")
        return text
    return url.set(drivername=driver).render_as_string(hide_password=False)


def run_url(url: str, run_id: RunId) -> str:
    """`url`, with the schema of one run."""
    import sqlalchemy as sa

    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "postgresql":
        return url
    schema = f"rolecall-{run_id}"[:SCHEMA_LENGTH_MAX]
    before = parsed.query.get("options", "")
    options = f'{before} -csearch_path="{schema}"'.strip()
    return parsed.update_query_dict({"options": options}).render_as_string(hide_password=False)

"""The journal's event contract: `contract` has the kinds and the table, `run` and `recovery` one payload a kind.

Both are imported here, so that the table is complete whichever of them is asked for.
"""

from rolecall.core.journal.payloads import recovery, run

__all__ = ["recovery", "run"]

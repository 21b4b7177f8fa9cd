"""The controller's Ray clients, with Ray's errors translated. The only module of the loop that depends on Ray."""

import asyncio
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from rolecall.core.errors import DeadlineExceeded, RolecallError
from rolecall.core.membership import Actual
from rolecall.rl_runtime.protocol.clients import ReplicaExited
from rolecall.rl_runtime.protocol.spawn import NAMESPACE

REASON_LENGTH_MAX = 300


class RemoteError(Exception):
    """An exception of a replica that could not be deserialized."""


class RayClient:
    """One incarnation, reached through a named actor."""

    def __init__(self, record: Actual, handle: Any) -> None:
        self.replica, self.incarnation, self._handle = record.replica, record.incarnation, handle

    async def call(self, method: str, *args: Any) -> Any:
        """
        Raises:
            ReplicaExited: the actor died.
            DeadlineExceeded: Ray cannot reach it at the moment; it may be alive.
        """
        try:
            return await asyncio.wrap_future(getattr(self._handle, method).remote(*args).future())
        except RayTaskError as e:
            cause = getattr(e, "cause", None)
            if isinstance(cause, Exception) and not isinstance(cause, RayError):
                raise cause from None
            raise RemoteError(str(e.traceback_str).strip().splitlines()[-1][:REASON_LENGTH_MAX]) from None
        except ActorUnavailableError as e:
            call = f"{self.replica}#{self.incarnation} {method} ({_short(e)})"
            raise DeadlineExceeded(waited_for=call, seconds=0.0) from None
        except RayActorError as e:
            raise ReplicaExited(replica=self.replica, incarnation=self.incarnation, because=_short(e)) from None
        except RayError as e:
            raise RolecallError(f"{self.replica}#{self.incarnation} {method}: {_short(e)}") from None


def connect(record: Actual) -> RayClient:
    """
    Raises:
        ReplicaExited: no actor has that name.
    """
    try:
        return RayClient(record, ray.get_actor(record.actor, namespace=NAMESPACE))
    except ValueError as e:
        because = f"no actor {record.actor}: {_short(e)}"
        raise ReplicaExited(replica=record.replica, incarnation=record.incarnation, because=because) from None


def _short(error: BaseException) -> str:
    """First informative line: Ray's messages continue with stack traces and advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:REASON_LENGTH_MAX]

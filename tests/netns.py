"""A network of a test's own: machines in network namespaces behind a switch, whose cables can be pulled.

A pulled cable drops every packet and sends no FIN and no RST: what a killed process on one machine cannot show.

The namespaces have no names. Each lives through a holder process that ends when its stdin closes, so nothing is left
behind, not even by a test run that is killed. Root makes them directly; others need a user namespace around them. The
addresses exist inside only.
"""

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass

import pytest

PREFIX = "10.77.0"
_MAKE = "echo made && exec cat"
"""What a holder does: says that its namespace exists, then waits for the end of its stdin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One namespace, by the process that holds it. May be sent to other processes."""

    address: str
    holder_pid: int
    in_user_namespace: bool

    def enter(self) -> None:
        """Moves the calling thread; threads and processes that it starts later follow. A process with other threads
        cannot enter a user namespace."""
        libc = ctypes.CDLL(None, use_errno=True)
        for kind in ("user", "net") if self.in_user_namespace else ("net",):
            fd = os.open(f"/proc/{self.holder_pid}/ns/{kind}", os.O_RDONLY)
            try:
                if libc.setns(fd, 0) != 0:
                    raise OSError(ctypes.get_errno(), f"setns {kind} of {self.holder_pid}")
            finally:
                os.close(fd)

    @property
    def command(self) -> list[str]:
        """In front of a command line: it runs on this machine."""
        user = ["-U", "--preserve-credentials"] if self.in_user_namespace else []
        return ["nsenter", "-t", str(self.holder_pid), *user, "-n", "--"]

    def run_ip(self, *lines: str) -> None:
        done = subprocess.run(
            [*self.command, "ip", "-batch", "-"],
            input="\n".join(lines),
            text=True,
            capture_output=True,
            timeout=30,
            check=False,  # what went wrong is on stderr
        )
        assert done.returncode == 0, (lines, done.stderr)


class Network:
    """`machines` reach each other and the switch through the switch; the switch has an address of its own.

    Raises:
        pytest.skip.Exception: this host does not allow it; says what is missing.
    """

    def __init__(self, num_machines: int) -> None:
        for tool in ("ip", "unshare", "nsenter"):
            if shutil.which(tool) is None:
                pytest.skip(f"no network namespaces here: command {tool} is missing (Debian: iproute2, util-linux)")
        self._holders: list[subprocess.Popen[str]] = []
        self._in_user_namespace = os.geteuid() != 0
        try:
            self.switch = self._hold([*(["unshare", "-r"] if self._in_user_namespace else ["unshare"]), "-n"], 254)
            self._lay_switch()
            self.machines = [self._attach(i) for i in range(num_machines)]
        except BaseException:
            self.close()
            raise

    def cut(self, index: int) -> None:
        """Pulls the cable of machine `index` at the switch."""
        self.switch.run_ip(f"link set port{index} down")

    def heal(self, index: int) -> None:
        self.switch.run_ip(f"link set port{index} up")

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.communicate(timeout=30)
        self._holders.clear()

    def _hold(self, unshare: list[str], number: int) -> Machine:
        holder = subprocess.Popen(
            [*unshare, "sh", "-c", _MAKE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._holders.append(holder)
        assert holder.stdout is not None and holder.stderr is not None
        if holder.stdout.readline() != "made\n":
            pytest.skip(f"no network namespaces here: {holder.stderr.read().strip()}")
        return Machine(address=f"{PREFIX}.{number}", holder_pid=holder.pid, in_user_namespace=self._in_user_namespace)

    def _lay_switch(self) -> None:
        try:
            self.switch.run_ip(
                "link set lo up",
                "link add switch type bridge",
                f"addr add {self.switch.address}/24 dev switch",
                "link set switch up",
            )
        except AssertionError as e:
            pytest.skip(f"no bridge between network namespaces here: {e}")

    def _attach(self, index: int) -> Machine:
        machine = self._hold([*self.switch.command, "unshare", "-n"], index + 1)
        self.switch.run_ip(
            f"link add port{index} type veth peer name cable netns {machine.holder_pid}",
            f"link set port{index} master switch up",
        )
        machine.run_ip("link set lo up", f"addr add {machine.address}/24 dev cable", "link set cable up")
        return machine

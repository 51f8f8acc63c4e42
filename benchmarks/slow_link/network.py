"""Two hosts on one machine: Linux network namespaces joined by a veth pair whose rate is limited each way."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType

#: The interface's name in both namespaces, and each host's address on the link.
INTERFACE = "link0"
ADDRESSES = ("10.99.7.1", "10.99.7.2")

_PROGRAMS = ("ip", "tc", "taskset")
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}

#: Bytes that may leave at once. The kernel passes packets of up to 64 KiB, which only hardware would split: a smaller
#: bucket would drop them.
_SMALLEST_BURST = 256 * 1024

#: Seconds until the bucket is empty at full rate; the kernel's timers are not finer than that.
_BURST_SECONDS = 0.002

#: Time after which a queued packet is dropped.
_QUEUE = "50ms"


#: A hardware address that no interface has.
_NOBODY = "02:00:00:00:00:99"


class NoNetwork(Exception):
    """Why this machine cannot emulate the link, in one sentence."""


def bits_per_second(rate: str) -> float:
    """A rate as tc writes it, such as `1gbit`, in bits per second. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?bit)", rate.lower())
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"--rate {rate} is invalid: write 1gbit or 200mbit")
    return float(found[1]) * _UNITS[found[2]]


def burst_bytes(rate: str) -> int:
    return max(_SMALLEST_BURST, round(bits_per_second(rate) / 8 * _BURST_SECONDS))


def check_machine() -> None:
    """Refuse a machine without root, iproute2 or a second core. Raises NoNetwork."""
    if os.geteuid() != 0:
        raise NoNetwork("network namespaces need root: run this as root")
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        raise NoNetwork(f"{', '.join(missing)} not found: install iproute2 (ip, tc) and util-linux (taskset)")
    if len(os.sched_getaffinity(0)) < len(ADDRESSES):
        raise NoNetwork("two workers need a core each, and this process may use one only")


def inside(namespace: str, core: int, command: Sequence[str]) -> list[str]:
    """The command line that runs `command` in a namespace, on one core."""
    return ["ip", "netns", "exec", namespace, "taskset", "-c", str(core), *command]


class Link:
    """A context in which the two hosts exist. `rate`: in each direction, as tc writes it.

    `namespaces`: their names. `cores`: the core that belongs to each.
    """

    def __init__(self, rate: str) -> None:
        self.rate = rate
        # Unique to this process.
        self.namespaces = tuple(f"slow-link-{os.getpid()}-{host}" for host in "ab")
        self.cores = tuple(sorted(os.sched_getaffinity(0))[: len(ADDRESSES)])

    def __enter__(self) -> Link:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on host 0 or 1."""
        return inside(self.namespaces[host], self.cores[host], command)

    def cut(self) -> None:
        """Let nothing through in either direction, without a word to either host, until `restore` is called."""
        for name, address in zip(self.namespaces, reversed(ADDRESSES), strict=True):
            _ip("-n", name, "neighbour", "replace", address, "lladdr", _NOBODY, "dev", INTERFACE, "nud", "permanent")

    def restore(self) -> None:
        for name, address in zip(self.namespaces, reversed(ADDRESSES), strict=True):
            _ip("-n", name, "neighbour", "delete", address, "dev", INTERFACE)

    def _make(self) -> None:
        first, second = self.namespaces
        for name in self.namespaces:
            _ip("netns", "add", name)
        _ip("link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second)
        for name, address in zip(self.namespaces, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            # Each end limits what it sends, so each direction has the whole rate.
            limit = ("rate", self.rate, "burst", str(burst_bytes(self.rate)), "latency", _QUEUE)
            _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limit)

    def _remove(self) -> None:
        """Deleting the namespaces deletes the pair. Those that do not exist yet are ignored."""
        for name in self.namespaces:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNetwork(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")

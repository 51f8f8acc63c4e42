"""Processes on the two hosts, started and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.slow_link.network import ADDRESSES, INTERFACE, Link

#: In a new namespace all ports are free.
_PORT = "29400"

#: Seconds after which a run is considered stuck.
_TIMEOUT_S = 3600.0

_JOINING = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RunFailed(Exception):
    """A measured process failed; the message is the end of its output."""


@dataclass(frozen=True)
class Process:
    """A command line for host 0 or 1, and its additional environment variables."""

    host: int
    command: Sequence[str]
    variables: Mapping[str, str]


def world(command: Sequence[str], workers: int, host: int = 0) -> list[Process]:
    """One worker on `host`, or two that communicate over the link, one per host."""
    if workers == 1:
        return [Process(host, command, {})]
    rendezvous = {"WORLD_SIZE": str(workers), "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": _PORT}
    place = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
    return [Process(rank, command, {**rendezvous, **place, "RANK": str(rank)}) for rank in range(workers)]


def run(link: Link, processes: Sequence[Process], logs: Path) -> None:
    """Run all of them at once, each on its host's core. Raises RunFailed as soon as one of them fails."""
    base = {name: value for name, value in os.environ.items() if name not in _JOINING}
    # One thread each; and no warnings that namespaces have no name server.
    base |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    started: list[subprocess.Popen[bytes]] = []
    names = [logs / f"{number}.log" for number in range(len(processes))]
    try:
        for process, name in zip(processes, names, strict=True):
            command = link.command(process.host, process.command)
            with name.open("wb") as log:
                environment = {**base, **process.variables}
                started.append(
                    subprocess.Popen(
                        command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )
        _wait(started, names)
    finally:
        for child in started:
            _end(child)


def _wait(started: Sequence[subprocess.Popen[bytes]], names: Sequence[Path]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        codes = [child.poll() for child in started]
        for child, code, name in zip(started, codes, names, strict=True):
            if code:
                raise RunFailed(f"{' '.join(map(str, child.args))}\nexit code {code}\n{_tail(name)}")
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise RunFailed(f"not finished after {_TIMEOUT_S:g} s\n" + "\n".join(_tail(name) for name in names))
        time.sleep(0.2)


def _tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill a process that still runs, with its children: a namespace exists as long as anything runs in it."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()

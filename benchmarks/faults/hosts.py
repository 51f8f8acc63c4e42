"""Two hosts under torchrun: one is killed, or the link between them is cut for 10 s or for good.

The hosts are network namespaces (benchmarks/slow_link). The one that is killed is not the one with the rendezvous.
"""

from __future__ import annotations

import random
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen

from benchmarks.faults.processes import Processes, wait_until
from benchmarks.faults.records import Trial
from benchmarks.faults.runs import (
    VARIANTS,
    Place,
    delivery_problems,
    logged,
    phase,
    problems_of,
    reference,
)
from benchmarks.slow_link.network import ADDRESSES, INTERFACE, Link
from runner.folder.record import FINISHED, status_of

KILLED, REPLACED, SHORT_CUT, LONG_CUT = CASES = (
    "a host is killed",
    "a host is killed, --nnodes=1:2",
    "the link is cut for 10 s",
    "the link is cut for good",
)
_RATE, _PORT, _CUT_S = "1gbit", 29400, 10.0
#: `launch.timeout_s`, and the seconds that a run may take to end after it, and from its start to its end.
_TIMEOUT_S, _SLACK_S, _WHOLE_S = 20, 20.0, 300.0
_VARIANT = VARIANTS["k=1, 2 workers"]


def hosts(case: str, number: int, seed: int, place: Place) -> Trial:
    """One run on two hosts, disturbed after a random step; if that ends it, it is resumed with two workers on one."""
    draw = random.Random(f"{seed}/{case}/{number}")
    expected, folder = reference(_VARIANT, place), place.work / "hosts" / f"{CASES.index(case)}-{number:03d}"
    shutil.rmtree(folder, ignore_errors=True)
    step = draw.randint(20, 100)
    with ExitStack() as stack:
        link = stack.enter_context(Link(_RATE))
        environment = {**place.environment, "GLOO_SOCKET_IFNAME": INTERFACE, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        both = [stack.enter_context(Processes(folder.with_suffix(f".host{host}.log"), environment)) for host in (0, 1)]
        commands = [both[host].start(link.command(host, _torchrun(case, host, folder, place))) for host in (0, 1)]
        if not wait_until(lambda: _step(folder) >= step or commands[0].poll() is not None, _WHOLE_S):
            raise SystemExit(f"no step {step} after {_WHOLE_S:g} s: see {both[0].log}")
        now, disturbed = phase(folder), time.monotonic()
        problems = list(_disturb(case, link, both, commands))
        seconds = time.monotonic() - disturbed
        problems += [one for processes in both for one in processes.left(0)]
    ended_itself = status_of(folder) == FINISHED
    if not ended_itself and case in (REPLACED, SHORT_CUT):
        problems.append("did not go on by itself")
    if not ended_itself:
        with Processes(folder.with_suffix(".resumed.log"), place.environment) as processes:
            processes.start(_VARIANT.command(2, f"resume={folder}")).wait()
    problems += problems_of(folder, expected, "nothing" if case == REPLACED else "bits")
    problems += delivery_problems(folder, place.uri)
    fault = {"target": "link" if case in (SHORT_CUT, LONG_CUT) else "host", "phase": now}
    return Trial("hosts", case, f"{case} {number}", [fault], problems, details={"step": step, "end_s": seconds})


def _torchrun(case: str, host: int, folder: Path, place: Place) -> list[str]:
    nodes, restarts = ("1:2", 3) if case == REPLACED else ("2", 0)
    where = (f"--rdzv-endpoint={ADDRESSES[0]}:{_PORT}", f"--local-addr={ADDRESSES[host]}", "--rdzv-id=faults")
    # torchrun would look the address up to find out which host has the store; a namespace has no name server.
    found = f"--rdzv-conf=is_host={host == 0},last_call_timeout=2"
    options = (f"--nnodes={nodes}", "--nproc-per-node=1", f"--max-restarts={restarts}", "--rdzv-backend=c10d", *where)
    place_of = (f"hydra.run.dir={folder}", f"tracking.uri={place.uri}")
    limit = f"launch.timeout_s={_TIMEOUT_S}"
    command = ["-m", "runner", "device=cpu", "device.workers=null", *_VARIANT.overrides, limit, *place_of]
    return [sys.executable, "-m", "torch.distributed.run", *options, found, *command]


def _disturb(case: str, link: Link, both: Sequence[Processes], commands: Sequence[Popen[bytes]]) -> Iterator[str]:
    """Inject the fault and wait for the end of the run; what was not as required."""
    if case in (KILLED, REPLACED):
        both[1].kill()
        limit_s = _WHOLE_S if case == REPLACED else _TIMEOUT_S + _SLACK_S
    else:
        link.cut()
        limit_s = _WHOLE_S
        if case == SHORT_CUT:
            time.sleep(_CUT_S)
            link.restore()
        else:
            limit_s = _TIMEOUT_S + _SLACK_S

    def working() -> list[int]:
        """The hosts with a worker. An agent of torchrun can wait longer for a rendezvous that it cannot reach."""
        return [host for host in (0, 1) if both[host].by_role(commands[host]).get("worker")]

    if not wait_until(lambda: commands[0].poll() is not None and not working(), limit_s):
        yield f"host {', '.join(map(str, working()))} not ended after {limit_s:g} s"
    for processes in both:
        processes.kill()
    if case == LONG_CUT and not re.search(r"\b(worker|rank) [01]\b", "".join(one.log.read_text() for one in both)):
        yield "no rank is named"


def _step(folder: Path) -> int:
    return max((line["step"] for line in logged(folder)), default=0)

"""A real Slurm with two nodes on this host: the script of docs/clusters, and the jobs of a sweep."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import BIN, ROOT, TIMEOUT_S, output, start, wait_until
from tests.runs import read

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="needs Slurm's packages slurmctld, slurmd and munge"),
]

SCRIPT = ROOT / "docs/clusters/slurm.sh"
#: Long enough to be interrupted; the weights have the same bits on any number of workers.
RUN = ["recipe=linear", "epochs=400", "batch=fixed_global", "equivalence=identical", "tracking=none"]

#: Two nodes on one host, of one core each. A job that is put back waits until its credential has expired: for 5 s.
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SwitchType=switch/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes=n1,n2 Default=YES State=UP MaxTime=INFINITE
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(bytes(range(128)))
    (folder / "munge.key").chmod(0o600)
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(host=socket.gethostname(), folder=folder, ports=free_ports(3)))
    files = {"key-file": "key", "seed-file": "seed", "socket": "socket", "pid-file": "pid", "log-file": "log"}
    munge = [f"--{option}={folder}/munge.{name}" for option, name in files.items()]
    daemons = [
        ("munged", "--foreground", "--force", *munge),
        ("slurmctld", "-D"),
        *(("slurmd", "-D", "-N", node) for node in ("n1", "n2")),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(config))
        patch.setenv("PATH", str(BIN), prepend=":")
        patch.setenv("PYTHONPATH", str(ROOT))
        running = []
        try:
            for command in daemons:
                running.append(start(folder, *command, keep=True))
                if command[0] == "munged":
                    wait_until((folder / "munge.socket").exists, "munged does not start")
            wait_until(lambda: run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2", "the nodes do not come up")
            yield
        finally:
            for process in reversed(running):
                process.terminate()
                process.wait(timeout=TIMEOUT_S)


def test_a_job_that_goes_back_into_the_queue(here: Path, cluster: None) -> None:
    """Told to stop, it saves, is put back by its script, and ends with the weights of one undisturbed worker."""
    job = run("sbatch", "--parsable", "--gpus-per-node=0", str(SCRIPT), *RUN).strip()
    folder = here / "outputs/slurm" / job
    wait_until(lambda: (folder / "metrics.jsonl").exists(), f"the job does not train: {here}")
    run("scancel", "--signal=USR1", job)

    def status() -> str | None:
        return read(folder, "summary.json")["status"] if (folder / "summary.json").exists() else None

    wait_until(lambda: status() == "PREEMPTED", f"the run is not saved: {here}")
    wait_until(lambda: status() == "FINISHED", f"the run does not continue: {here}")
    undisturbed = start(here, "-m", "runner", "device=cpu", "hydra.run.dir=outputs/one", *RUN)
    assert undisturbed.wait(timeout=TIMEOUT_S) == 0
    resumed, one = read(folder, "summary.json"), read(here / "outputs/one", "summary.json")
    assert resumed["resumed_after"]
    assert resumed["weights_digest"] == one["weights_digest"] is not None


def test_a_sweep(here: Path, cluster: None) -> None:
    """Each job of the sweep is one of Slurm's."""
    launcher = ["hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=10"]
    process = start(here, "-m", "runner", "-m", *launcher, "recipe=linear", "seed=0,1", "tracking=none")
    assert process.wait(timeout=TIMEOUT_S) == 0, output(here)
    jobs = list(here.glob("outputs/sweeps/*/*/summary.json"))
    assert [read(path.parent, "summary.json")["status"] for path in jobs] == ["FINISHED", "FINISHED"]

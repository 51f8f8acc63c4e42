"""Record what a set of runs computes, bit for bit, and compare it with another version of the code.

    python -m benchmarks.golden_runs record FILE --code CHECKOUT [--cola FOLDER --squad FOLDER --model FOLDER]
    python -m benchmarks.golden_runs compare FILE FILE

A refactoring must reproduce the file: the loss of every step, the final weights, the ledger's digest, the plan, the
certificate's level and the names of the metrics. The bits depend on the processor, so both files are made on one
machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from runner.launch.signals import EXIT_PREEMPTED

#: Steps of the runs of the built-in recipe: more than an epoch of 167, or a few phases of k = 4.
_LONG, _SHORT = "max_steps=180", "max_steps=50"
_LOCAL = ("device=cpu2", "sync.k=4", _SHORT)

BUILT_IN: Mapping[str, Sequence[str]] = {
    "default, 1 worker": ("device=cpu", _LONG),
    "default, 2 workers": ("device=cpu2", _LONG),
    "accumulation 4": ("device=cpu", "accumulation.steps=4", _SHORT),
    "accumulation 2, 2 workers": ("device=cpu2", "accumulation.steps=2", _SHORT),
    "bf16, 2 workers": ("device=cpu2", "precision=bf16", _SHORT),
    "fp16 scaler, 2 workers": ("device=cpu2", "precision=fp16", _SHORT),
    "exact dropout, fp64, 2 workers": ("device=cpu2", "equivalence=exact", "precision=fp64", _SHORT),
    "sgd": ("device=cpu2", "optimizer=sgd", _SHORT),
    "wire bf16, k=1": ("device=cpu2", "sync.compress=bf16", _SHORT),
    "periodic k=4": _LOCAL,
    "periodic k=4, bf16 wire": (*_LOCAL, "sync.compress=bf16"),
    "periodic k=4, fp16 wire": (*_LOCAL, "sync.compress=fp16"),
    "periodic k=4, overlap, bf16 wire": (*_LOCAL, "sync.overlap=true", "sync.compress=bf16"),
    "periodic k=4, bf16, overlap, bf16 wire": (
        *_LOCAL,
        "precision=bf16",
        "sync.overlap=true",
        "sync.delay=1",
        "sync.compress=bf16",
    ),
    "periodic k=4, fp64 exact": (*_LOCAL, "equivalence=exact", "precision=fp64"),
    "post_local": (*_LOCAL, "sync.schedule=post_local"),
    "qsr": (*_LOCAL, "sync.schedule=qsr"),
    "outer": (*_LOCAL, "sync=outer"),
    "diloco": (*_LOCAL, "sync=diloco"),
    "slowmo": (*_LOCAL, "sync=slowmo"),
    "diloco, overlap": (*_LOCAL, "sync=diloco", "sync.overlap=true"),
    "accumulated": (*_LOCAL, "sync=accumulated"),
    "accumulated, overlap": (*_LOCAL, "sync=accumulated", "sync.overlap=true"),
    "gradients": (*_LOCAL, "sync=gradients"),
    "streaming": (*_LOCAL, "sync=streaming", "sync.k=8"),
    "streaming, int8 wire": (*_LOCAL, "sync=streaming", "sync.k=8", "sync.compress=int8"),
    "streaming, 2 fragments, delay 2": (
        *_LOCAL,
        "sync=streaming",
        "sync.k=8",
        "sync.fragments=2",
        "sync.delay=2",
    ),
    "identical, 1 worker": ("device=cpu", "equivalence=identical", _SHORT),
    "identical, 2 workers": ("device=cpu2", "equivalence=identical", _SHORT),
    "fsdp, 2 workers": ("device=cpu2", "sharding=fsdp", _SHORT),
    "linear recipe": ("device=cpu2", "recipe=linear", _SHORT),
}
#: Ended by a signal when it has saved a checkpoint, and resumed.
RESUMED = ("device=cpu2", "sync.k=4", "max_steps=600", "checkpoint.every_steps=20")
#: The same settings twice: the second command resumes the first sweep and adds a seed.
SWEEP = ("-m", "device=cpu,cpu2", "max_steps=12", "tracking=none")


def with_data(cola: Path, squad: Path, model: Path) -> dict[str, Sequence[str]]:
    """Runs on a few hundred samples of CoLA and SQuAD with a pretrained encoder."""
    of_cola = (
        "recipe=cola",
        f"recipe.data.train={cola / 'in_domain_train.tsv'}",
        f"recipe.data.eval={cola / 'in_domain_dev.tsv'}",
        f"recipe.model.name={model}",
        "recipe.data.max_train_samples=200",
        "recipe.data.max_eval_samples=100",
    )
    of_squad = (
        "recipe=squad",
        f"recipe.data.train={squad / 'train-v1.1-first4k.json'}",
        f"recipe.data.eval={squad / 'dev-v1.1-xquad-en.json'}",
        f"recipe.model.name={model}",
        "recipe.data.max_train_samples=60",
        "recipe.data.max_eval_samples=40",
        "recipe.max_length=128",
        "recipe.doc_stride=32",
        "epochs=1",
    )
    return {
        "cola, 1 worker": (*of_cola, "device=cpu"),
        "cola, 2 workers, k=4": (*of_cola, "device=cpu2", "sync.k=4"),
        "squad, 1 worker": (*of_squad, "device=cpu"),
        "squad, 2 workers": (*of_squad, "device=cpu2"),
        "cola, LoRA, 2 workers": (*of_cola, "device=cpu2", "adapter=lora"),
    }


def record(file: Path, code: Path, runs: Mapping[str, Sequence[str]], log_every_step: Sequence[str]) -> None:
    """Run each command with the code in `code`, and write what it computed to `file`, run by run."""
    found: dict[str, Any] = {}
    for name, overrides in runs.items():
        with tempfile.TemporaryDirectory() as folder:
            _run(code, Path(folder), [*overrides, *log_every_step, "tracking=none", "hydra.run.dir=run"])
            found[name] = fingerprint(Path(folder, "run"))
        file.write_text(json.dumps(found, indent=1))
        print(f"{name}: {found[name]['weights'][:12]}", flush=True)


def record_resumed(file: Path, code: Path, log_every_step: Sequence[str]) -> None:
    """Run, end the run by SIGTERM after its first checkpoint, resume it, and add what it computed to `file`."""
    found = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        arguments = [*RESUMED, *log_every_step, "tracking=none", "hydra.run.dir=run"]
        command = subprocess.Popen(_command(arguments), cwd=folder, env=_environment(code), stdout=subprocess.DEVNULL)
        while command.poll() is None and not any(run.glob("checkpoints/*/complete.json")):
            time.sleep(0.02)
        command.send_signal(signal.SIGTERM)
        if command.wait() != EXIT_PREEMPTED:
            raise SystemExit(f"the run that was to be resumed ended with exit code {command.returncode}")
        _run(code, Path(folder), ["resume=run"])
        found["resumed"] = fingerprint(run)
    file.write_text(json.dumps(found, indent=1))


def record_sweep(file: Path, code: Path, log_every_step: Sequence[str]) -> None:
    """Run a sweep, resume it with one more seed, and add what its jobs computed to `file`."""
    found = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        sweep = [*SWEEP, *log_every_step, "hydra.sweep.dir=sweep"]
        _run(code, Path(folder), [*sweep, "seed=0"])
        _run(code, Path(folder), [*sweep, "seed=0,1", "resume_sweep=sweep"])
        for summary in sorted(Path(folder, "sweep").rglob("summary.json")):
            found[f"resumed sweep: {json.loads(summary.read_text())['setup']}"] = fingerprint(summary.parent)
    file.write_text(json.dumps(found, indent=1))


def fingerprint(run: Path) -> dict[str, Any]:
    """What a run's folder says that must not change."""
    summary = json.loads((run / "summary.json").read_text())
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ledger = json.loads((run / "ledger.json").read_text())
    plan = json.loads((run / "plan.json").read_text())
    return {
        "losses": [(row["step"], row["value"].hex()) for row in metrics if row["key"] == "train/loss"],
        "drift": [(row["step"], row["value"]) for row in metrics if row["key"] == "sync/drift"],
        "weights": _weights(run / "model"),
        "eval": summary["eval"],
        "ledger": ledger["digest"],
        "plan": plan,
        "certificate": summary["certificate"],
        "metric names": sorted({row["key"] for row in metrics}),
    }


def _weights(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        for name, array in sorted(load_file(path).items()):
            digest.update(name.encode() + array.tobytes())
    return digest.hexdigest()


def _run(code: Path, folder: Path, arguments: Sequence[str]) -> None:
    command = _command(arguments)
    done = subprocess.run(command, cwd=folder, env=_environment(code), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "runner", *arguments]


def _environment(code: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(code), "HF_HUB_OFFLINE": "1"}


def compare(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """A row of a Markdown table for each run: what is equal in both files, and what is not."""
    rows = ["| run | equal | different |", "| --- | --- | --- |"]
    for name in dict.fromkeys([*one, *other]):
        if name not in one or name not in other:
            rows.append(f"| {name} | | in one file only |")
            continue
        equal = [key for key in one[name] if one[name][key] == other[name].get(key)]
        different = [key for key in one[name] if key not in equal]
        rows.append(f"| {name} | {', '.join(equal)} | {', '.join(different)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run everything and write what it computed")
    recording.add_argument("file", type=Path)
    recording.add_argument("--code", type=Path, default=Path.cwd(), help="the checkout whose code is run")
    recording.add_argument("--cola", type=Path)
    recording.add_argument("--squad", type=Path)
    recording.add_argument("--model", type=Path)
    recording.add_argument("--only", help="run only what has this text in its name")
    recording.add_argument("--log", nargs="*", default=["log_every=1"], help="settings that log every step's loss")
    comparing = commands.add_parser("compare", help="compare two files, run by run")
    comparing.add_argument("one", type=Path)
    comparing.add_argument("other", type=Path)
    options = parser.parse_args()
    if options.command == "compare":
        print("\n".join(compare(*(json.loads(path.read_text()) for path in (options.one, options.other)))))
        return
    runs = dict(BUILT_IN)
    if options.cola and options.squad and options.model:
        runs |= with_data(options.cola.resolve(), options.squad.resolve(), options.model.resolve())
    if options.only:
        runs = {name: run for name, run in runs.items() if options.only in name}
    record(options.file, options.code.resolve(), runs, options.log)
    if not options.only:
        record_resumed(options.file, options.code.resolve(), options.log)
        record_sweep(options.file, options.code.resolve(), options.log)


if __name__ == "__main__":
    main()

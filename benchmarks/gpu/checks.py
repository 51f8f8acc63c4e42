"""What is checked, in the order in which it is worth knowing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from benchmarks.gpu.runs import Bench, Failed, NotReached, Run
from benchmarks.side_by_side import steady_speed

_STEPS = ("max_steps=30", "log_every=1", "checkpoint=none")
#: Largest relative difference of a step's loss to that of fp32; bf16 rounds to 1 part in 256, fp16 to 1 in 2,048.
_ROUNDING = {"tf32": 0.01, "bf16": 0.05, "fp16": 0.05}


def machine(bench: Bench) -> str:
    """Versions, and what torch says about the device."""
    import torch

    if not bench.on_gpu:
        return f"torch {torch.__version__}, CPU {torch.backends.cpu.get_cpu_capability()}"
    found = torch.cuda.get_device_properties(0)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    memory = f"{found.total_memory / 2**30:.0f} GiB"
    return f"torch {torch.__version__}, nccl {nccl}, {found.name} ({found.major}.{found.minor}), {memory}"


def same_as_on_a_cpu(bench: Bench) -> str:
    """fp64 with dropout by sample: losses as on a CPU, up to the order of sums."""
    exact = ("equivalence=exact", "precision=fp64", *_STEPS)
    return f"largest relative difference of {_close(bench.train(*exact), bench.train(*exact, 'device=cpu'), 1e-9):.1e}"


def tests_that_need_a_gpu(bench: Bench) -> str:
    """The test suite's own, which are skipped elsewhere."""
    if not bench.on_gpu:
        raise NotReached("needs a GPU")
    printed = bench.command(["-m", "pytest", "-q", "tests/kernels", "tests/train/test_seeds.py", "--rootdir", "."])
    return printed.splitlines()[-1].strip("= ")


def precisions(bench: Bench) -> str:
    """Losses near those of fp32, and the speed of each."""
    names = ("tf32", "bf16", "fp16") if bench.on_gpu else ("bf16",)
    full = bench.train(*bench.cola(), *_STEPS)
    seen = [f"fp32 {_speed(full):,.0f} samples/s"]
    for name in names:
        run = bench.train(*bench.cola(), *_STEPS, f"precision={name}")
        seen.append(f"{name} {_speed(run):,.0f} samples/s, within {_close(run, full, _ROUNDING[name]):.1%}")
    return "; ".join(seen)


def repeatable(bench: Bench) -> str:
    """`equivalence=identical`: the same bits twice, and with two micro-batches in place of one."""
    identical = ("equivalence=identical", *_STEPS)
    runs = [bench.train_again(*identical, *more) for more in ((), (), ("accumulation.steps=2",))]
    if len({run.weights for run in runs}) != 1:
        raise Failed("weights " + ", ".join(run.weights[:12] for run in runs))
    return f"weights {runs[0].weights[:12]} three times"


def under_torchrun(bench: Bench) -> str:
    """One worker started by torchrun, in a process group (nccl on a GPU), computes what the runner's own does."""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m")
    difference = _close(bench.train(*_STEPS, launcher=launcher), bench.train(*_STEPS), 1e-5)
    return f"losses within {difference:.1e}"


def without_padding(bench: Bench) -> str:
    """`recipe.padding=none` computes what padded batches do, faster."""
    common = (*bench.cola(), *_STEPS, "precision=bf16")
    packed, padded = (bench.train(*common, f"recipe.padding={name}") for name in ("none", "longest"))
    difference = _close(packed, padded, _ROUNDING["bf16"])
    return f"losses within {difference:.1%}, {_speed(packed) / _speed(padded):.2f} times as fast"


def resumed_on_a_cpu(bench: Bench) -> str:
    """A run that is preempted on the device resumes on a CPU, with the losses of one that stays on the device."""
    whole = ("max_steps=60", "log_every=1", "checkpoint.every_steps=10")
    folder = bench.new_folder()
    first = ["-m", "runner", bench.runner_device, *whole, "tracking=none", f"hydra.run.dir={folder}"]
    bench.command(first, stop_when=folder / "checkpoints" / "step-*")
    bench.command(["-m", "runner", f"resume={folder}", "device=cpu"])
    resumed = Run(folder)
    if len(resumed.losses) != 60:
        raise Failed(f"{len(resumed.losses)} losses for 60 steps")
    return f"resumed after {resumed.record.resumed_after}, within {_close(resumed, bench.train(*whole), 1e-3):.1e}"


def sharded(bench: Bench) -> str:
    """FSDP, and FSDP with weights in the host's memory, of one worker."""
    plain = bench.train(*_STEPS)
    kinds = ("fsdp", "fsdp_offload") if bench.on_gpu else ("fsdp",)
    return ", ".join(f"{k}: within {_close(bench.train(*_STEPS, f'sharding={k}'), plain, 1e-4):.1e}" for k in kinds)


def compiled(bench: Bench) -> str:
    """`compile=true`: the same losses; the speed in the second half of the run."""
    common = (*bench.cola(), "precision=bf16", "max_steps=60", "log_every=1", "checkpoint=none")
    plain, fast = bench.train(*common), bench.train(*common, "compile=true")
    difference = _close(fast, plain, _ROUNDING["bf16"])
    return f"losses within {difference:.1%}, {_speed(fast) / _speed(plain):.2f} times as fast"


def memory(bench: Bench) -> str:
    """`accumulation=fit` finds micro-batches for a global batch that would take more memory than it may."""
    share = 0.2 if bench.on_gpu else 0.05
    batch = 4000 if bench.on_gpu else 480
    fit = ("accumulation=fit", f"accumulation.memory_share={share}", f"batch.global_batch={batch}")
    run = bench.train(*bench.cola(), *fit, "precision=bf16", "max_steps=2")
    (peak,) = run.record.result.peak_memory_bytes or (0,)
    return f"global batch {batch} in {run.plan['accumulation_steps']} micro-batches, peak {peak / 2**30:.1f} GiB"


def planner(bench: Bench) -> str:
    """`runner.plan measure=true` predicts the time of a run that follows it."""
    settings = [*bench.cola(), "precision=bf16", "max_steps=100", "checkpoint=none", bench.runner_device]
    bench.command(["-m", "runner.plan", *settings, "measure=true"])
    scores = bench.train(*settings).record.prediction
    if scores is None:
        raise Failed("the run that followed was not predicted")
    return f"training {scores.training_s.predicted:.1f} s predicted, {scores.training_s.measured:.1f} s measured"


def beside_peers(bench: Bench) -> str:
    """Samples per second beside Accelerate and the Trainer, with BERT-base and a small GPT-2."""
    out = bench.work / "peers"
    data = [f"--{name}={bench.work / name}.tsv" for name in ("train", "dev")]
    sizes = ["--precisions=bf16"] if bench.on_gpu else ["--precisions=fp32", "--steps=3"]
    bench.command(
        [
            *("-m", "benchmarks.peers", "run", f"--device={bench.device}", f"--out={out}", *data),
            *(f"--squad={bench.work / 'squad.json'}", f"--model={bench.work / 'bert'}", "--repetitions=1"),
            *("--tasks=cola,gpt2", "--workers=1", "--variants=runner,accelerate,trainer", *sizes),
            f"--minutes={bench.left_s() / 60:.2f}",
        ]
    )
    return (out / f"table{'-cuda' if bench.on_gpu else ''}.md").read_text(encoding="utf-8")


CHECKS: Sequence[Callable[[Bench], str]] = (
    machine,
    same_as_on_a_cpu,
    precisions,
    without_padding,
    under_torchrun,
    resumed_on_a_cpu,
    repeatable,
    sharded,
    tests_that_need_a_gpu,
    memory,
    planner,
    beside_peers,
    compiled,
)


def _close(one: Run, other: Run, limit: float) -> float:
    """Return the largest relative difference of the losses of all steps. Raises Failed if it is above `limit`."""
    found = max(abs(a - b) / abs(b) for a, b in zip(one.losses, other.losses, strict=True))
    if not found <= limit:
        ends = ", ".join(f"{fmean(run.losses[-5:]):.4f}" for run in (one, other))
        raise Failed(f"losses differ by up to {found:.1e}, allowed are {limit:.0e}; the last are {ends}")
    return found


def _speed(run: Run) -> float:
    return steady_speed(run.folder / "metrics.jsonl") or float("nan")

"""Why was a run not faster? Numbers in, sentences out. Reads no file and measures nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runner.speed.run_numbers import PER_SAMPLE, RunNumbers
from runner.train.tokens import Tokens

#: What takes less than a fifth is not worth a sentence: without it all else would be at most a quarter faster.
STANDS_OUT = 0.2
#: Start-up and end are paid once, however long a run is, so that a larger part of a short one is nothing unusual.
PAID_ONCE_STANDS_OUT = 0.3
#: Of the samples read. What a sampler repeats to make all shares of an epoch's end equal stays below this.
REPEATS_STAND_OUT = 0.02

#: The phases of a step that are the work asked for.
_COMPUTATION = (*PER_SAMPLE, "optimizer")


@dataclass(frozen=True)
class Diagnosis:
    """`kind`: its name, always the same. `lost_share`: of the run's time, that would be saved without the cause."""

    kind: str
    sentence: str
    lost_share: float


def share_at(k: int, each_s: float, compute_s: float) -> float:
    """Communication's share of a step if workers meet every `k` steps. `each_s`: of one meeting; `compute_s`: a step's.

    A meeting costs the same however many steps lie between two.
    """
    return each_s / k / (compute_s + each_s / k)


def smallest_k(each_s: float, compute_s: float, largest: int) -> int | None:
    """The smallest power of two, at most `largest`, with which communication no longer stands out; None without one."""
    powers = (2**n for n in range(largest.bit_length()))
    return next((k for k in powers if share_at(k, each_s, compute_s) < STANDS_OUT), None)


def diagnose(run: RunNumbers) -> list[Diagnosis]:
    """All that made a run slower than it could be, the most important first; empty only if nothing is known of it.

    First a run that did other work than was asked for and one that says nothing of the named device, since no other
    number means much then; all others by the time they cost.
    """
    first = [said for look in _FIRST if (said := look(run)) is not None]
    others = [said for look in _OTHERS if (said := look(run)) is not None]
    found = [*first, *sorted(others, key=lambda said: -said.lost_share)]
    nothing = _nothing(run)
    return found or ([nothing] if nothing is not None else [])


def _read_everything(run: RunNumbers) -> Diagnosis | None:
    read, workers = run.reading, run.world_size
    if read is None or workers == 1 or not read.unique == read.expected > 0 or read.seen != workers * read.unique:
        return None
    part = "" if read.expected == run.samples_per_epoch else " of the steps that were done"
    sentence = (
        f"each worker read all {read.unique:,} {run.unit}{part}: the data were not dealt out, so {workers} workers did "
        f"{workers} times the work"
    )
    return Diagnosis("not dealt out", sentence, (1 - 1 / workers) * run.training_share)


def _rehearsed(run: RunNumbers) -> Diagnosis | None:
    if not run.rehearsed or run.first_step_s is None:
        return None
    sentence = f"this was a rehearsal of {run.device} on other hardware: its speed says nothing about {run.device}"
    return Diagnosis("rehearsed", sentence, 0.0)


def _repeats(run: RunNumbers) -> Diagnosis | None:
    read = run.reading
    if read is None or _read_everything(run) is not None:
        return None
    repeats = read.seen - read.unique
    if repeats < REPEATS_STAND_OUT * read.seen or not repeats:
        return None
    sentence = f"{repeats:,} of {read.seen:,} {run.unit} read were repeats within the epoch: ledger.json has the counts"
    return Diagnosis("repeats", sentence, repeats / read.seen * run.training_share)


def _communication(run: RunNumbers) -> Diagnosis | None:
    share = run.in_steps("communication")
    if run.world_size == 1 or share < STANDS_OUT:
        return None
    rate = run.link_gbit_per_s
    link = f" at this link speed ({_rate(rate)} Gbit/s)" if rate is not None else ""
    sentence = f"communication took {share:.0%} of a step{link}{_another_k(run)}"
    return Diagnosis("communication", sentence, share * run.training_share)


def _another_k(run: RunNumbers) -> str:
    if run.largest_k is None or not run.step_s:
        return ""
    spent = run.step_s["communication"]
    compute_s = sum(run.step_s.values()) - spent
    each_s = spent * run.k
    if run.k == 1 and run.collectives is not None and run.collectives.synchronisations:
        # What the backward pass hides of it today would have to be waited for between local phases.
        each_s = max(each_s, run.collectives.seconds / run.collectives.synchronisations)
    k = smallest_k(each_s, compute_s, run.largest_k)
    if k is None:
        return f"; no sync.k up to this run's {run.largest_k:,} steps would bring it below {STANDS_OUT:.0%}"
    return f"; sync.k={k} would bring it to {share_at(k, each_s, compute_s):.0%}"


def _rate(gbit_per_s: float) -> str:
    return f"{gbit_per_s:,.0f}" if gbit_per_s >= 10 else f"{gbit_per_s:.2g}"


def _data(run: RunNumbers) -> Diagnosis | None:
    share = run.in_steps("data")
    if share < STANDS_OUT:
        return None
    sentence = (
        f"waiting for data took {share:.0%} of a step: a cheaper collate in the recipe, or a faster disk under "
        "cache_dir, would shorten it"
    )
    return Diagnosis("data", sentence, share * run.training_share)


def _optimizer(run: RunNumbers) -> Diagnosis | None:
    share = run.in_steps("optimizer")
    if share < STANDS_OUT:
        return None
    sentence = (
        f"the optimizer took {share:.0%} of a step: it is as long for the {run.replica_batch:,} {run.unit} of a "
        "worker's step as for more, so more workers do not shorten it, and a larger global batch makes it rarer"
    )
    return Diagnosis("optimizer", sentence, share * run.training_share)


def _overhead(run: RunNumbers) -> Diagnosis | None:
    share = run.in_steps("other")
    if share < STANDS_OUT:
        return None
    sentence = (
        f"{share:.0%} of a step was neither computation nor communication, but reducing and logging losses and the "
        "loop itself: larger micro-batches make it less"
    )
    return Diagnosis("overhead", sentence, share * run.training_share)


def _padding(run: RunNumbers) -> Diagnosis | None:
    if run.tokens is None or run.tokens.padding_share < STANDS_OUT:
        return None
    share = run.tokens.padding_share
    sentence = f"padding was {share:.0%} of the tokens: {_less_padding(run, run.tokens)}"
    return Diagnosis("padding", sentence, share * run.computing)


def _less_padding(run: RunNumbers, tokens: Tokens) -> str:
    """What mends the largest part of it."""
    if tokens.fillers > max(tokens.uneven, tokens.beyond):
        return "most of it fills up the short last batch of an epoch, and a smaller global batch has less of it"
    if tokens.uneven >= tokens.beyond:
        sorting = "" if run.length_sorted else "batch.length_sorted=true and "
        return f"{sorting}smaller micro-batches (more accumulation.steps) would hold {run.unit} of like length"
    if run.pads_to is not None:
        return f"recipe.padding={run.pads_to} makes every row as long, and recipe.padding=longest follows the batch"
    if run.few_lengths:
        return "more lengths in device.length_buckets would fit batches closer"
    return "the recipe's collate pads beyond the longest row of a batch"


def _cores(run: RunNumbers) -> Diagnosis | None:
    workers = run.local_workers
    if run.samples_per_s is None or run.cores is None or workers == 1 or workers * run.jobs_at_once < run.cores:
        return None
    sentence = (
        f"{workers} workers share {run.cores} core{'s' * (run.cores > 1)}: each trains with one thread, and more of "
        "them cannot be faster here"
    )
    # One worker would have all the cores to itself.
    return Diagnosis("cores", sentence, (1 - 1 / workers) * run.computing)


def _side_by_side(run: RunNumbers) -> Diagnosis | None:
    jobs = run.jobs_at_once
    if run.samples_per_s is None or jobs == 1:
        return None
    sentence = f"{jobs} jobs ran at once on this machine: the speed is not that of a run by itself"
    return Diagnosis("side by side", sentence, (1 - 1 / jobs) * run.computing)


def _micro_batch(run: RunNumbers) -> Diagnosis | None:
    base, own = run.baseline, run.compute_s
    if base is None or not base.compute_s or own is None or run.micro_batch >= base.micro_batch or _cores(run):
        return None
    saved = 1 - base.compute_s / own
    if saved < STANDS_OUT:
        return None
    sentence = (
        f"a sample took {own / base.compute_s:.1f} times as long to compute as in {base.folder}: micro-batches of "
        f"{run.micro_batch:,} instead of {base.micro_batch:,} {run.unit} fill the device less"
    )
    return Diagnosis("micro-batch", sentence, saved * run.computing)


def _start_up(run: RunNumbers) -> Diagnosis | None:
    share = run.of_wall(run.first_step_s)
    if share < PAID_ONCE_STANDS_OUT:
        return None
    compiling = ", compile=true included" if run.compiled else ""
    sentence = (
        f"start-up was {share:.0%} of this run ({run.first_step_s:.1f} of {run.wall_s:.1f} s until the first step was "
        f"done{compiling}): it is paid once, so that more steps make it less"
    )
    return Diagnosis("start-up", sentence, share)


def _ending(run: RunNumbers) -> Diagnosis | None:
    share = run.of_wall(run.ending_s)
    if share < PAID_ONCE_STANDS_OUT:
        return None
    sentence = (
        f"{share:.0%} of this run came after training and evaluation ({run.ending_s:.1f} of {run.wall_s:.1f} s: saving "
        "the model, closing the books, the tracking store): it is paid once, so that more steps make it less"
    )
    return Diagnosis("ending", sentence, share)


def _compiling(run: RunNumbers) -> Diagnosis | None:
    share = run.of_wall(run.compile_s)
    if share < STANDS_OUT:
        return None
    sentence = (
        f"compiling took {share:.0%} of this run ({run.compile_s:.1f} s): each shape of a batch is a program of its "
        "own, and fewer device.length_buckets are fewer of them"
    )
    return Diagnosis("compiling", sentence, share)


def _evaluation(run: RunNumbers) -> Diagnosis | None:
    share = run.of_wall(run.evaluation_s)
    if share < STANDS_OUT:
        return None
    sentence = (
        f"evaluation took {share:.0%} of this run: a larger evaluation.every_steps or evaluation.micro_batch would "
        "shorten it"
    )
    return Diagnosis("evaluation", sentence, share)


def _nothing(run: RunNumbers) -> Diagnosis | None:
    if run.samples_per_s is None:
        return None
    if run.step_share is None:
        computed = "a step is one program here, whose parts have no times"
    else:
        computed = f"{run.in_steps(*_COMPUTATION):.0%} of a step was computation"
    efficiency = run.scaling_efficiency
    slow = f", and yet scaling efficiency is {efficiency:.0%}" if efficiency and efficiency < 1 - STANDS_OUT else ""
    return Diagnosis("nothing", f"{computed}; nothing stands out{slow}", 0.0)


_Look = Callable[[RunNumbers], Diagnosis | None]
_FIRST: tuple[_Look, ...] = (_read_everything, _rehearsed)
_OTHERS: tuple[_Look, ...] = (
    _repeats,
    _communication,
    _data,
    _optimizer,
    _overhead,
    _padding,
    _cores,
    _side_by_side,
    _micro_batch,
    _start_up,
    _ending,
    _compiling,
    _evaluation,
)

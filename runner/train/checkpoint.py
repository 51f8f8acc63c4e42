"""Checkpoints: the state of all workers as files, written while training goes on, and complete or not there at all.

`checkpoints/step-00000120/` has a folder `worker-<rank>` for each worker: its tensors as safetensors, written by
torch.distributed.checkpoint, and everything else in `state.json`. What all workers share is only in worker 0's; of a
sharded tensor each has its part, in `shards/`. Nothing is pickled, so that loading runs no code. `complete.json` lists
every file with its size and SHA-256, says which experiment they belong to, and has a digest of all that. It is written
into a folder with a temporary name, which is renamed once all of it is on the disk.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from runner.backends import Backend
from runner.config.choices import ShardingKind
from runner.config.plain import to_plain
from runner.config.schema import REMOVED_SYNC_SETTINGS, Sharding, Sync
from runner.config.schema import Checkpoint as CheckpointConfig
from runner.errors import Diverged, Preempted, UserError, first_line
from runner.folder.files import Checksums, checksums, damage, digest_of, require_space, sync_folder, write_json
from runner.folder.reading import read_json
from runner.log import LOG
from runner.train.hooks import Paused, Training
from runner.train.sharding import is_sharded, laid_out_as, local

FOLDER, _MANIFEST, _STATE, _SHARDS = "checkpoints", "complete.json", "state.json", "shards"
#: Seconds that worker 0 waits for the files of the others after its own.
_OTHERS_TIMEOUT_S = 300.0
#: About how often workers ask each other whether to save. A collective of a few bytes in every step would be noticed.
_AGREE_EVERY_S = 1.0

#: The tensors without whose values a checkpoint is worth nothing.
_FINITE = ("/model/", "/optimizer/")

#: A loop's state: tensors, numbers, text, and dicts, lists and tuples of them.
State = dict[str, Any]

Key = TypeVar("Key")


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: the content of `complete.json`.

    `step`: optimizer steps done. `equal`: the parts of the state that all workers share. `identity`: of data, model,
    code and libraries, by name, and of the experiment: its settings and its plan. `files`: size in bytes and SHA-256 by
    name. `accumulation_steps`: of the workers then.
    """

    folder: Path
    step: int
    workers: int
    equal: tuple[str, ...]
    identity: Mapping[str, Any]
    files: Checksums
    accumulation_steps: int

    @property
    def for_any_workers(self) -> bool:
        """True if all workers had the same weights, so that another number of workers can take over."""
        return "model" in self.equal

    @property
    def written_at(self) -> float:
        """When it was completed, in seconds since the epoch."""
        return (self.folder / _MANIFEST).stat().st_mtime

    def damage(self) -> str | None:
        """The first file that is missing or changed, in words; None if all are as they were written."""
        return damage(self.folder, self.files)


@dataclass(frozen=True)
class SavedShards:
    """A tensor of which each worker has saved its part, until `restored` reads it. `name`: in the files of `folder`."""

    folder: Path
    name: str


class Checkpoints:
    """One worker's part in the checkpoints of a run: decides with the others when to save, and writes in a thread.

    Writing needs no communication: each worker leaves a list of its files, and worker 0's thread waits for all lists.
    """

    def __init__(
        self,
        run: Path,
        config: CheckpointConfig,
        backend: Backend,
        identity: Mapping[str, Any],
        preempted: Callable[[], bool] = lambda: False,
        pauses_after: Callable[[int], bool] = lambda step: False,
    ) -> None:
        """`run`: the run's folder, which all workers share. `preempted`: whether this worker was asked to end.

        `identity`: what must be the same when the run is resumed, besides the model's. `pauses_after`: whether
        training pauses after an optimizer step.
        """
        self._folder, self._config, self._identity = run / FOLDER, config, identity
        self._rank, self._workers = backend.rank, backend.world_size
        self._backend, self._preempted, self._pauses_after = backend, preempted, pauses_after
        #: Requests that the workers have sent each other, and not read yet.
        self._asked: deque[Callable[[], list[float]]] = deque()
        self._last = self._agreed_at = time.monotonic()
        #: Calls from one agreement to the next, and until the next.
        self._agree_every, self._until_agreed = 1, 0
        #: Save in this step, or in the next in which all workers have the same weights, and then to end.
        self.due = self.ending = False
        self._thread: threading.Thread | None = None
        self._failures: list[str] = []
        #: Seconds in which training stood still for checkpoints.
        self.stall_seconds = 0.0

    def after_step(self, training: Training) -> None:
        """Save if it is due. A collective. Raises Preempted, or Paused, after the save that ends the run."""
        self.count(training.optimizer_step)
        if not training.synchronised:
            return
        policy = training.replica.policy
        self.ending = self.ending or training.evaluation_stopped  # as all workers know
        if not self.ending:
            self.agree(wait=not policy.overlaps)
        pauses = self._pauses_after(training.optimizer_step)
        if self.due or self.ending or pauses:
            training.flush()  # which may make micro-batches smaller
            training.meter.timer.progress("checkpoint")
            steps, identity = training.order.accumulation_steps, training.replica.identity
            stalled = self.save(training.optimizer_step, training.state_dict, policy.replicated_keys, steps, identity)
            training.log(training.optimizer_step, {"checkpoint/stall_seconds": stalled})
        if self.ending:
            self.wait()
            raise Preempted(training.optimizer_step if self.warning() is None else None)
        if pauses:
            self.wait()
            raise Paused

    def count(self, step: int) -> None:
        """Note that optimizer step `step` was done."""
        every = self._config.every_steps
        self.due = self.due or (every is not None and step % every == 0)

    def preempted(self) -> bool:
        """True if this worker was asked to save and end."""
        return self._config.on_preemption and self._preempted()

    def agree(self, wait: bool) -> None:
        """Learn whether a worker asks to save, or to save and end: by its clock and its signals. A collective.

        Called in every step in which a checkpoint could be taken; the workers ask each other about once a second.
        `wait`: if false, learn what was asked for in the previous call, so that no worker waits for another.
        """
        minutes, now = self._config.every_minutes, time.monotonic()
        self._until_agreed -= 1
        if self._until_agreed > 0 or (minutes is None and not self._config.on_preemption):
            return
        overdue = self._rank == 0 and minutes is not None and now - self._last >= 60 * minutes
        # Only by worker 0's clock, which all have to go by.
        seconds, self._agreed_at = (now - self._agreed_at if self._rank == 0 else 0.0), now
        self._asked.append(self._backend.start_host_sum([overdue, self.preempted(), seconds], async_op=not wait))
        while len(self._asked) > (0 if wait else 1):
            saves, ends, seconds = self._asked.popleft()()
            self.due, self.ending = self.due or saves > 0, self.ending or ends > 0
            steps = self._agree_every * _AGREE_EVERY_S / max(seconds, 1e-6)
            self._agree_every = max(1, min(int(steps), 2 * self._agree_every))
        self._until_agreed = self._agree_every

    def save(
        self,
        step: int,
        state: Callable[[], State],
        equal: Sequence[str],
        accumulation_steps: int = 1,
        model_identity: Mapping[str, str] | None = None,
    ) -> float:
        """Copy the state and start to write it; the seconds that this took. A collective.

        `equal`: the parts that are the same on all workers. `accumulation_steps`: of the workers from now on.
        """
        started = time.perf_counter()
        self.wait()
        tensors: dict[str, Tensor] = {}
        shared: dict[str, Tensor] = {}
        content = state()
        left = equal if self._rank else ()  # to worker 0, except for this worker's shards
        plain = _split({name: part for name, part in content.items() if name not in left}, "", tensors)
        _split({name: content[name] for name in left}, "", shared)
        tensors |= {name: tensor for name, tensor in shared.items() if is_sharded(tensor)}
        tensors = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        manifest = {
            "step": step,
            "workers": self._workers,
            "equal": equal,
            "accumulation_steps": accumulation_steps,
            "identity": {**(model_identity or {}), **self._identity},
        }
        self._thread = threading.Thread(
            target=self._write_or_warn, args=(manifest, plain, tensors), name="checkpoint", daemon=True
        )
        self._thread.start()
        self.due, self._last = False, time.monotonic()
        stalled = time.perf_counter() - started
        self.stall_seconds += stalled
        return stalled

    def wait(self) -> None:
        """Wait until the save that is under way has ended."""
        while self._asked:
            self._asked.popleft()()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def warning(self) -> str | None:
        """One sentence if a checkpoint could not be written."""
        if not self._failures:
            return None
        return f"{len(self._failures)} checkpoint(s) could not be written: {self._failures[-1]}"

    def _write_or_warn(self, manifest: Mapping[str, Any], plain: Any, tensors: dict[str, Tensor]) -> None:
        step = manifest["step"]
        draft = self._folder / f".{_name(step)}"
        try:
            if self._rank == 0:  # parts of an earlier save that failed take the room of this one
                remove_drafts(self._folder.parent, before=step)
            self._write(draft, plain, tensors)
            if self._rank == 0:
                self._complete(draft, manifest)
        except Exception as error:  # noqa: BLE001 - no checkpoint is worth the training that it would save
            reason = f"step {step}, {first_line(error)}"
            # Worker 0 has given it up, and removed the folder for the next one.
            given_up = isinstance(error, FileNotFoundError) and not draft.exists()
            if not self._failures and not given_up and not isinstance(error, _OtherFailed):
                LOG.warning(f"a checkpoint could not be written ({reason}): training continues")
            self._failures.append(reason)
            shutil.rmtree(draft / _worker(self._rank), ignore_errors=True)  # a full disk needs the space
            with contextlib.suppress(OSError):  # otherwise worker 0 waits for its time-out
                (draft / f"{_worker(self._rank)}.failed").touch()

    def _write(self, draft: Path, plain: Any, tensors: dict[str, Tensor]) -> None:
        own = draft / _worker(self._rank)
        for name, tensor in tensors.items():
            if name.startswith(_FINITE) and not local(tensor).isfinite().all():
                raise Diverged(f"{name.lstrip('/')} is not finite")  # it must not replace a checkpoint that is
        own.mkdir(parents=True)
        require_space(draft, sum(local(tensor).nbytes for tensor in tensors.values()), "it")
        shards = {name: tensor for name, tensor in tensors.items() if is_sharded(tensor)}
        _write_tensors(own, {name: tensor for name, tensor in tensors.items() if name not in shards})
        if shards:
            _write_tensors(own / _SHARDS, shards)
            sync_folder(own / _SHARDS)
        write_json(own / _STATE, plain)
        files = checksums(draft, sorted(path for path in own.rglob("*") if path.is_file()))
        sync_folder(own)
        write_json(draft / f"{own.name}.json", files)

    def _complete(self, draft: Path, manifest: Mapping[str, Any]) -> None:
        """Worker 0, when all have written: list all files, rename the folder, and only then remove older ones."""
        lists = [draft / f"{_worker(rank)}.json" for rank in range(self._workers)]
        deadline = time.monotonic() + _OTHERS_TIMEOUT_S
        while missing := [path.stem for path in lists if not path.exists()]:
            if failed := [name for name in missing if (draft / f"{name}.failed").exists()]:
                raise _OtherFailed(f"{failed[0]} failed")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{missing[0]} has written nothing to {draft} within {_OTHERS_TIMEOUT_S:.0f} s: "
                    "all workers need the run's folder on a shared file system"
                )
            time.sleep(0.02)
        files = {name: entry for path in lists for name, entry in json.loads(path.read_text()).items()}
        for path in lists:
            path.unlink()
        content = {**manifest, "files": files}
        write_json(draft / _MANIFEST, {**content, "digest": digest_of(content)})
        sync_folder(draft)
        final = self._folder / _name(manifest["step"])
        if final.exists():  # the run was continued from it, and asked to end before the next step
            shutil.rmtree(final)
        draft.rename(final)
        sync_folder(self._folder)
        for old in saved_folders(self._folder.parent)[self._config.keep :]:
            _remove(old)


class _OtherFailed(Exception):
    """Another worker could not write its part, and has reported why."""


# --- reading -------------------------------------------------------------------------------------------------


def saved_folders(run: Path) -> list[Path]:
    """The checkpoints in a run's folder whose writing was completed, the newest first."""
    found = [path for path in (run / FOLDER).glob("step-*") if (path / _MANIFEST).is_file()]
    return sorted(found, key=lambda path: path.name, reverse=True)


def newest(run: Path) -> tuple[Saved | None, dict[Path, str]]:
    """The newest undamaged checkpoint of a run, if there is one, and what is wrong with each that is newer."""
    damaged: dict[Path, str] = {}
    for folder in saved_folders(run):
        try:
            saved = read_manifest(folder)
            problem = saved.damage()
        except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"{_MANIFEST} is not as it was written ({first_line(error)})"
        if problem is None:
            return saved, damaged
        damaged[folder] = problem
    return None, damaged


def read_manifest(folder: Path) -> Saved:
    """Raises UserError, ValueError, KeyError, TypeError or AttributeError for a file that is not as it was written."""
    content = read_json(folder / _MANIFEST)
    if content.pop("digest", None) != digest_of(content):
        raise ValueError("it does not have its own digest")
    if folder.name != _name(content["step"]):
        raise ValueError(f"it is of step {content['step']}")
    files = {name: (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
    return Saved(folder=folder, **{**content, "equal": tuple(content["equal"]), "files": files})


def set_aside(folder: Path) -> None:
    """Rename a damaged checkpoint, so that it counts neither as one to continue from nor as one to keep."""
    aside = folder.with_name(f"damaged-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)


def remove_drafts(run: Path, before: int | None = None) -> None:
    """Remove what unfinished saves have left, of steps `before` this one only if it is given."""
    for draft in (run / FOLDER).glob(".step-*"):
        match = re.match(r"\.step-(\d+)", draft.name)
        if before is None or (match is not None and int(match[1]) < before):
            shutil.rmtree(draft, ignore_errors=True)


def sync_digest(sync: Sync, sharding: Sharding) -> str:
    """Equal for settings under which workers synchronise in the same way."""
    sharded = sharding.kind is not ShardingKind.none
    settings = {**to_plain(sync), **REMOVED_SYNC_SETTINGS}
    return digest_of([settings, to_plain(sharding)] if sharded else settings)


def load(saved: Saved, rank: int, workers: int, sync: Sync, sharding: Sharding) -> State:
    """The state of worker `rank` of `workers` that synchronise in this way, on the CPU."""
    shared, same_sync = _read(saved, 0), saved.identity["sync"] == sync_digest(sync, sharding)
    if saved.workers == workers and same_sync:
        state = {**shared, **_read(saved, rank)} if rank else shared
    else:
        assert saved.for_any_workers, saved.equal
        states = [shared, *({**shared, **_read(saved, other)} for other in range(1, saved.workers))]
        state = redistributed(states, saved.equal if same_sync else (), rank, workers)
    return state


def restored(tensors: Mapping[Key, Tensor | SavedShards], like: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Saved tensors on the layout of `like`: whole, or this worker's shards where its tensors are sharded."""
    result = {key: tensor for key, tensor in tensors.items() if isinstance(tensor, Tensor)}
    shards = {key: one for key, one in tensors.items() if isinstance(one, SavedShards)}
    targets = {key: torch.empty_like(like[key]) for key in shards}
    for folder in {one.folder for one in shards.values()}:
        _read_shards(folder, {one.name: targets[key] for key, one in shards.items()})
    return laid_out_as(like, result) | targets


def redistributed(states: Sequence[State], equal: Collection[str], rank: int, workers: int) -> State:
    """The state of worker `rank` of `workers`: another number than the `states` are from, or another sync policy.

    Weights are equal. Optimizer state and running statistics that are not are averaged over the old workers. What they
    have counted goes to worker 0. Random streams start anew (None), and so do sync policies that one worker does not
    have.
    """
    first = states[0]
    counts = [sum(column) for column in zip(*(state["tokens"] for state in states), strict=True)]
    optimizers = [state["optimizer"] for state in states]
    keys = dict.fromkeys(key for optimizer in optimizers for key in optimizer)  # a worker without samples has no state
    return {
        **first,
        "optimizer": {key: _mean([one[key] for one in optimizers if key in one]) for key in keys},
        "buffers": _mean([state["buffers"] for state in states]),
        "policy": first["policy"] if "policy" in equal and workers > 1 else None,
        "tokens": counts if rank == 0 else [0] * len(counts),
        "random": None,
    }


def _mean(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: _mean_value([state[name] for state in states]) for name in states[0]}


def _mean_value(values: Sequence[Any]) -> Any:
    first = values[0]
    floating = isinstance(first, Tensor) and first.is_floating_point()
    if not floating or all(value is first or torch.equal(value, first) for value in values):
        return first  # the mean of equal numbers could be rounded
    return torch.stack(list(values)).mean(dim=0)


# --- files ---------------------------------------------------------------------------------------------------


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _worker(rank: int | str) -> str:
    return f"worker-{rank}"


def _split(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON, which keeps the types of keys and sequences; its tensors go to `tensors`."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {"shards" if is_sharded(value) else "tensor": name}
    if isinstance(value, Mapping):
        return {"dict": [[key, _split(item, f"{name}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_split(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]}
    assert value is None or isinstance(value, (bool, int, float, str)), (name, type(value))
    return {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _join(plain: Any, tensors: Mapping[str, Tensor], folder: Path) -> Any:
    """The inverse of `_split`, with tensors in shards left in the checkpoint's `folder`."""
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "shards":
        return SavedShards(folder, content)
    if kind == "float":
        return float(content)
    if kind == "dict":
        return {key: _join(item, tensors, folder) for key, item in content}
    items = [_join(item, tensors, folder) for item in content]
    return tuple(items) if kind == "tuple" else items


def _write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    library = _library()
    # `save_distributed` notes where a shard begins in the whole tensor.
    writer = library.HuggingFaceStorageWriter(str(folder), save_distributed=folder.name == _SHARDS)
    try:
        library.save(tensors, storage_writer=writer, no_dist=True)
    except library.CheckpointException as error:  # no `Exception`, and it says the reason on another line
        raise OSError(first_line(next(iter(error.failures.values()))[0])) from error


def _read(saved: Saved, rank: int) -> State:
    """Read the files of worker `rank`."""
    library, folder = _library(), saved.folder / _worker(rank)
    known = library.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(of.size, dtype=of.properties.dtype) for name, of in known.items()}
    library.load(tensors, storage_reader=library.HuggingFaceStorageReader(str(folder)), no_dist=True)
    state: State = _join(read_json(folder / _STATE), tensors, saved.folder)
    return state


def _read_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Read the whole tensors, or this worker's shards of them, from the shards that any number of workers saved."""
    library = _library()

    class AllWorkers(library.HuggingFaceStorageReader):  # type: ignore[name-defined]
        def read_metadata(self) -> Any:
            first, *others = (
                library.HuggingFaceStorageReader(str(path)).read_metadata()
                for path in sorted(folder.glob(f"{_worker('*')}/{_SHARDS}"))
            )
            for other in others:
                first.storage_data.update(other.storage_data)
                for name, of in other.state_dict_metadata.items():
                    known = first.state_dict_metadata.setdefault(name, of)
                    if known is not of:
                        known.chunks.extend(of.chunks)
                        known.size = torch.Size(map(max, known.size, of.size))
            return first

    library.load(tensors, storage_reader=AllWorkers(str(folder)), no_dist=True)


def _library() -> Any:
    # Imported here: it takes a second, which no run should wait for before its first step.
    from torch.distributed import checkpoint

    # Each worker saves alone, as it is asked to by `no_dist`.
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
    return checkpoint


def _remove(folder: Path) -> None:
    """Remove a checkpoint; one that is half removed must not look complete."""
    shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.removed")))

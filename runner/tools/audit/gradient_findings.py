"""What is wrong with the gradients of an audited loop, from what each backward pass added and the optimizer used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from runner.tools.audit.records import Finding, GradientCheck, ProcessRecord, StepGradients

#: Differences by rounding, also in bf16 and by compressed all-reduces; and times what dropout makes.
_ROUNDING, _CHANCE = 0.02, 3.0


def followed(records: Sequence[ProcessRecord]) -> tuple[Finding | None, bool]:
    """A finding about the gradients of the first steps, and whether each process used those of its own samples."""
    before: Sequence[StepGradients] | None = None
    for parts in _by_step(records):
        sentence = _kept(parts, before) or _changed(parts)
        own = sentence is None and _used_own(parts)
        sentence = sentence or _used(parts, own, records[0].wrapped)
        if sentence is not None:
            return Finding("gradient", sentence), own
        before = parts
    return None, False


def _by_step(records: Sequence[ProcessRecord]) -> Iterator[Sequence[StepGradients]]:
    """The gradients of all processes, of each step that all have."""
    by_step = [{one.step: one for one in record.gradients} for record in records]
    for step in by_step[0]:
        if all(step in one for one in by_step):
            yield [one[step] for one in by_step]


def _kept(parts: Sequence[StepGradients], before: Sequence[StepGradients] | None) -> str | None:
    """Gradients of the step before that were not cleared."""
    if before is None or not any(one.passes[0].held.any() for one in parts):
        return None
    step = parts[0].step
    if all(_same(one.passes[0].held, old.used) for one, old in zip(parts, before, strict=True)):
        return (
            f"the gradients of step {before[0].step} were still there when the first backward pass of step {step} "
            "added to them: call optimizer.zero_grad() after each step"
        )
    return (
        f"gradients were not 0 before the first backward pass of step {step}; causes that fit: zero_grad() clears only "
        "some of them, or a backward pass of something else than the batches"
    )


def _changed(parts: Sequence[StepGradients]) -> str | None:
    """Gradients that were changed between two backward passes of a step."""
    for rank, part in enumerate(parts):
        for number, after in enumerate(part.passes[1:]):
            expected = [part.passes[number].after]  # of this process, or averaged over all by this backward pass
            if all(len(one.passes) > number for one in parts):
                expected.append(torch.stack([one.passes[number].after for one in parts]).mean(0))
            if any(_same(after.held, one) for one in expected):
                continue
            changed = (
                f"between backward passes {number + 1} and {number + 2} of step {part.step} the gradients of process "
                f"{rank} were"
            )
            scales = [scale for scale, rest in (_fit(after.held, one) for one in expected) if rest < _ROUNDING]
            if scales and 0 < scales[0] < 1:
                return (
                    f"{changed} multiplied by {scales[0]:.3g}, as clipping in each batch does: clip once, before "
                    "optimizer.step()"
                )
            return f"{changed} changed; causes that fit: clipping, scaling or zeroing in each batch, not in each step"
    return None


def _used_own(parts: Sequence[StepGradients]) -> bool:
    """Whether each of several processes used the gradient of its own samples."""
    return not _used_fits(parts, _mean(parts)) and all(_used_fits([one], one.passes[-1].after) for one in parts)


def _used(parts: Sequence[StepGradients], own: bool, wrapped: bool) -> str | None:
    """Gradients of the optimizer that are not the mean of what the processes accumulated."""
    if own:
        why = (
            "the model is in DistributedDataParallel; causes that fit: the loop calls model.module and not the wrapped "
            "model, or no_sync() also in the last batch of each step"
            if wrapped
            else "wrap the model in DistributedDataParallel or by accelerator.prepare(model)"
        )
        return (
            f"gradients were not averaged: in step {parts[0].step} each of the {len(parts)} processes used that of its "
            f"own samples; {why}"
        )
    if _used_fits(parts, _mean(parts)):
        return None
    if not any(one.used.any() for one in parts):
        return (
            f"the gradients were 0 when the optimizer used them in step {parts[0].step}: zero_grad() comes between "
            "backward() and step()"
        )
    difference = max(_fit(one.used, _mean(parts))[1] for one in parts)
    return (
        f"the gradient that the optimizer used in step {parts[0].step} differs by {100 * difference:.2g}% from what "
        "backward passes accumulated; causes that fit: some parameters are not averaged over processes, or gradients "
        "are compressed or changed before the step"
    )


def _used_fits(parts: Sequence[StepGradients], accumulated: Tensor) -> bool:
    """Whether the optimizer used what was accumulated, perhaps multiplied or clipped."""
    return all(_fit(one.used, accumulated)[1] < _ROUNDING or _clipped(one.used, accumulated) for one in parts)


def _mean(parts: Sequence[StepGradients]) -> Tensor:
    return torch.stack([one.passes[-1].after for one in parts]).mean(0)


def checked(records: Sequence[ProcessRecord], changed: bool) -> Iterator[Finding]:
    """What the comparison with all samples of a step in one batch shows.

    `changed`: whether the optimizer used other gradients than the backward passes have added.
    """
    checks = [record.check for record in records if record.check is not None]
    steps = [one for one in _by_step(records) if checks and one[0].step == checks[0].step]
    if len(checks) < len(records) or not steps:
        return
    (parts,), whole = steps, checks[0].whole
    added = torch.stack([torch.stack([one.added for one in part.passes]).sum(0) for part in parts]).mean(0)
    noise = max(_ROUNDING, _CHANCE * _fit(checks[0].again, whole)[1])
    scale, difference = _fit(added, whole)
    seen = f"the gradient of step {checks[0].step}"
    if difference > noise:
        seen += f" differs by {100 * difference:.2g}% from that of its samples in one batch"
        yield from (Finding("gradient", seen + why) for why in _weighted(parts, checks, noise))
        return
    used = _fit(torch.stack([one.used for one in parts]).mean(0), added)[0]
    batches, workers = len(parts[0].passes), len(parts)
    each = _fit(parts[0].passes[-1].added, checks[0].last)[0]

    def full(factor: float) -> bool:
        """Whether each batch counts as if it was the only one. `factor`: what a GradScaler multiplies by later."""
        return abs(each * factor - 1) < noise and abs(scale * factor / batches - 1) < noise

    fully = batches > 1 and noise < 0.25 and (full(1) or (used < 1 and full(used)))
    # A shorter one was clipped, or divided later.
    if (fully and abs(used * scale - 1) > noise) or (used * scale > 1 + noise and not changed):
        seen += f" is {batches if fully else used * scale:.3g} times that of its samples in one batch"
        if fully:
            why = f": the loss of each of its {batches} batches counts fully; divide it by {batches}"
        elif workers > 1 and abs(used / workers - 1) < _ROUNDING:
            why = f": gradients are summed over the {workers} processes; divide them by {workers}"
        else:
            why = (
                f", and the loss of its last batch counts {each:.3g} times; causes that fit: losses are not divided by "
                f"the number of accumulated batches ({batches}), are multiplied (by Trainer, for a model that takes "
                "num_items_in_batch and ignores it), or gradients are summed over processes"
            )
        yield Finding("gradient", seen + why)
    # Whether losses are divided by the number of batches; `used` takes a GradScaler's factor out.
    factor = next((one for one in (1.0, used) if abs(each * one * batches - 1) < noise < 0.25), None)
    if factor is not None:
        yield from _tail(records[0], factor, batches, noise)


def _tail(record: ProcessRecord, factor: float, usual: int, noise: float) -> Iterator[Finding]:
    """A shorter last step of an epoch, whose losses are divided as if it had as many batches as the others."""
    tail = record.tail
    found = [one for one in record.gradients if tail is not None and one.step == tail.step]
    if tail is None or not found:
        return
    each, rest = _fit(found[0].passes[-1].added, tail.last)
    if rest < noise and abs(each * factor * usual - 1) < noise:
        yield Finding(
            "gradient",
            f"step {tail.step}, the last of an epoch, has {tail.batches} of {usual} batches, and their losses are "
            f"divided by {usual} all the same: its gradient is {tail.batches / usual:.2g} times that of its samples; "
            "divide by the number of batches in the step",
        )


def _weighted(parts: Sequence[StepGradients], checks: Sequence[GradientCheck], noise: float) -> Iterator[str]:
    """Which weights of the batches would make the gradient that of all samples: evidence for a mean of means."""
    whole = checks[0].whole
    batches = torch.stack([one.added for part in parts for one in part.passes], dim=1)  # [elements, batches]
    for name in checks[0].counts:
        counts = [number for check in checks for number in check.counts.get(name, [])]
        if len(counts) != batches.shape[1] or len(set(counts)) == 1:
            continue
        if _fit(batches @ torch.tensor(counts, dtype=batches.dtype), whole)[1] <= noise:
            numbers = ", ".join(map(str, counts[:8])) + (", …" if len(counts) > 8 else "")
            yield (
                f": losses are averaged by batch, and batches with {numbers} {name} count equally; divide sums by the "
                "global number"
            )
            return
    weights = torch.linalg.lstsq(batches, whole[:, None]).solution[:, 0]
    enough = len(whole) >= 4 * len(weights)
    if enough and bool((weights > 0).all()) and _fit(batches @ weights, whole)[1] <= noise:
        numbers = ", ".join(f"{float(one):.2g}" for one in (weights / weights.sum())[:8])
        yield (
            f", which would have its batches count {numbers}; causes that fit: losses are averaged by batch, over "
            "something of which batches have different numbers (labels, tokens, weights of classes)"
        )
    elif noise == _ROUNDING and _fit(parts[0].passes[-1].added, checks[0].last)[1] > noise:
        yield (
            ", and so does that of one batch; causes that fit: the loop's loss is not the one that Audit was given, or "
            "data are augmented at random"
        )
    # Otherwise samples of a batch influence each other, as in batch normalisation, and there is nothing to compare.


def _same(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= _ROUNDING * max(one.norm(), other.norm()))


def _fit(one: Tensor, other: Tensor) -> tuple[float, float]:
    """How long a gradient is in the direction of another, and the rest of it, relative to that length."""
    square = float(other @ other)
    scale = float(one @ other) / square if square else 0.0
    if not scale:
        return 0.0, float("inf") if one.any() or square else 0.0
    return scale, float((one - scale * other).norm()) / (abs(scale) * square**0.5)


def _clipped(one: Tensor, other: Tensor) -> bool:
    """Whether elements of a gradient are those of another or shorter, as after clipping by value or by layer."""
    return bool((one.abs() <= other.abs() * (1 + _ROUNDING)).all() and (one * other >= 0).all() and one.any())

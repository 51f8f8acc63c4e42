"""Mistakes in the gradients of an audited loop, from what each backward pass added and the optimizer used."""

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
        found = _kept(parts, before) or _changed(parts)
        own = found is None and _used_own(parts)
        found = found or _used(parts, own, records[0].wrapped)
        if found is not None:
            return found, own
        before = parts
    return None, False


def _by_step(records: Sequence[ProcessRecord]) -> Iterator[Sequence[StepGradients]]:
    """The gradients of all processes, of each step that all have."""
    by_step = [{one.step: one for one in record.gradients} for record in records]
    for step in by_step[0]:
        if all(step in one for one in by_step):
            yield [one[step] for one in by_step]


def _kept(parts: Sequence[StepGradients], before: Sequence[StepGradients] | None) -> Finding | None:
    """Gradients of the step before that were not cleared."""
    if before is None or not any(one.passes[0].held.any() for one in parts):
        return None
    first = f"the first backward pass of step {parts[0].step}"
    if all(_same(one.passes[0].held, old.used) for one, old in zip(parts, before, strict=True)):
        seen = f"the gradients of step {before[0].step} were still there when {first} added to them"
        return Finding("gradient", "not cleared", seen, "call optimizer.zero_grad() after each step")
    fits = ("zero_grad() clears only some of them", "a backward pass of something else than the batches")
    return Finding("gradient", "not 0 at first", f"gradients were not 0 before {first}", fits=fits)


def _changed(parts: Sequence[StepGradients]) -> Finding | None:
    """Gradients that were changed between two backward passes of a step."""
    for rank, part in enumerate(parts):
        for number, after in enumerate(part.passes[1:]):
            expected = [part.passes[number].after]  # of this process, or averaged over all by this backward pass
            if all(len(one.passes) > number for one in parts):
                expected.append(torch.stack([one.passes[number].after for one in parts]).mean(0))
            if any(_same(after.held, one) for one in expected):
                continue
            where = f"between backward passes {number + 1} and {number + 2} of step {part.step}"
            seen = f"{where} the gradients of process {rank} were"
            scales = [scale for scale, rest in (_fit(after.held, one) for one in expected) if rest < _ROUNDING]
            if scales and 0 < scales[0] < 1:
                seen = f"{seen} multiplied by {scales[0]:.3g}, as clipping in each batch does"
                return Finding("gradient", "clipped per batch", seen, "clip once, before optimizer.step()")
            fits = ("clipping", "scaling", "zeroing in each batch, not in each step")
            return Finding("gradient", "changed between batches", f"{seen} changed", fits=fits)
    return None


def _used_own(parts: Sequence[StepGradients]) -> bool:
    """Return whether each of several processes used the gradient of its own samples."""
    return not _used_fits(parts, _mean(parts)) and all(_used_fits([one], one.passes[-1].after) for one in parts)


def _used(parts: Sequence[StepGradients], own: bool, wrapped: bool) -> Finding | None:
    """Gradients of the optimizer that are not the mean of what the processes accumulated."""
    step = parts[0].step
    if own:
        of_own = f"in step {step} each of the {len(parts)} processes used that of its own samples"
        seen = f"gradients were not averaged: {of_own}"
        if not wrapped:
            fix = "wrap the model in DistributedDataParallel or by accelerator.prepare(model)"
            return Finding("gradient", "not averaged", seen, fix)
        fits = (
            "the loop calls model.module and not the wrapped model",
            "no_sync() also in the last batch of each step",
        )
        return Finding("gradient", "not averaged by DDP", f"{seen}, in DistributedDataParallel", fits=fits)
    if _used_fits(parts, _mean(parts)):
        return None
    if not any(one.used.any() for one in parts):
        seen = f"the gradients were 0 when the optimizer used them in step {step}"
        return Finding("gradient", "cleared too early", seen, "call zero_grad() after step(), not before it")
    difference = max(_fit(one.used, _mean(parts))[1] for one in parts)
    seen = f"the gradient that the optimizer used in step {step} differs by {100 * difference:.2g}% from what "
    fits = ("some parameters are not averaged over processes", "gradients are compressed or changed before the step")
    return Finding("gradient", "not what was accumulated", f"{seen}backward passes accumulated", fits=fits)


def _used_fits(parts: Sequence[StepGradients], accumulated: Tensor) -> bool:
    """Return whether the optimizer used what was accumulated, perhaps multiplied or clipped."""
    return all(_fit(one.used, accumulated)[1] < _ROUNDING or _clipped(one.used, accumulated) for one in parts)


def _mean(parts: Sequence[StepGradients]) -> Tensor:
    return torch.stack([one.passes[-1].after for one in parts]).mean(0)


def checked(records: Sequence[ProcessRecord], changed: bool) -> Iterator[Finding]:
    """Findings of the comparison with all samples of a step in one batch.

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
        yield from _weighted(
            parts, checks, noise, f"{seen} differs by {100 * difference:.2g}% from that of its samples"
        )
        return
    used = _fit(torch.stack([one.used for one in parts]).mean(0), added)[0]
    batches, workers = len(parts[0].passes), len(parts)
    each = _fit(parts[0].passes[-1].added, checks[0].last)[0]

    def full(factor: float) -> bool:
        """Return whether each batch counts as if it was the only one. `factor`: of a GradScaler, applied later."""
        return abs(each * factor - 1) < noise and abs(scale * factor / batches - 1) < noise

    fully = batches > 1 and noise < 0.25 and (full(1) or (used < 1 and full(used)))
    # A shorter one may have been clipped, or divided later, unless the optimizer used it as it was accumulated.
    cleared = any(step.discarded for step in records[0].steps if step.step == checks[0].step)
    short = scale < 1 - noise and abs(used - 1) < _ROUNDING and not (changed or cleared)
    if (fully and abs(used * scale - 1) > noise) or (used * scale > 1 + noise and not changed) or short:
        seen += f" is {batches if fully else used * scale:.3g} times that of its samples in one batch"
        if fully:
            seen = f"{seen}, since the loss of each of its {batches} batches counts fully"
            yield Finding("gradient", "not divided", seen, f"divide it by {batches}")
        elif workers > 1 and abs(used / workers - 1) < _ROUNDING:
            seen = f"{seen}, since gradients are summed over the {workers} processes"
            yield Finding("gradient", "summed over processes", seen, f"divide them by {workers}")
        elif short:
            why = f"losses are divided by more than the number of accumulated batches ({batches})"
            yield Finding("gradient", "too small", seen, fits=(why,))
        else:
            fits = (
                *([f"losses are not divided by the number of accumulated batches ({batches})"] if batches > 1 else []),
                "losses are sums over samples, not means",
                "they are multiplied (by Trainer, for a model that takes num_items_in_batch and ignores it)",
                *(["gradients are summed over processes"] if workers > 1 else []),
            )
            seen = f"{seen}, and the loss of its last batch counts {each:.3g} times"
            yield Finding("gradient", "too large", seen, fits=fits)


def _weighted(
    parts: Sequence[StepGradients], checks: Sequence[GradientCheck], noise: float, seen: str
) -> Iterator[Finding]:
    """Weights of the batches that would make the gradient that of all samples: evidence for a mean of means."""
    whole, seen = checks[0].whole, f"{seen} in one batch"
    batches = torch.stack([one.added for part in parts for one in part.passes], dim=1)  # [elements, batches]
    for name in checks[0].counts:
        counts = [number for check in checks for number in check.counts.get(name, [])]
        if len(counts) != batches.shape[1] or len(set(counts)) == 1:
            continue
        if _fit(batches @ torch.tensor(counts, dtype=batches.dtype), whole)[1] <= noise:
            numbers = ", ".join(map(str, counts[:8])) + (", …" if len(counts) > 8 else "")
            seen += f", since losses are averaged by batch, and batches with {numbers} {name} count equally"
            yield Finding("gradient", "mean of means", seen, "divide sums by the global number")
            return
    weights = torch.linalg.lstsq(batches, whole[:, None]).solution[:, 0]
    enough = len(whole) >= 4 * len(weights)
    if enough and bool((weights > 0).all()) and _fit(batches @ weights, whole)[1] <= noise:
        numbers = ", ".join(f"{float(one):.2g}" for one in (weights / weights.sum())[:8])
        uneven = "something of which batches have different numbers (labels, tokens, weights of classes)"
        seen = f"{seen}, which would have its batches count {numbers}"
        yield Finding("gradient", "other weights", seen, fits=(f"losses are averaged by batch, over {uneven}",))
    elif noise == _ROUNDING and _fit(parts[0].passes[-1].added, checks[0].last)[1] > noise:
        seen = f"{seen}, and so does that of one batch"
        fits = ("the loop's loss is not the one that Audit was given", "data are augmented at random")
        yield Finding("gradient", "another loss", seen, fits=fits)
    # Otherwise samples of a batch influence each other, as in batch normalisation, and there is nothing to compare.


def _same(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= _ROUNDING * max(one.norm(), other.norm()))


def _fit(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Length of a gradient in the direction of another, and the rest of it, relative to that length."""
    square = float(other @ other)
    scale = float(one @ other) / square if square else 0.0
    if not scale:
        return 0.0, float("inf") if one.any() or square else 0.0
    return scale, float((one - scale * other).norm()) / (abs(scale) * square**0.5)


def _clipped(one: Tensor, other: Tensor) -> bool:
    """Return whether elements of a gradient are those of another or shorter, as after clipping by value or by layer."""
    return bool((one.abs() <= other.abs() * (1 + _ROUNDING)).all() and (one * other >= 0).all() and one.any())

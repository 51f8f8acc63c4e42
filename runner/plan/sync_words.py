"""A sync policy in words: in the names of setups, in the plan and in the certificate."""

from __future__ import annotations

from runner.config.choices import Average, Compress, SyncPolicyName, SyncSchedule
from runner.config.schema import Schedule, Sync
from runner.plan import Plan
from runner.plan.sync_steps import sync_steps

_PRESETS: dict[tuple[object, ...], str] = {(0.7, 0.9, True, False): "diloco", (1.0, 0.7, False, True): "slowmo"}


def sync_words(sync: Sync) -> list[str]:
    """The policy in a few words, what is as usual left out: `["diloco", "k=8", "bf16 wire"]`."""
    policy = [] if sync.policy is SyncPolicyName.periodic or sync.averages_gradients_always else [_policy(sync)]
    k = [f"k={sync.k}"] if sync.k > 1 or policy else []
    return [*policy, *k, *_ways(sync)]


def sync_name(sync: Sync) -> str:
    """The policy and everything about it but k: `periodic, overlap=8, bf16 wire`."""
    return ", ".join([_policy(sync), *_ways(sync)])


def _ways(sync: Sync) -> list[str]:
    """When and in which form, as far as it is unusual."""
    words = []
    if sync.schedule is not SyncSchedule.constant:
        own = sync.synchronous_share if sync.schedule is SyncSchedule.post_local else sync.qsr_alpha
        words.append(sync.schedule.name + (f"={own:g}" if own is not None else ""))
    if sync.average is Average.weights_and_moments:
        words.append("moments")
    if sync.overlap:
        words.append(f"overlap={sync.steps_travelled}")
    if sync.compress is not Compress.none:
        words.append(f"{sync.compress.name} wire")
    return words


def _policy(sync: Sync) -> str:
    if sync.policy is not SyncPolicyName.outer:
        return sync.policy.name
    values = (sync.outer_lr, sync.outer_momentum, sync.outer_nesterov, sync.outer_per_lr)
    if values in _PRESETS:
        return _PRESETS[values]
    kind = f"{' nesterov' if sync.outer_nesterov else ''}{' per lr' if sync.outer_per_lr else ''}"
    return f"outer lr={sync.outer_lr:g} momentum={sync.outer_momentum:g}{kind}"


def sync_sentence(sync: Sync, batch_length_sorted: bool) -> str:
    """When workers meet and what they bring together, for the certificate."""
    if sync.averages_gradients_always:
        return "every step"
    often = "every step" if sync.k == 1 else f"every {sync.k} steps"
    if sync.schedule is SyncSchedule.post_local:
        often += f" after {100 * sync.share_trained_synchronously:g}% of the samples"
    if sync.schedule is SyncSchedule.qsr:
        alpha = "" if sync.qsr_alpha is None else f" of alpha {sync.qsr_alpha:g}"
        often += f" and by the quadratic rule{alpha} ever more rarely"
    late = f", {sync.steps_travelled} steps late" if sync.overlap else ""
    # Workers that step alone are not indifferent to which samples are theirs.
    dealt = ", dealt by length" if batch_length_sorted else ""
    return f"{_what(sync)} {often}{late}{dealt}"


def _what(sync: Sync) -> str:
    """What workers bring together, and how."""
    if sync.policy is SyncPolicyName.outer:
        nesterov = ", nesterov" if sync.outer_nesterov else ""
        per_lr = ", per learning rate" if sync.outer_per_lr else ""
        return f"updates, outer SGD of lr {sync.outer_lr:g}, momentum {sync.outer_momentum:g}{nesterov}{per_lr}"
    return {
        SyncPolicyName.periodic: "weights" if sync.average is Average.weights else "weights and moments",
        SyncPolicyName.accumulated: "collected updates",
        SyncPolicyName.gradients: "gradients, replicas never made equal",
    }[sync.policy]


def window_words(plan: Plan, sync: Sync, schedule: Schedule, about: str = "") -> str:
    """How often workers meet, for the plan's table. `about`: what numbers that follow from the data are marked with."""
    if plan.world_size == 1:
        return "one worker: nothing to synchronise"
    if sync.averages_gradients_always:
        return "synchronous: every step"
    steps = sync_steps(plan, sync, schedule)
    # What is left at the end is brought together there, but for gradients: then worker 0's weights are taken.
    rest = plan.optimizer_steps - 1 not in steps.due and sync.policy is not SyncPolicyName.gradients
    times = len(steps.due) + rest
    first = f", after {about}{steps.first_local:,} synchronous ones" if steps.first_local else ""
    at_least = "at least " if sync.schedule is SyncSchedule.qsr else ""
    steps_each = f"{sync.k} step{'s' * (sync.k > 1)}"
    return f"samples between two averages, every {at_least}k = {steps_each}{first}: {about}{times:,} in all"

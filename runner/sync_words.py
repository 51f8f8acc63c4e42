"""A sync policy in words: in the names of setups, in the plan and in the certificate."""

from __future__ import annotations

from runner.choices import Average, Compress, SyncPolicyName, SyncSchedule
from runner.plan import Plan
from runner.schema import Schedule, Sync
from runner.sync_schedule import sync_steps


def sync_words(sync: Sync) -> list[str]:
    """The policy in a few words, what is as usual left out: `["outer", "k=8", "bf16 wire"]`."""
    words = []
    if sync.policy is not SyncPolicyName.periodic and not sync.averages_gradients_always:
        slow_momentum = sync.policy is SyncPolicyName.outer and sync.outer_per_lr
        words.append("slowmo" if slow_momentum else sync.policy.name)
    if sync.k > 1 or words:
        words.append(f"k={sync.k}")
    if sync.schedule is not SyncSchedule.constant:
        words.append(sync.schedule.name)
    if sync.average is Average.weights_and_moments:
        words.append("moments")
    if sync.overlap:
        words.append(f"overlap={sync.steps_travelled}")
    if sync.compress is not Compress.none:
        words.append(f"{sync.compress.name} wire")
    return words


def sync_sentence(sync: Sync, batch_length_sorted: bool) -> str:
    """All that decides what workers know of each other, for the certificate."""
    wire = "" if sync.compress is Compress.none else f", {sync.compress.name} on the way"
    if sync.averages_gradients_always:
        return f"every step{wire}"
    what = {
        SyncPolicyName.periodic: "weights",
        SyncPolicyName.accumulated: "collected updates",
        SyncPolicyName.gradients: "gradients, replicas never made equal",
        SyncPolicyName.outer: f"updates, outer SGD of lr {sync.outer_lr:g}, momentum {sync.outer_momentum:g}"
        if sync.policy is SyncPolicyName.outer
        else "",
    }[sync.policy]
    if sync.outer_nesterov:
        what += ", nesterov"
    if sync.outer_per_lr:
        what += ", per learning rate"
    if sync.average is Average.weights_and_moments:
        what = "weights and moments"
    often = f"every {sync.k} steps"
    if sync.schedule is SyncSchedule.post_local:
        share = 0.5 if sync.synchronous_share is None else sync.synchronous_share
        often += f" after {100 * share:g}% of the samples"
    if sync.schedule is SyncSchedule.qsr:
        alpha = "" if sync.qsr_alpha is None else f" of alpha {sync.qsr_alpha:g}"
        often += f" and by the quadratic rule{alpha} ever more rarely"
    late = f", {sync.steps_travelled} steps late" if sync.overlap else ""
    # Workers that step alone are not indifferent to which samples are theirs.
    dealt = ", dealt by length" if batch_length_sorted else ""
    return f"{what} {often}{late}{wire}{dealt}"


def window_words(plan: Plan, sync: Sync, schedule: Schedule) -> str:
    """How often workers meet, for the plan's table."""
    if plan.world_size == 1:
        return "one worker: nothing to synchronise"
    if sync.averages_gradients_always:
        return "synchronous: every step"
    steps = sync_steps(plan, sync, schedule)
    last = plan.optimizer_steps - 1
    times = len(steps.due) + (last not in steps.due)
    first = f", after {steps.first_local:,} synchronous ones" if steps.first_local else ""
    at_least = "at least " if sync.schedule is SyncSchedule.qsr else ""
    return f"samples between two averages, every {at_least}k = {sync.k} steps{first}: {times:,} in all"

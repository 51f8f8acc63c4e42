"""A sync policy in words: in the names of setups, in the plan and in the certificate."""

from __future__ import annotations

from runner.config.choices import Compress, SyncPolicyName, SyncSchedule
from runner.config.schema import AUTO, Schedule, Sync
from runner.plan import Plan
from runner.plan.sync_steps import sync_steps

_PRESETS: dict[tuple[object, ...], str] = {(0.7, 0.9, True, False): "diloco", (1.0, 0.7, False, True): "slowmo"}


def sync_labels(sync: Sync) -> list[str]:
    """The settings that differ from plain synchronous training: `["diloco", "k=8", "bf16 wire"]`."""
    policy = [] if sync.policy is SyncPolicyName.periodic or sync.always_synchronous else [_policy(sync)]
    k = [f"k={sync.k}"] if sync.k > 1 or policy else []
    return [*policy, *k, *_option_labels(sync)]


def sync_name(sync: Sync) -> str:
    """The policy with all its settings but k: `periodic, overlap=8, bf16 wire`."""
    return ", ".join([_policy(sync), *_option_labels(sync)])


def _option_labels(sync: Sync) -> list[str]:
    labels = []
    if sync.schedule is not SyncSchedule.constant:
        values = (sync.synchronous_share, sync.qsr_alpha)  # one of them, at most
        labels.append(sync.schedule.name + "".join(f"={value:g}" for value in values if value is not None))
    if sync.fragments != 1:
        labels.append(f"fragments={sync.fragments}")
    if sync.overlap:
        labels.append(f"overlap={sync.delay_steps}")
    if sync.compress is not Compress.none:
        labels.append(f"{sync.compress.name} wire")
    return labels


def _policy(sync: Sync) -> str:
    if sync.policy is not SyncPolicyName.outer:
        return sync.policy.name
    values = (sync.outer_lr, sync.outer_momentum, sync.outer_nesterov, sync.outer_per_lr)
    if values in _PRESETS:
        return _PRESETS[values]
    options = f"{' nesterov' if sync.outer_nesterov else ''}{' per lr' if sync.outer_per_lr else ''}"
    return f"outer lr={sync.outer_lr:g} momentum={sync.outer_momentum:g}{options}"


def describe_sync(sync: Sync, batch_length_sorted: bool) -> str:
    """What workers average and when, for the certificate: `weights every 4 steps, dealt by length`."""
    if sync.always_synchronous:
        return "every step"
    often = "every step" if sync.k == 1 else f"every {sync.k} steps"
    if sync.schedule is SyncSchedule.post_local:
        often += f" after {100 * sync.synchronous_share_or_default:g}% of the samples"
    if sync.schedule is SyncSchedule.qsr:
        alpha = "" if sync.qsr_alpha is None else f", alpha {sync.qsr_alpha:g}"
        often += f" or more (quadratic rule{alpha})"
    # Between synchronisations it matters which samples a worker gets.
    dealt = ", dealt by length" if batch_length_sorted else ""
    return f"{_averaged(sync)}{_fragments(sync)} {often}{_delay(sync)}{dealt}"


def _fragments(sync: Sync) -> str:
    """Each fragment has its own turn in a round of local steps."""
    if sync.fragments == AUTO:
        return f" in up to {sync.k} fragments"
    return "" if sync.fragments == 1 else f" in {sync.fragments} fragments"


def _delay(sync: Sync) -> str:
    if not sync.overlap:
        return ""
    steps = sync.delay_steps
    return f", applied {steps} step{'s' * (steps > 1)} later"


def _averaged(sync: Sync) -> str:
    if sync.policy is SyncPolicyName.outer:
        nesterov = ", nesterov" if sync.outer_nesterov else ""
        per_lr = ", per learning rate" if sync.outer_per_lr else ""
        return f"updates, outer SGD of lr {sync.outer_lr:g}, momentum {sync.outer_momentum:g}{nesterov}{per_lr}"
    return {
        SyncPolicyName.periodic: "weights",
        SyncPolicyName.accumulated: "accumulated updates",
        SyncPolicyName.gradients: "gradients, weights never synchronised",
    }[sync.policy]


def describe_sync_window(plan: Plan, sync: Sync, schedule: Schedule) -> str:
    """How often workers synchronise, for the plan's table."""
    if plan.world_size == 1:
        return "one worker: nothing to synchronise"
    if sync.always_synchronous:
        return "synchronous: every step"
    steps = sync_steps(plan, sync, schedule)
    # A run ends with one more average of what is left, but not of gradients: then worker 0's weights are the result.
    final = plan.optimizer_steps - 1 not in steps.due and sync.policy is not SyncPolicyName.gradients
    count = len(steps.due) + final
    first = f", after {steps.first_local:,} synchronous steps" if steps.first_local else ""
    at_least = "at least " if sync.schedule is SyncSchedule.qsr else ""
    steps_each = f"{sync.k} step{'s' * (sync.k > 1)}"
    return f"samples between synchronisations, every {at_least}k = {steps_each}{first}: {count:,} in total"

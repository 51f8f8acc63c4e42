"""Derived numbers: batch sizes, learning rate, steps. Pure arithmetic; imports neither torch nor Hydra."""

from runner.plan.batch import BatchSizes, batch_sizes, equivalent_micro_batches
from runner.plan.plan import Plan, make_plan
from runner.plan.scaling import scaling_samples
from runner.plan.steps import Step, total_steps

__all__ = [
    "BatchSizes",
    "Plan",
    "Step",
    "batch_sizes",
    "equivalent_micro_batches",
    "make_plan",
    "scaling_samples",
    "total_steps",
]

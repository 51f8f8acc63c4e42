"""A recipe whose model has running statistics, which replicas have to agree on as well as on weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from recipes.tasks.classification import SequenceClassification
from runner.data.recipe import Prepared

#: Added to TINY of tests/replicas.py. A worker needs two samples at least, which batch norm insists on.
BATCH_NORM = [
    "recipe._target_=tests.sync.batch_norm_recipe.Normalised",
    "recipe.metrics_shown=[accuracy]",
    "trusted_packages=[tests]",
]


@dataclass(frozen=True)
class Normalised(SequenceClassification):
    """Batch norm in front of the classifier, where there is dropout otherwise."""

    def build_model(self, prepared: Prepared) -> nn.Module:
        model = super().build_model(prepared)
        model.dropout = nn.BatchNorm1d(16)
        return model

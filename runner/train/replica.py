"""A worker's model, with everything that trains it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from runner.backends import Backend
from runner.config.schema import Config
from runner.data.recipe import Prepared, Recipe
from runner.exact import DropoutStreams
from runner.plan import Plan
from runner.sync import SyncPolicy
from runner.train.precision import Precision
from runner.train.predictor import Predictor
from runner.train.sharding import ShardedModel


@dataclass(frozen=True)
class Replica:
    """One worker's copy of the model with everything that trains it, as `build_replica` makes it.

    `model`: on the device, and compiled if requested; `optimizer` and `policy` were built for it. `sharded`: the model
    as it was sharded; None if every worker has all weights. `identity`: what must be the same when its state is loaded,
    by name: tables, layers and frozen weights.
    """

    config: Config
    plan: Plan
    recipe: Recipe
    prepared: Prepared
    model: nn.Module
    optimizer: Optimizer
    policy: SyncPolicy
    backend: Backend
    precision: Precision
    dropout: DropoutStreams
    sharded: ShardedModel | None
    identity: Mapping[str, str]

    @property
    def predictor(self) -> Predictor:
        """Evaluate the weights that the model has."""
        return Predictor(self.config, self.recipe, self.model, self.backend, self.precision)

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that training changes."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

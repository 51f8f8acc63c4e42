"""The optimizer and its learning rate."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers.pytorch_utils import Conv1D

from runner.config.schema import Optimizer as OptimizerConfig
from runner.config.schema import OptimizerName, Schedule
from runner.plan import Plan
from runner.plan.schedule import lr_multiplier


class MuonAndAdamW(Optimizer):
    """torch's Muon for the weights of linear layers, and AdamW for all other weights, as one optimizer.

    Muon (Jordan et al. 2024) makes the steps of a matrix orthogonal. Its steps have the size of AdamW's (Liu et al.
    2025, "Muon is scalable for LLM training", section 2.2), so that one learning rate serves both.
    """

    def __init__(self, groups: list[dict[str, Any]], hidden: Collection[int], **settings: Any) -> None:
        """`hidden`: the ids of the matrices for Muon. `settings`: `lr`, and those of both."""
        of_adamw = {name: settings.pop(name) for name in ("betas", "eps", "fused")}
        muon, adamw = ([_only(group, hidden, is_hidden) for group in groups] for is_hidden in (True, False))
        self._parts: list[Optimizer] = []
        if muon := [group for group in muon if group["params"]]:
            # Its own `eps` keeps Muon from dividing by 0, and is not AdamW's.
            self._parts.append(torch.optim.Muon(muon, **settings, adjust_lr_fn="match_rms_adamw"))
        if adamw := [group for group in adamw if group["params"]]:
            self._parts.append(torch.optim.AdamW(adamw, lr=settings["lr"], **of_adamw))
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        groups = iter(self.param_groups)
        for part in self._parts:  # loading a state replaces the state and the groups of this optimizer
            part.state, part.param_groups = self.state, [*islice(groups, len(part.param_groups))]
            part.step()


def _only(group: dict[str, Any], hidden: Collection[int], is_hidden: bool) -> dict[str, Any]:
    return {**group, "params": [one for one in group["params"] if (id(one) in hidden) is is_hidden]}


def hidden_matrices(model: nn.Module) -> set[int]:
    """The ids of the weights of linear layers, but for those that come after a transformers base model."""
    adapted: Any = model
    whole = adapted.get_base_model() if hasattr(model, "get_base_model") else adapted
    base: nn.Module = getattr(whole, "base_model", whole)
    output = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
    # Some models are their own base model; then heads are among its children.
    heads = [output, *(whole.children() if base is whole else ())]
    linear = (nn.Linear, Conv1D)
    return {id(one.weight) for one in base.modules() if isinstance(one, linear)} - {
        id(one.weight) for one in heads if isinstance(one, linear)
    }


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: weight decay for matrices, none for vectors and scalars (biases, normalisation weights)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


#: `muon` is not here: it consists of two.
_CLASSES: dict[OptimizerName, Callable[..., Optimizer]] = {
    OptimizerName.adamw: torch.optim.AdamW,
    OptimizerName.sgd: torch.optim.SGD,
    OptimizerName.adam: torch.optim.Adam,
    OptimizerName.adafactor: torch.optim.Adafactor,
    OptimizerName.adagrad: torch.optim.Adagrad,
    OptimizerName.adamax: torch.optim.Adamax,
    OptimizerName.nadam: torch.optim.NAdam,
    OptimizerName.radam: torch.optim.RAdam,
    OptimizerName.rmsprop: torch.optim.RMSprop,
}

#: The optimizers for which torch has fused kernels on every device.
_FUSED = (OptimizerName.adamw, OptimizerName.adam, OptimizerName.sgd)


def build_optimizer(config: OptimizerConfig, model: nn.Module, fused: bool) -> Optimizer:
    """torch's optimizer with these settings, as scaled; `fused`: with torch's fused kernels, if it has any."""
    groups = [group for group in parameter_groups(model, config.weight_decay) if group["params"]]
    settings: dict[str, Any] = {"lr": config.lr, **config.settings}
    if config.betas is not None:
        settings["betas"] = tuple(config.betas)
    if config.name in _FUSED:
        settings["fused"] = fused
    if config.name is OptimizerName.muon:
        return MuonAndAdamW(groups, hidden_matrices(model), **settings, fused=fused)
    optimizer = _CLASSES[config.name](groups, **settings)
    if config.name is OptimizerName.sgd and fused and config.momentum:
        # torch leaves the buffer uninitialised until the first step, and fp16 may skip that step.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class LearningRate:
    """The learning rate as a function of the samples seen. It counts nothing itself."""

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self._peak = plan.lr
        self._total = plan.total_samples
        self._schedule = schedule

    def at(self, samples_seen: int) -> float:
        return self._peak * lr_multiplier(self._schedule, samples_seen / self._total)

    def apply(self, optimizer: Optimizer, samples_seen: int) -> float:
        lr = self.at(samples_seen)
        for group in optimizer.param_groups:
            group["lr"] = lr
        return lr

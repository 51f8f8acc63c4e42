"""torch's optimizers as the runner builds them."""

from __future__ import annotations

import copy
from collections import defaultdict

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from runner.config.choices import OptimizerName
from runner.config.compose import compose, settings
from runner.config.schema import Optimizer
from runner.train.optim import build_optimizer, parameter_groups
from tests.train.test_adapter import BERT

NO_DROPOUT = {**BERT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GRADIENTS = [[1.0, -2.0, 4.0], [0.5, 0.25, -1.0], [-3.0, 2.0, 0.125]]


def trained(optimizer: torch.optim.Optimizer, weight: nn.Parameter, gradients: list[list[float]]) -> Tensor:
    """The weight after fp16 steps with these gradients; the scaler skips steps with an infinite one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    for gradient in gradients:
        weight.grad = scaler.scale(torch.tensor(gradient))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return weight.detach().clone()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("skipped", [[0], [0, 1], []])
def test_skipped_fp16_steps_leave_no_momentum(skipped: list[int], nesterov: bool) -> None:
    """Fused SGD ends where plain SGD ends without the skipped steps, though torch would not initialise its buffer."""
    stale = [torch.full((3,), 3e38) for _ in range(64)]  # what uninitialised memory may contain
    del stale
    weight = nn.Parameter(torch.ones(3))
    config = Optimizer(OptimizerName.sgd, lr=0.1, clip_norm=None, momentum=0.9, nesterov=nesterov)
    optimizer = build_optimizer(config, nn.ParameterList([weight]), fused=True)
    steps = [[float("inf")] * 3 if n in skipped else gradient for n, gradient in enumerate(GRADIENTS)]
    found = trained(optimizer, weight, steps)

    plain = nn.Parameter(torch.ones(3))
    reference = torch.optim.SGD([plain], lr=0.1, momentum=0.9, nesterov=nesterov)
    kept = [gradient for n, gradient in enumerate(GRADIENTS) if n not in skipped]
    assert torch.equal(found, trained(reference, plain, kept))


@pytest.mark.parametrize("name", OptimizerName)
def test_every_optimizer_descends(name: OptimizerName) -> None:
    """Its preset builds torch's class with every setting; decay, and the learning rate of each step, reach it."""
    config = settings(compose([f"optimizer={name.name}", "optimizer.weight_decay=0.1"])).optimizer
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = build_optimizer(config, model, fused=True)
    assert type(optimizer).__name__.removesuffix("AndAdamW").lower() == name.name
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    matrices, vectors = optimizer.param_groups
    for setting, value in config.settings.items():
        # Muon has the matrix, and AdamW the bias.
        group = vectors if name is OptimizerName.muon and setting in ("betas", "eps") else matrices
        assert group[setting] == (tuple(value) if setting == "betas" else value)
    inputs, losses = torch.randn(8, 4), []
    for lr in [0.0] + [0.01] * 20:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]  # a learning rate of 0 moves nothing
    assert losses[-1] < losses[1]


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    decayed, others = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert [p.ndim for p in decayed["params"]] == [2]
    assert [p.ndim for p in others["params"]] == [1, 1, 1]


def test_muon_is_torchs_on_matrices_between_layers() -> None:
    """And AdamW is on embeddings, head and vectors; also after its state was loaded."""
    config = settings(compose(["optimizer=muon"])).optimizer
    torch.manual_seed(0)
    ours, theirs = (BertForSequenceClassification(BertConfig(**NO_DROPOUT)).double() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    hidden = {name for name, one in theirs.bert.named_parameters(prefix="bert") if one.ndim == 2}
    hidden -= {name for name in hidden if "embeddings" in name}
    assert any("pooler" in name for name in hidden)
    kinds: dict[tuple[bool, bool], list[nn.Parameter]] = defaultdict(list)
    for name, one in theirs.named_parameters():
        kinds[name in hidden, one.ndim > 1].append(one)
    muon = torch.optim.Muon(
        kinds[True, True], lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    decayed = [
        {"params": kinds[False, True], "weight_decay": config.weight_decay},
        {"params": kinds[False, False], "weight_decay": 0.0},
    ]
    reference = [muon, torch.optim.AdamW(decayed, lr=config.lr, fused=True)]
    optimizer = build_optimizer(config, ours, fused=True)
    for step in range(4):
        if step == 2:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = build_optimizer(config, ours, fused=True)
            optimizer.load_state_dict(state)
        for model in (ours, theirs):
            model.zero_grad()
            model(input_ids=torch.arange(12).reshape(2, 6), labels=torch.tensor([0, 1])).loss.backward()
        for one in (optimizer, *reference):
            one.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)

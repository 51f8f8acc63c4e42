"""Moves models between devices."""

from __future__ import annotations

import torch
from torch import nn


def to_device(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on `device`, with tied parameters still tied: moving to or from XLA gives each name a new parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    model = model.to(device)
    for first, *others in names.values():
        parameter = model.get_parameter(first)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, parameter)
    return model

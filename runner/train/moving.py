"""Models from one device to another."""

from __future__ import annotations

import torch
from torch import nn


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on `device`, with its tied parameters still tied.

    On its way to or from an XLA device a parameter becomes another object, and each of its names one of its own.
    """
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

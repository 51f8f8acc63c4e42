"""Adapters by PEFT, and the part of a model that training changes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runner.config.choices import AdapterKind
from runner.config.schema import Adapter
from runner.errors import UserError, require
from runner.folder.files import digest_of_bytes

#: The end of a model's class name -> PEFT's name of its task, by which PEFT loads an adapter into such a model.
_TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "MTModel": "SEQ_2_SEQ_LM",
}


def add_adapter(settings: Adapter, model: nn.Module) -> nn.Module:
    """The model in which only the adapter and the head are trained; as it is with `adapter=none`.

    New matrices are drawn from torch's global generator. Raises UserError.
    """
    if settings.kind is AdapterKind.none:
        return model
    from peft import LoraConfig, get_peft_model  # takes a second, and few runs need it
    from transformers import PreTrainedModel

    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"adapter={settings.kind.name} needs a model of transformers, and {kind} is none: use adapter=none"
        )
    assert settings.rank is not None
    assert settings.alpha is not None
    if not (model.name_or_path or settings.merge):
        rule = "an adapter is worth nothing without the model that it belongs to: use adapter.merge=true"
        raise UserError(f"adapter.merge=false is invalid for a model without a name (random or merged): {rule}")
    head = _head(model)
    layers = _linear_layers(model, [*head, *_tied_output(model)])
    if not layers:
        rule = f"{kind} has none: use adapter=none"
        raise UserError(f"adapter={settings.kind.name} needs linear layers below the model's head, and {rule}")
    if settings.target_modules is not None:
        _check_names(settings.target_modules, layers)
    config = LoraConfig(
        task_type=next((task for suffix, task in _TASKS.items() if kind.endswith(suffix)), None),
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=settings.dropout,
        target_modules="all-linear" if settings.target_modules is None else list(settings.target_modules),
        exclude_modules="|".join(rf"{re.escape(name)}(\..*)?" for name in head) or None,
        modules_to_save=head or None,
    )
    with warnings.catch_warnings():
        # GPT-2 stores its weights transposed, which PEFT finds out; it uses names that transformers has replaced.
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")
        warnings.simplefilter("ignore", FutureWarning)
        adapted: nn.Module = get_peft_model(model, config)
    return with_4_bits(settings, adapted)


def without_adapter(settings: Adapter, model: nn.Module) -> nn.Module:
    """Return what is saved: the whole model with `adapter.merge`, else the model as it is. Changes the model."""
    if not settings.merge:
        return model
    if settings.in_4_bits:
        from runner.train.four_bit import dequantise  # needs bitsandbytes, which is optional

        dequantise(model)
    merged: nn.Module = model.merge_and_unload()  # type: ignore[operator]
    return merged


def with_4_bits(settings: Adapter, model: nn.Module) -> nn.Module:
    """Return the model with an adapter, its frozen linear layers in 4 bits with `adapter=qlora`. Changes the model."""
    if settings.in_4_bits:
        from runner.train.four_bit import quantise  # needs bitsandbytes, which is optional

        quantise(model)
    return model


def _head(model: Any) -> list[str]:
    """The layers that the task adds, and others that are new. A language model's head is pretrained like the rest."""
    children = ((name, child) for name, child in model.named_children() if name != model.base_model_prefix)
    head = [name for name, child in children if any(True for _ in child.parameters())]
    if model.get_output_embeddings() is not None:
        head = []
    new = (name.rpartition(".")[0] for name in getattr(model, "new_weights", ()))
    others = (name for name in new if name and name.partition(".")[0] not in head)
    return list(dict.fromkeys([*head, *others]))


def _tied_output(model: Any) -> list[str]:
    """The output layer, if it shares its weights with the embedding: a product cannot be added to one of the two."""
    output = model.get_output_embeddings()
    if output is None or output.weight is not model.get_input_embeddings().weight:
        return []
    return [name for name, module in model.named_modules() if module is output]


def _linear_layers(model: nn.Module, head: Sequence[str]) -> list[str]:
    """Names of the linear layers below the head."""
    from transformers.pytorch_utils import Conv1D

    found = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]
    return [name for name in found if not any(f"{name}.".startswith(f"{one}.") for one in head)]


def _check_names(names: Sequence[str], layers: Sequence[str]) -> None:
    """Check that each is the end of one of the layers' names. PEFT ignores those that are not."""
    known = dict.fromkeys(name.rpartition(".")[2] for name in layers)
    for name in names:
        ok = any(f".{one}".endswith(f".{name}") for one in layers)
        rule = f"'{name}' ends the name of no linear layer below the head; use some of {', '.join(known)}"
        require(ok, "adapter.target_modules", list(names), rule)


def parameter_count(settings: Adapter, model: nn.Module) -> int:
    """Parameters of the model, with those of the adapter."""
    count = sum(parameter.numel() for parameter in model.parameters())
    if settings.in_4_bits:
        from runner.train.four_bit import uncounted  # needs bitsandbytes, which is optional

        count += uncounted(model)
    return count


def changing_state(model: nn.Module) -> dict[str, Tensor]:
    """The entries of the state dict that training changes: trained weights and buffers, and not frozen weights."""
    frozen = _frozen(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def load_changing_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load what `changing_state` returned into a model of the same layers, whose frozen weights stay."""
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= _frozen(model).keys(), missing


def frozen_digest(model: nn.Module) -> str | None:
    """A checksum of the weights that are not trained; None if all are."""
    frozen = _frozen(model)
    if not frozen:
        return None
    # A sum of the bits is as fast as memory, where a hash would take seconds for a billion weights.
    sums = [[name, list(one.shape), int(_bits(one.detach()).sum(dtype=torch.int64))] for name, one in frozen.items()]
    return digest_of_bytes(repr(sums).encode())


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32) if tensor.is_floating_point() else tensor


def _frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: one for name, one in model.named_parameters(remove_duplicate=False) if not one.requires_grad}

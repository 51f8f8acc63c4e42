"""The training with transformers' Trainer, in order or with its grouping by length: one process of one or two."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

from benchmarks.peers import peer


class _Losses(Trainer):
    """Keeps the loss of the latest step, which the Trainer sums up only."""

    latest: Tensor

    def training_step(self, *inputs: Any, **named: Any) -> Tensor:
        self.latest = super().training_step(*inputs, **named)
        return self.latest


class _Steps(TrainerCallback):
    def __init__(self, notes: peer.Notes) -> None:
        self.notes = notes
        self.trainer: _Losses | None = None

    def on_step_end(self, *known: Any, **named: Any) -> None:
        assert self.trainer
        self.notes.step(self.trainer.latest)


def main() -> None:
    chosen = peer.arguments()
    notes = peer.Notes(chosen)
    cuda = chosen.device == "cuda"
    settings = TrainingArguments(
        output_dir=str(chosen.out.with_suffix(".trainer")),
        use_cpu=not cuda,
        ddp_backend=("nccl" if cuda else "gloo") if "RANK" in os.environ else None,
        ddp_find_unused_parameters=False,
        seed=chosen.seed,
        max_steps=chosen.steps,
        per_device_train_batch_size=chosen.batch,
        learning_rate=chosen.lr,
        lr_scheduler_type="linear",
        warmup_steps=chosen.warmup,
        weight_decay=peer.WEIGHT_DECAY,
        max_grad_norm=peer.CLIP_NORM,
        optim="adamw_torch_fused",
        bf16=chosen.precision == "bf16",
        tf32=True if chosen.precision == "tf32" else None,
        torch_compile=chosen.compile,
        train_sampling_strategy="group_by_length" if chosen.grouped else "sequential",
        remove_unused_columns=False,
        dataloader_num_workers=chosen.loader_workers,
        dataloader_pin_memory=cuda,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        # On two workers it would double the loss of models whose loss is a mean already, such as classifiers.
        average_tokens_across_devices=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows, collate = peer.data(chosen)
    steps = _Steps(notes)
    trainer = _Losses(
        model=peer.model(chosen),
        args=settings,
        data_collator=collate,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(chosen.model),
        callbacks=[steps],
    )
    steps.trainer = trainer
    trainer.train()
    trainer.save_model(str(chosen.out.with_suffix(".model")))
    notes.close()
    peer.end()


if __name__ == "__main__":
    main()

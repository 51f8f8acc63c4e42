"""The same with transformers' Trainer, which torchrun starts: the audit is a callback."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainerCallback, TrainingArguments

from runner.audit import Audit
from tests.audit.script import Tokens, end


class AuditCallback(TrainerCallback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_begin(self, *given: Any, model: Any, optimizer: Any, train_dataloader: Any, **others: Any) -> None:
        self.audit = Audit(model, optimizer, train_dataloader, self.folder)

    def on_train_end(self, *given: Any, **others: Any) -> None:
        self.audit.finish()


def main(folder: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForTokenClassification(BertConfig(vocab_size=50, num_labels=3, **sizes))
    arguments = TrainingArguments(
        output_dir=f"{folder}/trainer",
        per_device_train_batch_size=5,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=Tokens(uneven=False), callbacks=[AuditCallback(folder)]).train()
    end()


if __name__ == "__main__":
    main(sys.argv[1])

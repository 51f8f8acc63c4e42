"""A language of single letters: documents, tokenizers and models small enough to compute by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from recipes.tasks.language_model import CausalLanguageModel, Documents
from runner.data.cache import Cache
from runner.data.recipe import Prepared
from runner.data.table import Table

END, UNKNOWN, PAD, A = 0, 1, 2, 3
SPECIAL = ["<|endoftext|>", "<unk>", "<pad>"]
LETTERS = list("abcdefghij")


def word_tokenizer(words: Sequence[str], **special: str) -> PreTrainedTokenizerFast:
    """Words between blanks as tokens, after the special ones."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)


def bracketing(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same, with the pad token put before a text and the end of text after it by the tokenizer itself."""
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A <|endoftext|>", special_tokens=[("<pad>", PAD), ("<|endoftext|>", END)]
    )
    return tokenizer


def gpt2(vocabulary: int, positions: int = 32, width: int = 16) -> GPT2LMHeadModel:
    """One layer, without dropout; its weights are larger than usual, so that no two tokens are alike to it."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary,
            n_positions=positions,
            n_embd=width,
            n_layer=1,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.2,
            bos_token_id=END,
            eos_token_id=END,
        )
    )


def save_gpt2(folder: Path, words: Sequence[str] = LETTERS, **of: int) -> Path:
    """A folder that `from_pretrained` reads, its tokenizer without a pad token, as GPT-2's is."""
    torch.manual_seed(0)
    gpt2(len(SPECIAL) + len(words), **of).save_pretrained(folder)
    word_tokenizer(words, eos_token="<|endoftext|>", bos_token="<|endoftext|>").save_pretrained(folder)
    return folder


def uneven_lines(count: int, seed: int) -> list[str]:
    """Lines of one to sixty letters, most of them short, in which letters tend to follow the alphabet."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        at, line = draw.randrange(10), []
        for _ in range(1 + int(59 * draw.random() ** 4)):
            line.append(LETTERS[at % 10])
            at += 1 if draw.random() < 0.8 else draw.randrange(10)
        lines.append(" ".join(line))
    return lines


@dataclass(frozen=True)
class Given:
    """A document source with these documents."""

    train: Sequence[str]
    eval: Sequence[str] = ("a",)

    def read(self) -> Documents:
        return Documents(self.train, self.eval, "given")


@dataclass(frozen=True)
class SmallModel:
    """A model source. `made`: what it is called, to be told apart; `own`: its tokenizer, in place of the letters'."""

    own: Any = None
    made: str = "letters"
    causal: bool = True
    positions: int = 32
    has_dropout: bool = False
    notes: tuple[str, ...] = ("a note",)

    @property
    def model_type(self) -> str:
        return "gpt2" if self.causal else "bert"

    def check(self) -> None:
        """It is made here."""

    def longest_input(self) -> int:
        return self.positions

    def tokenizer_identity(self) -> str:
        return self.made

    def tokenizer(self, texts: Sequence[str]) -> Any:
        return self.own or word_tokenizer(LETTERS, eos_token="<|endoftext|>", pad_token="<pad>")

    def check_head(self, head: str, classes: int | None = None) -> None:
        """A BERT is found out when it is built."""

    def build_model(self, head: str, vocabulary: int, pad_id: int) -> nn.Module:
        if self.causal:
            return gpt2(vocabulary, self.positions)
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        return BertLMHeadModel(BertConfig(vocab_size=vocabulary, max_position_embeddings=self.positions, **sizes))


def letters(
    train: Sequence[str], evaluation: Sequence[str] = ("a b",), block_size: int = 4, packing: str = "blocks", **of: Any
) -> CausalLanguageModel:
    return CausalLanguageModel(Given(train, evaluation), SmallModel(**of), block_size, packing)


def prepared(recipe: CausalLanguageModel, cache: Path) -> Prepared:
    return Prepared.load(recipe.prepare(Cache(cache), recipe.facts(Cache(cache))))


def perplexity_by_hand(model: nn.Module, table: Table) -> float:
    """Token by token, without padding and without batches."""
    total, count = 0.0, 0
    for row in range(len(table)):
        ids = torch.tensor(np.asarray(table[[row]]["input_ids"][0], dtype=np.int64))
        for place in range(1, len(ids)):
            with torch.no_grad():
                logits = model(input_ids=ids[None, :place]).logits[0, -1].double()
            total -= float(logits.log_softmax(-1)[ids[place]])
            count += 1
    return math.exp(total / count)

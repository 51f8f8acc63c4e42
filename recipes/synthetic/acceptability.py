"""Linguistic acceptability on a synthetic corpus with a small transformer: nothing to download."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from recipes.sources.text_files import TextFiles
from recipes.synthetic.grammar import generate
from recipes.tasks.classification import Corpus, LabelledText
from recipes.tasks.pretrained_recipe import ModelSource
from runner.errors import UserError, require

#: Positions of the small model; the longest sentence of the grammar has 14 tokens.
_POSITIONS = 32


@dataclass(frozen=True)
class GrammarCorpus:
    """The corpus of `recipes.synthetic.grammar`. `seed` determines the corpus, not the training."""

    seed: int
    train_samples: int
    eval_samples: int

    def read(self) -> Corpus:
        for name in ("train_samples", "eval_samples"):
            require(getattr(self, name) >= 2, f"recipe.data.{name}", getattr(self, name), "use at least 2 sentences")
        try:
            parts = generate(self.seed, self.train_samples, self.eval_samples)
        except ValueError as error:
            raise UserError(f"recipe.data.train_samples={self.train_samples} is invalid: {error}") from error
        train, evaluation = (
            LabelledText([row.sentence for row in rows], [row.label for row in rows]) for rows in parts
        )
        return Corpus(train, evaluation, f"grammar, seed {self.seed}", ("unacceptable", "acceptable"))

    def read_part(
        self, part: Literal["train", "eval"], file: str | None = None, label_names: Sequence[str] | None = None
    ) -> LabelledText:
        """One part of the corpus, or the sentences of `file`, one in a line or in a named column, without labels."""
        if file is not None:
            return TextFiles(text_column=0, columns=1).read_part(part, file)
        corpus = self.read()
        return corpus.train if part == "train" else corpus.eval


@dataclass(frozen=True)
class SmallTransformer(ModelSource):
    """A BERT- or GPT-2-shaped model with random weights, over whole words.

    `hidden_size` and `feed_forward_size` in units. `attention_dropout`: of attention weights; `dropout`: of everything
    else. `initializer_range`: standard deviation of new weights; with the 0.02 of wider models the loss stays flat for
    epochs. `shape`: `bert` is bidirectional and reads the first token, `gpt2` is causal and reads the last one.
    """

    hidden_size: int
    feed_forward_size: int
    layers: int
    heads: int
    dropout: float
    attention_dropout: float
    initializer_range: float
    shape: str = "bert"

    def check(self) -> None:
        require(self.shape in ("bert", "gpt2"), "recipe.model.shape", self.shape, "use bert or gpt2")
        for name in ("hidden_size", "feed_forward_size", "layers", "heads"):
            require(getattr(self, name) >= 1, f"recipe.model.{name}", getattr(self, name), "use at least 1")
        rule = f"use a multiple of recipe.model.heads={self.heads}"
        require(self.hidden_size % self.heads == 0, "recipe.model.hidden_size", self.hidden_size, rule)
        for name in ("dropout", "attention_dropout"):
            share = getattr(self, name)
            require(0 <= share < 1, f"recipe.model.{name}", share, "must be at least 0 and below 1")
        require(self.initializer_range > 0, "recipe.model.initializer_range", self.initializer_range, "must be above 0")

    @property
    def has_dropout(self) -> bool:
        return self.dropout > 0 or self.attention_dropout > 0

    @property
    def model_type(self) -> str | None:
        return self.shape

    def longest_input(self) -> int | None:
        return _POSITIONS

    def tokenizer_identity(self) -> str:
        return "whole words, BERT's special tokens"

    def tokenizer(self, texts: Sequence[str]) -> Any:
        from tokenizers import Tokenizer, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
        words = sorted({word for text in texts for word in text.split()})
        vocabulary = {word: number for number, word in enumerate(special + words)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B [SEP]",
            special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
        )
        names = ("pad_token", "unk_token", "cls_token", "sep_token")
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **dict(zip(names, special, strict=True)))

    def build_model(self, head: str, vocabulary: int, pad_id: int, **settings: Any) -> nn.Module:
        if head != "SequenceClassification":
            raise UserError(f"recipe.model has no model for {head}: choose recipes.models.pretrained.Pretrained")
        # GPT-2 needs the pad token too: it reads the last token that is not padding.
        sizes = {"vocab_size": vocabulary, "pad_token_id": pad_id, **settings}
        return self._bert(**sizes) if self.shape == "bert" else self._gpt2(**sizes)

    def _bert(self, **sizes: int) -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        module: nn.Module = BertForSequenceClassification(
            BertConfig(
                **sizes,
                hidden_size=self.hidden_size,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                intermediate_size=self.feed_forward_size,
                max_position_embeddings=_POSITIONS,
                hidden_dropout_prob=self.dropout,
                attention_probs_dropout_prob=self.attention_dropout,
                initializer_range=self.initializer_range,
            )
        )
        return module

    def _gpt2(self, **sizes: int) -> nn.Module:
        from transformers import GPT2Config, GPT2ForSequenceClassification

        module: nn.Module = GPT2ForSequenceClassification(
            GPT2Config(
                **sizes,
                n_embd=self.hidden_size,
                n_layer=self.layers,
                n_head=self.heads,
                n_inner=self.feed_forward_size,
                n_positions=_POSITIONS,
                resid_pdrop=self.dropout,
                embd_pdrop=self.dropout,
                attn_pdrop=self.attention_dropout,
                initializer_range=self.initializer_range,
                # GPT-2's default ids are beyond this vocabulary, and nothing is generated.
                bos_token_id=None,
                eos_token_id=None,
                use_cache=False,
            )
        )
        return module

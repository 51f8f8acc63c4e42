"""Linguistic acceptability on a corpus made from a small grammar, with a small transformer: nothing to download."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from recipes.synthetic.grammar import Row, generate
from recipes.tasks.classification import Corpus, LabelledText
from runner.errors import UserError, did_you_mean


@dataclass(frozen=True)
class GrammarCorpus:
    """The corpus of `recipes.synthetic.grammar`. `seed` makes the corpus, not the training."""

    seed: int
    train_samples: int
    eval_samples: int

    def read(self) -> Corpus:
        for name in ("train_samples", "eval_samples"):
            if getattr(self, name) < 2:
                raise UserError(f"recipe.data.{name}={getattr(self, name)} cannot be: it must be at least 2 sentences")
        try:
            train, evaluation = generate(self.seed, self.train_samples, self.eval_samples)
        except ValueError as error:
            raise UserError(f"recipe.data.train_samples={self.train_samples} cannot be: {error}") from error
        return Corpus(_labelled(train), _labelled(evaluation), f"grammar, seed {self.seed}")


def _labelled(rows: Sequence[Row]) -> LabelledText:
    return LabelledText([row.sentence for row in rows], [row.label for row in rows])


#: Tokens that the small model has positions for; the longest sentence of the grammar has 14.
_POSITIONS = 32


@dataclass(frozen=True)
class SmallTransformer:
    """A BERT- or GPT-2-shaped model from scratch over whole words.

    `hidden_size` and `feed_forward_size` in units; dropouts as shares, `attention_dropout` of attention weights and
    `dropout` of all else; `initializer_range`: standard deviation of new weights. BERT's and GPT-2's own 0.02 is made
    for wider models: here it keeps the loss flat for epochs. `shape`: `bert` reads the first token's state and looks
    both ways; `gpt2` reads the last token's and looks back.
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
        if self.shape not in _BUILD:
            raise UserError(f"recipe.model.shape={self.shape} is not a shape{did_you_mean(self.shape, _BUILD)}")
        for name in ("hidden_size", "feed_forward_size", "layers", "heads"):
            if getattr(self, name) < 1:
                raise UserError(f"recipe.model.{name}={getattr(self, name)} cannot be: it must be at least 1")
        if self.hidden_size % self.heads:
            raise UserError(
                f"recipe.model.hidden_size={self.hidden_size} does not divide by recipe.model.heads={self.heads}"
            )
        for name in ("dropout", "attention_dropout"):
            share = getattr(self, name)
            if not 0 <= share < 1:
                raise UserError(f"recipe.model.{name}={share} cannot be: it must be at least 0 and below 1")
        if self.initializer_range <= 0:
            raise UserError(f"recipe.model.initializer_range={self.initializer_range} cannot be: it must be above 0")

    @property
    def has_dropout(self) -> bool:
        return self.dropout > 0 or self.attention_dropout > 0

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
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token="[PAD]",
            unk_token="[UNK]",
            cls_token="[CLS]",
            sep_token="[SEP]",
        )

    def build_classifier(self, classes: int, vocabulary: int, pad_id: int) -> nn.Module:
        return _BUILD[self.shape](self, vocab_size=vocabulary, num_labels=classes, pad_token_id=pad_id)


def _bert(of: SmallTransformer, **sizes: int) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    module: nn.Module = BertForSequenceClassification(
        BertConfig(
            **sizes,
            hidden_size=of.hidden_size,
            num_hidden_layers=of.layers,
            num_attention_heads=of.heads,
            intermediate_size=of.feed_forward_size,
            max_position_embeddings=_POSITIONS,
            hidden_dropout_prob=of.dropout,
            attention_probs_dropout_prob=of.attention_dropout,
            initializer_range=of.initializer_range,
        )
    )
    return module


def _gpt2(of: SmallTransformer, **sizes: int) -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    module: nn.Module = GPT2ForSequenceClassification(
        GPT2Config(
            **sizes,  # the pad token too: the last token is found as the last that is none
            n_embd=of.hidden_size,
            n_layer=of.layers,
            n_head=of.heads,
            n_inner=of.feed_forward_size,
            n_positions=_POSITIONS,
            resid_pdrop=of.dropout,
            embd_pdrop=of.dropout,
            attn_pdrop=of.attention_dropout,
            initializer_range=of.initializer_range,
            # GPT-2's own end of text is beyond this vocabulary, and nothing is generated.
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
    )
    return module


_BUILD: dict[str, Callable[..., nn.Module]] = {"bert": _bert, "gpt2": _gpt2}

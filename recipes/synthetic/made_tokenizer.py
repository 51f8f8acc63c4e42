"""Tokenizers made from the training texts, for models whose own are not here. The same texts give the same tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from runner.errors import UserError

#: Model type -> how such models cut texts.
KINDS = {"gpt2": "byte-level BPE", "bert": "WordPiece", "distilbert": "WordPiece"}

#: How often two pieces have to stand side by side to become a token.
_MIN_FREQUENCY = 2

#: Different characters of a WordPiece vocabulary, at most; all others are unknown.
_ALPHABET = 1000

_END = "<|endoftext|>"
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def made_tokenizer(model_type: str, vocabulary: int, texts: Sequence[str]) -> Any:
    """A transformers tokenizer of the kind that such models have, of at most `vocabulary` tokens, with a pad token.

    `model_type`: one of `KINDS`. Raises UserError if the vocabulary is too small for the kind.
    """
    from transformers import PreTrainedTokenizerFast

    make = {"byte-level BPE": _byte_level, "WordPiece": _word_piece}[KINDS[model_type]]
    tokenizer, special = make(vocabulary, texts)
    if tokenizer.get_vocab_size() > vocabulary:
        raise UserError(
            f"recipe.model has a vocabulary of {vocabulary} tokens, and a {KINDS[model_type]} tokenizer made from the "
            f"training texts needs {tokenizer.get_vocab_size()}: give a model's folder that holds a tokenizer"
        )
    types = ["token_type_ids"] if model_type == "bert" else []
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=["input_ids", *types, "attention_mask"], **special
    )


def special_ids(model_type: str) -> dict[str, int]:
    """What a model's configuration has to say of the special tokens of a tokenizer made for it."""
    return {"bos_token_id": 0, "eos_token_id": 0} if KINDS[model_type] == "byte-level BPE" else {"pad_token_id": 0}


def _byte_level(vocabulary: int, texts: Sequence[str]) -> tuple[Any, dict[str, str]]:
    """GPT-2's kind: merged bytes, no special tokens but the end of a text, which is number 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=[_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer, len(texts))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer, dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), _END)


def _word_piece(vocabulary: int, texts: Sequence[str]) -> tuple[Any, dict[str, str]]:
    """BERT's kind: lower case, pieces of words, pairs in the form [CLS] a [SEP] b [SEP]; the pad token is number 0."""
    from tokenizers import Tokenizer, decoders, models, processors

    pieces = _pieces(vocabulary, texts)
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = _words()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, pieces[name]) for name in ("[CLS]", "[SEP]")],
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return tokenizer, dict(zip(names, _SPECIAL, strict=True))


def _words() -> tuple[Any, Any]:
    """How texts are cleaned and cut into words before they are cut into pieces."""
    from tokenizers import normalizers, pre_tokenizers

    return normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()


def _pieces(vocabulary: int, texts: Sequence[str]) -> dict[str, int]:
    """Piece -> number."""
    from tokenizers import Tokenizer, models, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = _words()
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(tokenizer.normalizer.normalize_str(text))
    frequent = sorted((character for character in counts if not character.isspace()), key=lambda c: (-counts[c], c))
    # Each is a token at the beginning of a word and another one within; half the vocabulary is left for longer pieces.
    alphabet = sorted(frequent[: max(1, min(_ALPHABET, vocabulary // 4))])
    # The library numbers characters that go on a word as it comes upon them, in another order in every process. Given
    # in advance, as if they were special tokens, they have their numbers.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=[*_SPECIAL, *(f"##{character}" for character in alphabet)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer, len(texts))
    numbered: dict[str, int] = tokenizer.get_vocab()
    return numbered

"""Tokenizers trained on given texts, for models without one. Equal texts give equal tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

#: Model type -> kind of tokenizer.
KINDS = {"gpt2": "byte-level BPE", "bert": "WordPiece", "distilbert": "WordPiece"}

#: Occurrences of a pair of tokens before it is merged.
_MIN_FREQUENCY = 2

#: Different characters of a WordPiece vocabulary, at most; others are unknown.
_ALPHABET = 1000

_END = "<|endoftext|>"
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def trained_tokenizer(model_type: str, vocabulary: int, texts: Sequence[str]) -> Any:
    """A transformers tokenizer for a model type in `KINDS`, with a pad token and at most `vocabulary` tokens.

    Raises ValueError if the vocabulary is too small for the kind.
    """
    from transformers import PreTrainedTokenizerFast

    train = {"byte-level BPE": _byte_level, "WordPiece": _word_piece}[KINDS[model_type]]
    tokenizer, special = train(vocabulary, texts)
    if tokenizer.get_vocab_size() > vocabulary:
        raise ValueError(f"a vocabulary of {vocabulary} tokens is too small: {tokenizer.get_vocab_size()} are needed")
    types = ["token_type_ids"] if model_type == "bert" else []
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=["input_ids", *types, "attention_mask"], **special
    )


def special_ids(model_type: str) -> dict[str, int]:
    """The special token ids to set in the configuration of a model that uses a trained tokenizer."""
    return {"bos_token_id": 0, "eos_token_id": 0} if KINDS[model_type] == "byte-level BPE" else {"pad_token_id": 0}


def _byte_level(vocabulary: int, texts: Sequence[str]) -> tuple[Any, dict[str, str]]:
    """GPT-2's kind: merged bytes; the only special token is the end of text, with id 0."""
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
    """BERT's kind: lower case, pieces of words, pairs as [CLS] a [SEP] b [SEP]; the pad token has id 0."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    normalizer, pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    draft = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    draft.normalizer, draft.pre_tokenizer = normalizer, pre_tokenizer
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    frequent = sorted((character for character in counts if not character.isspace()), key=lambda c: (-counts[c], c))
    # Each character is one token at the start of a word and another within; half the vocabulary is left for pieces.
    alphabet = sorted(frequent[: max(1, min(_ALPHABET, vocabulary // 4))])
    # The library numbers `##` characters in an order that differs between processes. As special tokens, they get
    # their ids from here.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=[*_SPECIAL, *(f"##{character}" for character in alphabet)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    draft.train_from_iterator(texts, trainer, len(texts))
    pieces: dict[str, int] = draft.get_vocab()

    # A new tokenizer, since in the draft all `##` characters are special tokens.
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, pieces[name]) for name in ("[CLS]", "[SEP]")],
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return tokenizer, dict(zip(names, _SPECIAL, strict=True))

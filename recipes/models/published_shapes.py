"""Sizes of well-known models, for timing runs with random weights where the model's config.json is not available.

GPT-2: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (the smallest of the four). BERT:
Devlin et al. 2018, "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding". DistilBERT: Sanh
et al. 2019, "DistilBERT, a distilled version of BERT".
"""

from __future__ import annotations

from typing import Any

_BERT = {"model_type": "bert", "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2}

#: Name on the Hub -> the sizes in its config.json. Dropouts are the defaults of the classes, 0.1.
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
    },
    "bert-base-uncased": {
        **_BERT,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
    "bert-large-uncased": {
        **_BERT,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "distilbert-base-uncased": {
        "model_type": "distilbert",
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "dim": 768,
        "n_layers": 6,
        "n_heads": 12,
        "hidden_dim": 3072,
    },
}

#: The owners on the Hub. The bare names are older, and still valid there.
_OWNERS = ("openai-community", "google-bert", "distilbert")


def published_shape(name: str) -> dict[str, Any] | None:
    """The configuration of a model by its name on the Hub, with or without owner; None if it is not in the table."""
    owner, _, model = name.rpartition("/")
    return SHAPES.get(model) if owner in ("", *_OWNERS) else None

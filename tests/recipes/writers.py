"""Models that write text, small enough for tests, with tokenizers like real ones; and data about animals for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from benchmarks.peers.trained_tokenizer import trained_tokenizer
from tests.recipes.zoo import ANIMALS, PLACES

_TURN = "<|im_start|>{{ message.role }}\n"
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

#: As in Qwen and many others, without marks.
CHATML = f"{{% for message in messages %}}{_TURN}{{{{ message.content }}}}<|im_end|>\n{{% endfor %}}{_PROMPT}"
#: The same with the assistant's part marked, without the line end after it.
MARKED = (
    f"{{% for message in messages %}}{_TURN}{{% if message.role == 'assistant' %}}{{% generation %}}"
    "{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\n' }}"
    f"{{% endfor %}}{_PROMPT}"
)
#: Answers but the last are shortened, as by templates that remove earlier reasoning.
_WHOLE = "loop.last or message.role != 'assistant'"
SHORTENING = CHATML.replace("{{ message.content }}", f"{{{{ message.content if {_WHOLE} else message.content[:3] }}}}")


def sentences() -> list[str]:
    return [
        f"Where does the {animal} live? The {animal} lives in the {place}." for animal in ANIMALS for place in PLACES
    ]


def chats(count: int, turns: int = 2) -> list[dict[str, Any]]:
    """Conversations of one to `turns` questions; every third begins with a message of the system."""
    rows = []
    for number in range(count):
        messages = [{"role": "system", "content": "Be brief."}] if number % 3 == 0 else []
        for turn in range(1 + number % turns):
            animal, place = ANIMALS[(number + turn) % 8], PLACES[(number // 8 + number) % 8]
            messages += [
                {"role": "user", "content": f"Where does the {animal} live?"},
                {"role": "assistant", "content": f"In the {place}." if number % 2 else "By day it sleeps in a hole."},
            ]
        rows.append({"messages": messages})
    return rows


def pairs(count: int) -> list[dict[str, Any]]:
    """Sources and targets in the form of the Hub's translations, of different lengths."""
    rows = []
    for number in range(count):
        animal, place = ANIMALS[number % 8], PLACES[(number // 8 + number) % 8]
        before = "And now to something else. " * (number % 3)
        rows.append({"translation": {"en": f"{before}The {animal} lives in the {place}.", "de": f"{animal}: {place}"}})
    return rows


def preferences(count: int) -> list[dict[str, Any]]:
    """A prompt and two answers of different lengths, as texts."""
    return [
        {
            "prompt": f"{'Please. ' * (number % 3)}Where does the {ANIMALS[number % 8]} live?",
            "chosen": f" In the {PLACES[(number // 8 + number) % 8]}.",
            "rejected": f" By day it sleeps in a hole{', it does' * (number % 4)}.",
        }
        for number in range(count)
    ]


def preferred_chats(count: int) -> list[dict[str, Any]]:
    """The same as conversations, each with the whole of both."""
    rows = []
    for row in preferences(count):
        before = [{"role": "user", "content": row["prompt"]}]
        rows.append(
            {name: [*before, {"role": "assistant", "content": row[name].strip()}] for name in ("chosen", "rejected")}
        )
    return rows


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat_tokenizer(template: str | None = CHATML, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level; it begins every text with <s>, which templates of such tokenizers also write."""
    tokenizer = trained_tokenizer("gpt2", 400, sentences())
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": special[1:]})
    if adds_bos:
        ids = [("<s>", tokenizer.bos_token_id)]
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=ids)
    tokenizer.chat_template = template
    return tokenizer


def save_llama(folder: Path, template: str | None = CHATML, dropout: float = 0.0, positions: int = 256) -> Path:
    tokenizer = chat_tokenizer(template)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        attention_dropout=dropout,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def pair_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, with a separate pad token; every text ends with </s>."""
    tokenizer = trained_tokenizer("gpt2", 400, sentences())
    tokenizer.add_special_tokens({"pad_token": "<pad>", "eos_token": "</s>"})
    ids = [("</s>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=ids)
    return tokenizer


def save_t5(folder: Path, dropout: float = 0.0) -> Path:
    tokenizer = pair_tokenizer()
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        dropout_rate=dropout,
        initializer_factor=2.0,
        **_ids(tokenizer),
    )
    T5ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_bart(folder: Path, dropout: float = 0.0, layerdrop: float = 0.0) -> Path:
    tokenizer = pair_tokenizer()
    torch.manual_seed(0)
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in _BART.items()}
    config = BartConfig(
        vocab_size=len(tokenizer),
        d_model=16,
        max_position_embeddings=128,
        dropout=dropout,
        encoder_layerdrop=layerdrop,
        init_std=0.2,
        forced_eos_token_id=None,
        **sizes,
        **_ids(tokenizer),
    )
    BartForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


_BART = {"layers": 1, "attention_heads": 2, "ffn_dim": 24}


def _ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return {**ids, "decoder_start_token_id": tokenizer.pad_token_id}

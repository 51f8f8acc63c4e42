"""Chats and instructions: a causal language model learns the assistant's part of conversations."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from recipes.tasks.generation import TextGeneration, texts_file
from recipes.tasks.language_model import checked_causal, next_labels, next_token_logits
from recipes.tasks.splits import DataSource, Splits
from recipes.tasks.transformer_recipe import Tokenised, text_batch, truncation
from runner.data.cache import Cache, Progress
from runner.data.layout import padded
from runner.data.recipe import IGNORED_LABEL, Batch, DataFacts, Prepared
from runner.errors import UserError, first_line, require

#: The role whose messages are learned.
ASSISTANT = "assistant"

#: `train_on` -> what a target is.
_TRAIN_ON = {"completions": "the assistant's tokens", "all": "every token but the first"}

#: Around the assistant's part in some chat templates, for transformers' `return_assistant_tokens_mask`.
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

#: Conversations between two reports of progress.
_CHUNK = 1000


@dataclass(frozen=True)
class Chats:
    """`rows`: each {"messages": [{"role": …, "content": …}, …]} or {"prompt": …, "completion": …}.

    `where`: what precedes a row's number in messages; `numbers`: these, by default from 1. `answered`: whether every
    row has something to learn; prompts need no completion. `notes`: on how they were read, in sentences.
    """

    rows: Collection[Mapping[str, Any]]
    where: str = "row"
    numbers: Sequence[int] = ()
    answered: bool = True
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def texts(self) -> list[str]:
        """All texts, for a tokenizer that is trained on them."""
        return [
            text
            for row in self.rows
            for text in (
                [message.get("content") or "" for message in row["messages"]]
                if "messages" in row
                else [row["prompt"], row.get("completion") or ""]
            )
        ]

    def samples(self) -> Iterator[str]:
        """Each row as JSON, which is the same in every file that has it."""
        for row in self.rows:
            content = [_present(message) for message in row["messages"]] if "messages" in row else row
            yield json.dumps(content, sort_keys=True)


@dataclass(frozen=True)
class Conversations(Splits[Chats]):
    def content(self) -> Iterable[bytes]:
        for part in (self.train, self.eval):
            yield b"%d rows;" % len(part)
            for sample in part.samples():
                yield sample.encode() + b"\n"

    def train_texts(self) -> Sequence[str]:
        return self.train.texts()


def _present(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without fields that only others have: in a table every message has all fields."""
    return {name: value for name, value in message.items() if value is not None}


@dataclass(frozen=True)
class Chat(TextGeneration[Conversations]):
    """The assistant's tokens are predicted from those before them.

    `max_length`: tokens of the longest row; longer conversations are truncated at the end. `train_on`: `completions`
    learns what the assistant says and where it ends, `all` every token. `chat_template`: a file with a template in
    Jinja, in place of the tokenizer's.
    """

    task: ClassVar[str] = "chat"
    head: ClassVar[str] = "CausalLM"
    least_tokens: ClassVar[int] = 2

    data: DataSource[Conversations]
    max_length: int = 1024
    train_on: str = "completions"
    chat_template: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = self.train_on in _TRAIN_ON
        require(ok, "recipe.train_on", self.train_on, f"use one of {', '.join(_TRAIN_ON)}")

    def facts(self, cache: Cache) -> DataFacts:
        conversations = self.data.read()
        digest = conversations.digest
        prepared = self.tokenised(cache, conversations, digest)
        rows = len(prepared.train), len(prepared.eval)
        notes = (*conversations.notes, *prepared.properties["notes"])
        return DataFacts(*rows, digest, conversations.source, notes=notes)

    def check_model(self) -> None:
        super().check_model()
        limit = self.model.longest_input()
        if self.generate and limit is not None:
            rule = f"the model has {limit} positions for a prompt and what follows; lower one of the two"
            ok = self.max_length + self.max_new_tokens <= limit
            require(
                ok, "recipe.max_new_tokens", self.max_new_tokens, f"with recipe.max_length={self.max_length} {rule}"
            )

    def tokenised_by(self) -> dict[str, Any]:
        template = own_template(self.chat_template)
        return {"max_length": self.max_length, "train_on": self.train_on, "chat_template": template}

    def tokenise(self, splits: Conversations, tokenizer: Any, progress: Progress) -> Tokenised:
        if (template := own_template(self.chat_template)) is not None:
            tokenizer.chat_template = template
        writer = ChatTokenizer(tokenizer, self.train_on)
        train = self._columns(writer, splits.train, "training", progress)
        evaluation = self._columns(writer, splits.eval, "evaluation", progress)
        lost = [(train.truncated, len(splits.train)), (evaluation.truncated, len(splits.eval))]
        properties = {
            "truncated": truncation("conversations", "recipe.max_length", self.max_length, *lost),
            "notes": [*train.notes, *evaluation.notes],
            "ends": writer.ends,
        }
        return Tokenised(train.columns, evaluation.columns, properties, texts_file(evaluation.texts))

    def _columns(self, writer: ChatTokenizer, chats: Chats, kind: str, progress: Progress) -> _Columns:
        evaluated = kind == "evaluation"  # every row is predicted for, and its reply generated
        names = ["input_ids", "labels", "length", "label_count", *(["prompt_ids"] if evaluated else [])]
        columns: dict[str, list[Any]] = {name: [] for name in names}
        texts, truncated, lost, ends = list[tuple[str, str | None]](), 0, 0, False
        for row in writer.rows(chats, progress):
            ids = row.ids[: self.max_length]
            labels = np.where(row.is_target, row.ids, IGNORED_LABEL)[: self.max_length]
            count = int((labels[1:] != IGNORED_LABEL).sum())  # there is no token before the first
            truncated += len(row.ids) > len(ids)
            lost += not count
            ends = ends or not writer.special.isdisjoint(labels.tolist())
            if count or evaluated:
                if evaluated:
                    texts.append(row.texts)
                values = [ids, labels, len(ids), count, *([row.prompt[-self.max_length :]] if evaluated else [])]
                for name, value in zip(names, values, strict=True):
                    columns[name].append(value)
        notes = []
        limit = f"recipe.max_length={self.max_length}"
        if lost and chats.answered:
            if lost == len(chats):
                raise UserError(f"{limit} is invalid: no {kind} conversation has a token to learn within it; use more")
            fate = "have no loss" if evaluated else "are left out"
            what = f"{lost:,} of {len(chats):,} {kind} conversations"
            notes.append(f"{what} have no token to learn within {limit} tokens, and {fate}")
        if columns["length"] and chats.answered and not ends:
            notes.append(f"no {kind} conversation has a special token to learn: the model may not learn where to stop")
        return _Columns(columns, texts, truncated, notes)

    def build_model(self, prepared: Prepared) -> nn.Module:
        model = checked_causal(self.built(prepared))
        settings: Any = model.generation_config
        own = settings.eos_token_id
        # Saved with the model, so that its replies also end there in transformers.
        ends = {*(own if isinstance(own, list) else [own]), *prepared.properties["ends"]} - {None}
        settings.eos_token_id = sorted(ends) or None
        return self.unpad(model, prepared)

    def collate(self, rows: Mapping[str, Sequence[Any]], prepared: Prepared, length: int | None = None) -> Batch:
        pad_id = prepared.properties["pad_id"]
        labels = padded(rows["labels"], IGNORED_LABEL, length)
        labels[:, 0] = IGNORED_LABEL  # there is no token before it
        batch = {**text_batch(rows, pad_id, length), "labels": labels}
        if self.generate and "prompt_ids" in rows:
            # Padded on the left: what is generated follows the last token. Reversed, it is padded on the right.
            reverse = {"input_ids": [row[::-1] for row in rows["prompt_ids"]]}
            prompts = text_batch(reverse, pad_id, self.max_length if prepared.compiles else None)
            batch |= {f"prompt_{name}": tensor.flip(1) for name, tensor in prompts.items()}
        return batch

    def scored(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return next_token_logits(model, batch), next_labels(batch)

    def generation_inputs(self, batch: Batch) -> dict[str, Tensor]:
        return {name: batch[f"prompt_{name}"] for name in ("input_ids", "attention_mask")}


@dataclass(frozen=True)
class _Columns:
    """One table with the texts of its rows; how many conversations were truncated; what else may surprise."""

    columns: dict[str, list[Any]]
    texts: list[tuple[str, str | None]]
    truncated: int
    notes: list[str]


@dataclass(frozen=True)
class ChatTokens:
    """A conversation, [tokens]; which of them are targets; the tokens before its last reply, to be generated from.

    `texts`: the last message before that reply, and the reply, if it has one.
    """

    ids: np.ndarray
    is_target: np.ndarray
    prompt: np.ndarray
    texts: tuple[str, str | None]


class ChatTokenizer:
    """Turns conversations into tokens. Raises UserError."""

    def __init__(self, tokenizer: Any, train_on: str) -> None:
        self._tokenizer, self._train_on = tokenizer, train_on
        #: Numbers of special tokens, and of tokens such as <|im_end|> that were added without being special.
        self.special = frozenset({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder})
        self._ends: list[int] | None = None

    @property
    def ends(self) -> list[int]:
        """The token that ends the assistant's turns, if there is one and a row has been written."""
        return self._ends or []

    def rows(self, chats: Chats, progress: Progress) -> Iterator[ChatTokens]:
        """The tokens of each row, in order."""
        numbers = chats.numbers or range(1, len(chats) + 1)
        for done, (number, row) in enumerate(zip(numbers, chats.rows, strict=True)):
            if done % _CHUNK == 0:
                progress(done, len(chats))
            try:
                if "messages" in row:
                    yield self._conversation(row["messages"], chats.answered)
                else:
                    yield self._completion(row["prompt"], row.get("completion"))
            except _Refused as error:
                raise UserError(f"{chats.where} {number} {error}") from error
        progress(len(chats), len(chats))

    def _conversation(self, given: Sequence[Mapping[str, Any]], answered: bool) -> ChatTokens:
        template = self._template()
        messages = [_present(message) for message in given]
        turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        has_reply = bool(turns) and (answered or turns[-1] == len(messages) - 1)
        before = messages[: turns[-1]] if has_reply else messages
        prompt = self._ids(before, add_generation_prompt=True)
        if self._ends is None:
            replied = self._ids([*before, {"role": ASSISTANT, "content": "x"}])
            self._ends = [token for token in replied[len(prompt) :] if token in self.special][-1:]
        ids, is_target = self._targets(messages, turns, template)
        texts = (before[-1].get("content", ""), messages[turns[-1]].get("content", "") if has_reply else None)
        return ChatTokens(np.asarray(ids, dtype=np.int32), is_target, np.asarray(prompt, dtype=np.int32), texts)

    def _targets(
        self, messages: list[dict[str, Any]], turns: Sequence[int], template: str
    ) -> tuple[list[int], np.ndarray]:
        """The tokens of a conversation, and which of them are targets."""
        if self._train_on == "all":
            ids = self._ids(messages)
            return ids, np.ones(len(ids), dtype=bool)
        if _MARK.search(template):
            return self._marked(messages, template)
        ids = self._ids(messages)
        is_target = np.zeros(len(ids), dtype=bool)
        for turn in turns:
            start = self._ids(messages[:turn], add_generation_prompt=True)
            end = self._ids(messages[: turn + 1]) if turn + 1 < len(messages) else ids
            if ids[: len(start)] != start or ids[: len(end)] != end:
                raise _Refused(
                    f"cannot be split into turns, since the chat template writes the messages up to {turn + 1} "
                    "differently if others follow, or without their answer: use a template that marks the assistant's "
                    "part by {% generation %} (recipe.chat_template=FILE), or recipe.train_on=all"
                )
            # Not what the template writes after the end of the turn, such as a line end, which no model generates.
            after = next((place for place in range(len(end), len(start), -1) if ids[place - 1] in self.ends), len(end))
            is_target[len(start) : after] = True
        return ids, is_target

    def _marked(self, messages: list[dict[str, Any]], template: str) -> tuple[list[int], np.ndarray]:
        """The same where the template marks the assistant's part."""
        from transformers.utils.chat_template_utils import render_jinja_template

        if not self._tokenizer.is_fast:
            raise UserError("recipe.model has a slow tokenizer, without character offsets: give it a tokenizer.json")
        with _rendering():
            (text,), (spans,) = render_jinja_template(
                [messages],
                chat_template=template,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        first, last = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        is_target = np.zeros(len(first), dtype=bool)
        for start, end in spans:
            is_target |= (first < end) & (start < last) & (first < last)
        return encoded["input_ids"], is_target

    def _template(self) -> str:
        if self._tokenizer.chat_template is None:
            raise UserError(
                "the tokenizer of recipe.model has no chat template: set recipe.chat_template=FILE (one is in "
                "docs/data.md), or give rows with the columns prompt and completion"
            )
        try:
            template: str = self._tokenizer.get_chat_template()
        except ValueError as error:
            raise UserError(f"recipe.model has no usable chat template ({first_line(error)})") from error
        return template

    def _ids(self, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> list[int]:
        with _rendering():
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        return self._tokens(text)

    def _tokens(self, text: str, add_special_tokens: bool = False) -> list[int]:
        # verbose would warn of texts longer than the model's positions, but they are truncated later. Templates write
        # the special tokens that a tokenizer would add.
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        ids: list[int] = encoded["input_ids"]
        return ids

    def _completion(self, prompt: str, completion: str | None) -> ChatTokens:
        end = self._tokenizer.eos_token_id
        if end is None:
            raise UserError(
                "recipe.model has a tokenizer without an end-of-text token, which has to end completions: set "
                "eos_token in its tokenizer_config.json"
            )
        self._ends = [end]

        def begun(text: str) -> list[int]:
            """Tokenise with the special tokens at the start of a text, but not those that would end it."""
            ids = self._tokens(text, add_special_tokens=True)
            return ids[:-1] if ids[-1:] == [end] else ids

        # The prompt has the tokens that it has by itself, as when the model is used.
        start = begun(prompt)
        ids = start
        if completion is not None:
            whole = begun(prompt + completion)
            ids = [*(whole if whole[: len(start)] == start else [*start, *self._tokens(completion)]), end]
        is_target = (np.arange(len(ids)) >= len(start)) | (self._train_on == "all")
        return ChatTokens(
            np.asarray(ids, dtype=np.int32), is_target, np.asarray(start, dtype=np.int32), (prompt, completion)
        )


def own_template(file: str | None) -> str | None:
    """The chat template in the file that `recipe.chat_template` names; None without one. Raises UserError."""
    if file is None:
        return None
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"it cannot be read ({first_line(error)}); give a file with a chat template in Jinja"
        raise UserError(f"recipe.chat_template={file} is invalid: {rule}") from error


class _Refused(Exception):
    """What is wrong with a row, to follow its number."""


@contextlib.contextmanager
def _rendering() -> Iterator[None]:
    import jinja2

    try:
        yield
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise _Refused(f"does not fit the chat template: {first_line(error)}") from error

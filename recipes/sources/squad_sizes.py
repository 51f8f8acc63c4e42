"""How many windows questions come to, where no tokenizer is here to cut them. Estimates."""

from __future__ import annotations

import math
import re
from statistics import NormalDist

from recipes.sources.squad_files import Paragraphs
from recipes.tasks.windows import WindowSizes

#: Logarithm of the tokens in the paragraph of a question of SQuAD 1.1, under BERT's uncased vocabulary. The middle is
#: that of its first 4,370 questions; the width makes the 88,524 windows at 384/128 that all 87,599 are known to make.
_PARAGRAPHS = NormalDist(math.log(147), 0.4)

#: Points at which it is looked at, each standing for as many questions.
_POINTS = 2000

#: Tokens of a question, and special tokens of a window: the middle ones, under the same vocabulary.
_QUESTION, _SPECIAL = 12, 3

#: Tokens of that vocabulary for each word or sign of punctuation, on the average.
_TOKENS_PER_WORD = 1.09

_WORD = re.compile(r"\w+|[^\w\s]")


def windows_per_question(sizes: WindowSizes) -> float:
    """For data such as SQuAD's."""
    tokens = (math.exp(_PARAGRAPHS.inv_cdf((point + 0.5) / _POINTS)) for point in range(_POINTS))
    return sum(_windows(round(paragraph), _QUESTION, sizes) for paragraph in tokens) / _POINTS


def windows_of(part: Paragraphs, sizes: WindowSizes) -> int:
    """For texts that are here, from the number of their words."""
    contexts = [_tokens(context) for context in part.contexts]
    return sum(_windows(contexts[one.context], _tokens(one.text), sizes) for one in part.questions)


def _tokens(text: str) -> int:
    return round(_TOKENS_PER_WORD * len(_WORD.findall(text)))


def _windows(paragraph: int, question: int, sizes: WindowSizes) -> int:
    room = sizes.max_length - min(question, sizes.max_query_length) - _SPECIAL
    return 1 + max(0, math.ceil((paragraph - room) / (room - sizes.doc_stride)))

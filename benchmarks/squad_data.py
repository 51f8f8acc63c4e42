"""Time until SQuAD's questions are ready: tokenised for the first time, and found in the cache.

Each measurement is a new process, imports included, like the preflight of a run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time

_FACTS = """
import sys
from recipes.models.pretrained import Pretrained
from recipes.tasks.question_answering import QuestionAnswering
from recipes.sources.squad_files import SquadData
from runner.data.cache import Cache
train, evaluation, model, cache = sys.argv[1:]
facts = QuestionAnswering(SquadData(train, evaluation), Pretrained(model)).facts(Cache(cache))
print(f"{facts.train_samples} windows of {facts.train_groups} questions, {facts.eval_samples} of {facts.eval_groups}")
"""


def measured(*arguments: str) -> tuple[float, str]:
    """Seconds of a process that reads the facts, and its output."""
    start = time.perf_counter()
    said = subprocess.run([sys.executable, "-c", _FACTS, *arguments], capture_output=True, text=True, check=True)
    return time.perf_counter() - start, said.stdout.strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", required=True)
    parser.add_argument("--eval", required=True)
    parser.add_argument("--model", required=True, help="a folder with a tokenizer")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    for _ in range(options.repetitions):
        with tempfile.TemporaryDirectory() as cache:
            cold, said = measured(options.train, options.eval, options.model, cache)
            warm, again = measured(options.train, options.eval, options.model, cache)
        assert said == again
        print(f"cold {cold:.2f} s, warm {warm:.2f} s: {said}")

"""Tokenised rows: the runner's tables against `Dataset.map` and its memory-mapped Arrow files.

Usage: python -m benchmarks.tokenised_rows TOKENIZER FILE.tsv … (texts in the last column; a file is one corpus).

Three questions for each corpus: how long does it take to tokenise and write it, to open it again in a new run, and to
fetch a batch of 32 rows in a random order. Both ways take turns; all processes have ended when a turn does.
"""

from __future__ import annotations

import csv
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, disable_progress_bars
from transformers import AutoTokenizer

from benchmarks.side_by_side import spread
from runner.data.cache import Cache
from runner.data.table import Table, write_table

ROUNDS, BATCH, FETCHED = 5, 32, 1_000
_CHUNK = 10_000


def texts_of(file: str) -> list[str]:
    with Path(file).open(encoding="utf-8", newline="") as lines:
        return [row[-1] for row in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)]


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def as_table(tokenizer: Any, texts: list[str], cache: Path) -> Path:
    def build(folder: Path) -> None:
        rows: list[Any] = []
        for start in range(0, len(texts), _CHUNK):
            encoded = tokenizer(texts[start : start + _CHUNK], truncation=True, max_length=128)
            rows += [np.asarray(row, dtype=np.int32) for row in encoded["input_ids"]]
        write_table(folder / "train", {"input_ids": rows, "length": [len(row) for row in rows]})

    return Cache(cache).get({"texts": len(texts)}, build)


def as_dataset(tokenizer: Any, texts: list[str], cache: Path, processes: int) -> Dataset:
    def tokenize(rows: dict[str, list[str]]) -> dict[str, Any]:
        encoded = tokenizer(rows["text"], truncation=True, max_length=128, return_attention_mask=False)
        ids = encoded["input_ids"]
        return {"input_ids": ids, "length": [len(row) for row in ids]}

    source = Dataset.from_dict({"text": texts})
    file = str(cache / "train.arrow")
    return source.map(
        tokenize,
        batched=True,
        batch_size=_CHUNK,
        remove_columns=["text"],
        num_proc=processes if processes > 1 else None,
        cache_file_name=file,
        new_fingerprint=f"rows{len(texts)}x{processes}",
    )


def measure(tokenizer: Any, texts: list[str]) -> dict[str, dict[str, float]]:
    order = np.random.default_rng(0).permutation(len(texts))
    batches = [order[(i * BATCH) % (len(order) - BATCH) :][:BATCH] for i in range(FETCHED)]
    found: dict[str, dict[str, float]] = {}
    root = Path(tempfile.mkdtemp())
    for name, processes in (("table", 0), ("map", 1), ("map, 2 processes", 2)):
        cache = root / name
        cache.mkdir()
        if processes == 0:
            write, entry = seconds(lambda cache=cache: as_table(tokenizer, texts, cache))
            open_again, _ = seconds(lambda cache=cache: Table(as_table(tokenizer, texts, cache) / "train"))
            table: Any = Table(entry / "train")
        else:
            write, _ = seconds(lambda cache=cache, n=processes: as_dataset(tokenizer, texts, cache, n))
            open_again, rows = seconds(lambda cache=cache, n=processes: as_dataset(tokenizer, texts, cache, n))
            table = rows.with_format("numpy")
        fetch, _ = seconds(lambda table=table: [table[rows] for rows in batches])
        found[name] = {"write, s": write, "open again, s": open_again, "fetch, ms a batch": 1000 * fetch / FETCHED}
    shutil.rmtree(root)
    return found


def main(name: str, files: list[str]) -> None:
    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer(["warm up"] * 1000)
    for file in files:
        texts = texts_of(file)
        rounds = [measure(tokenizer, texts) for _ in range(ROUNDS)]
        print(f"\n{len(texts):,} texts; median (range) of {ROUNDS}\n")
        columns = list(rounds[0]["table"])
        print(f"| | {' | '.join(columns)} |\n|{' --- |' * (1 + len(columns))}")
        for way in rounds[0]:
            print(f"| {way} | {' | '.join(spread([one[way][column] for one in rounds]) for column in columns)} |")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

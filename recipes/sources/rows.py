"""Rows of local files and of data sets on the Hugging Face Hub, read by `datasets`."""

from __future__ import annotations

import contextlib
import csv
import glob
import json
import os
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.sources.hub import go_offline_if_unreachable
from runner.errors import Unavailable, UserError, did_you_mean, first_line

if TYPE_CHECKING:
    from datasets import Dataset

NO_DATA = "there is no training data: set recipe.data.train=… and recipe.data.eval=… to local files"

#: Suffix of a file -> its reader in `datasets`. Files with another suffix are tab-separated tables.
_READERS = {
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
#: Files that would otherwise be taken for tab-separated text.
_UNREAD = (".feather", ".gz", ".ods", ".xls", ".xlsx", ".zip")

#: What may separate the columns of a .csv, the usual one first.
SEPARATORS = ",;\t|"

#: What pandas says of a line with more columns than the first.
_TOO_WIDE = re.compile(r"Expected (\d+) fields in line (\d+), saw (\d+)")

#: Rows that are read at once.
_CHUNK = 10_000


@dataclass(frozen=True)
class Rows:
    """`setting`: where they came from, as the user's `name=value`, with the split if there is one.

    `lines`: of the file, for each row, if they are known.
    """

    dataset: Dataset
    setting: str
    lines: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return list(self.dataset.column_names)

    @property
    def where(self) -> str:
        """What precedes a row's number in messages."""
        return f"{self.setting}: {'row' if self.lines is None else 'line'}"

    @property
    def numbers(self) -> Sequence[int]:
        """The line of each row, or its number from 1."""
        return range(1, len(self) + 1) if self.lines is None else self.lines


def is_table(name: str) -> bool:
    """Whether a file of this name is read as a comma- or tab-separated table, which may have no header."""
    return not os.path.isdir(os.path.expanduser(name)) and _READERS.get(Path(name).suffix.lower(), "csv") == "csv"


def has_columns(name: str) -> bool:
    """Whether a file of this name has rows of named columns rather than plain text."""
    return os.path.isdir(os.path.expanduser(name)) or Path(name).suffix.lower() in (*_READERS, ".tsv")


def read_texts(name: str, setting: str) -> Iterator[str]:
    """The content of a UTF-8 file, or of all files that a pattern matches. `setting` as of `file_rows`."""
    if os.path.isdir(os.path.expanduser(name)):
        raise UserError(f"{setting} is a folder: give a file")
    for file in _files(name, setting):
        with reading(setting if file == os.path.expanduser(name) else f"{setting} ({file})", "text"):
            yield Path(file).read_text(encoding="utf-8-sig")


def file_rows(name: str, setting: str, header: bool = True) -> Rows:
    """The rows of a file, of all that a pattern such as `part-*.parquet` matches, or of a folder by `save_to_disk`.

    The suffix tells the format: `.csv` has quotes as in RFC 4180, and commas, or semicolons, tabs or bars if its header
    has those and no comma; `.json` is a list of objects, `.jsonl` an object per line; `.parquet`, `.arrow`; any other
    file has tabs, and quotes are ordinary characters. `header`: the first line of a table names its columns, which are
    otherwise "0", "1", …; its cells are text without spaces around it, and blank lines are left out. `setting`: the
    user's `name=value`. Raises UserError.
    """
    from datasets import concatenate_datasets

    if os.path.isdir(os.path.expanduser(name)):
        return Rows(_saved(Path(name).expanduser(), setting), setting)
    suffix, files = Path(name).suffix.lower(), _files(name, setting)
    if suffix in _UNREAD:
        raise UserError(f"{setting} is a {suffix} file, which is not read: convert it to .csv, .jsonl or .parquet")
    reader = _READERS.get(suffix, "csv")
    with reading(setting, suffix if suffix in _READERS else "tab-separated"):
        if reader == "json":
            return Rows(_json(files, setting), setting)
        if reader != "csv":
            return Rows(_read(reader, files), setting)
        tables = [_table(file, setting, suffix == ".csv", header) for file in files]
        return tables[0] if len(tables) == 1 else Rows(concatenate_datasets([one.dataset for one in tables]), setting)


def is_saved(name: str) -> bool:
    """Whether a folder was written by `save_to_disk`."""
    folder = Path(name).expanduser()
    return any((folder / file).is_file() for file in ("state.json", "dataset_dict.json"))


def streamed_rows(name: str, setting: str) -> Rows:
    """As `file_rows`, of a folder by `save_to_disk`, or of `.parquet` or `.arrow` files, whatever their size.

    Rows are read whenever they are iterated over, within `reading`; their number is not known. Raises UserError.
    """
    suffix = Path(name).suffix.lower()
    if os.path.isdir(os.path.expanduser(name)):
        return Rows(_saved(Path(name).expanduser(), setting), setting)
    files = _files(name, setting)
    if suffix not in (".parquet", ".arrow"):
        raise UserError(f"{setting} is neither a folder nor a .parquet or .arrow file: give one of these")
    with reading(setting, suffix):
        return Rows(_streamed(_READERS[suffix], files), setting)


def hub_rows(name: str, config: str | None, split: str, revision: str | None = None) -> Rows:
    """One split of a data set, or a part such as `train[:10%]`; `name` may be a folder that `load_dataset` reads.

    Raises Unavailable if it cannot be loaded here, UserError for a split that it does not have.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    go_offline_if_unreachable()
    _lock_threads_only()
    setting, folder = f"recipe.data.hub_name={name}", os.path.expanduser(name)
    try:
        return Rows(load_dataset(folder, config, split=split, revision=revision), f"{setting} (split '{split}')")
    except ValueError as error:
        if "split" in str(error).lower():
            raise UserError(f"{setting} has no split '{split}' ({first_line(error)})") from error
        raise Unavailable(f"{NO_DATA}, or go online to download '{name}' ({first_line(error)})") from error
    except (ConnectionError, DatasetsError, OSError) as error:
        raise Unavailable(f"{NO_DATA}, or go online to download '{name}' ({first_line(error)})") from error
    except RuntimeError as error:  # a loading script, which datasets no longer runs
        raise UserError(f"{setting} cannot be loaded: {first_line(error)}") from error


def check_columns(rows: Rows, columns: Sequence[str]) -> None:
    """Raises UserError for the first of these columns that is missing."""
    for column in columns:
        if column not in rows.names:
            raise UserError(f"{rows.setting} has no column '{column}'{did_you_mean(column, rows.names)}")


def _files(name: str, setting: str) -> list[str]:
    """The file, or those that the pattern matches, in the order of their names."""
    path = os.path.expanduser(name)
    if os.path.exists(path):
        return [path]
    found = sorted(filter(os.path.isfile, glob.glob(path, recursive=True))) if glob.has_magic(name) else []
    if not found:
        wrong = "matches no file" if glob.has_magic(name) else "does not exist"
        raise UserError(f"{setting} {wrong} (looked in {os.path.dirname(os.path.abspath(path))}): check the path")
    return found


def _saved(folder: Path, setting: str) -> Dataset:
    from datasets import DatasetDict, load_from_disk

    with reading(setting, "saved"):
        try:
            found = load_from_disk(str(folder))
        except FileNotFoundError as error:
            rule = "give a file, or a folder written by save_to_disk"
            raise UserError(f"{setting} is a folder without a saved data set: {rule}") from error
    if isinstance(found, DatasetDict):
        folders = " or ".join(str(folder / split) for split in found)
        raise UserError(f"{setting} is a folder with several splits: give {folders}")
    return found


def _read(reader: str, files: Sequence[str], **options: Any) -> Dataset:
    """All rows, in memory."""
    import pyarrow
    from datasets import Dataset

    tables = list(_streamed(reader, files, **options).with_format("arrow").iter(_CHUNK))
    return Dataset(pyarrow.concat_tables(tables)) if tables else Dataset.from_dict({})


def _streamed(reader: str, files: Sequence[str], **options: Any) -> Any:
    """An IterableDataset. It reads the files themselves, not a copy of them in a cache, which may be old."""
    from datasets import load_dataset

    _lock_threads_only()
    names = {"train": [glob.escape(file) for file in files]}
    return load_dataset(reader, data_files=names, split="train", streaming=True, **options)


def _lock_threads_only() -> None:
    """The lock of progress bars would be a semaphore of several processes, which a killed worker leaves behind."""
    from tqdm import tqdm  # with datasets, which imports it

    tqdm.set_lock(threading.RLock())


def _json(files: Sequence[str], setting: str) -> Dataset:
    try:
        return _read("json", files)
    except Exception:
        for file in files:  # the reader's message has no line
            _check_lines(file, setting)
        raise


def _check_lines(file: str, setting: str) -> None:
    """Raises UserError for the first line of a JSON Lines file that is not an object."""
    if not file.lower().endswith(".json"):
        for number, line in enumerate(Path(file).read_text(encoding="utf-8-sig").split("\n"), 1):
            try:
                found = json.loads(line) if line.strip() else {}
            except json.JSONDecodeError as error:
                wrong = f"line {number} is not JSON ({error.msg} at character {error.colno})"
                raise UserError(f"{setting}: {wrong}: fix that line") from error
            if not isinstance(found, dict):
                raise UserError(f"{setting}: line {number} is not a JSON object: give one with a field for each column")


def _table(file: str, setting: str, quoted: bool, header: bool) -> Rows:
    import pandas
    from datasets import Dataset

    # Without quotes only \n ends a line: texts may contain other line separators.
    separator = _separator(file) if quoted and header else ","  # without a header, the first line may be a text
    form: dict[str, Any] = (
        {"sep": separator} if quoted else {"sep": "\t", "quoting": csv.QUOTE_NONE, "lineterminator": "\n"}
    )
    form |= {"header": None, "na_filter": False, "encoding": "utf-8-sig"}
    try:
        width = pandas.read_csv(file, **form, nrows=1, dtype=str).shape[1]
    except pandas.errors.EmptyDataError as error:
        raise UserError(f"{setting} is empty: give a file with rows") from error
    names = [str(column) for column in range(width)]
    try:
        cells = pandas.read_csv(file, **form, names=names, dtype=str, skip_blank_lines=False)
    except pandas.errors.ParserError as error:
        if (found := _TOO_WIDE.search(str(error))) is None:
            raise
        many = f"line {found[2]} has {found[3]} columns, and the first line has {found[1]}"
        quote = "put texts that contain the separator in double quotes" if quoted else "texts must not contain tabs"
        raise UserError(f"{setting}: {many}: {quote}") from error
    lines = 1 + cells.apply(lambda column: column.str.count("\n")).sum(axis=1)  # quoted cells may contain line ends
    cells.index = lines.cumsum() - lines + 1
    cells = cells.apply(lambda column: column.str.strip())
    cells = cells[cells.ne("").any(axis=1)]
    if cells.empty:
        raise UserError(f"{setting} is empty: give a file with rows")
    if header:
        names, cells = list(cells.iloc[0]), cells.iloc[1:]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"{setting} has two columns of the name '{twice}': rename one")
        cells.columns = names
    return Rows(Dataset.from_pandas(cells, preserve_index=False), setting, cells.index.tolist())


def _separator(file: str) -> str:
    """What separates the names in the header of a .csv: as spreadsheets write it, not always a comma."""
    with open(file, encoding="utf-8-sig", newline="") as lines:
        line = lines.readline()
    columns = {separator: len(next(csv.reader([line], delimiter=separator))) for separator in SEPARATORS}
    return "," if columns[","] > 1 else max(columns, key=columns.__getitem__)


@contextlib.contextmanager
def reading(setting: str, kind: str) -> Iterator[None]:
    """Turn the errors of reading files into a UserError, and keep `datasets` from printing them, too."""
    from datasets.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of pandas, pyarrow and others
        cause = _cause(error)
        if isinstance(cause, UnicodeDecodeError):
            raise UserError(f"{setting} is not UTF-8 text (byte {cause.start}): convert it to UTF-8") from error
        if isinstance(cause, OSError) and cause.strerror:
            raise UserError(f"{setting} cannot be read ({cause.strerror}): check the file") from error
        raise UserError(f"{setting} cannot be read as {kind} data ({first_line(cause)}): fix the file") from error
    finally:
        logging.set_verbosity(before)


def _cause(error: BaseException) -> BaseException:
    """What pyarrow says, where a fallback failed after it, else the first of the errors."""
    import pyarrow

    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(before)
    return next((one for one in chain if isinstance(one, (pyarrow.ArrowException, UnicodeDecodeError))), chain[-1])

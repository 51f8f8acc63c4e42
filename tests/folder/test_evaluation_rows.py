"""Metrics by evaluation row, in a run's folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from runner.errors import UserError
from runner.folder.evaluation_rows import FILE_NAME, KeptRows, read_rows, write_rows


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_rows(tmp_path) == {}
    write_rows(tmp_path, {"f1": np.array([100.0, 0.1])})
    assert read_rows(tmp_path)["f1"].tolist() == np.array([100.0, 0.1], dtype=np.float32).tolist()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    write_rows(tmp_path, {"f1": np.zeros(2)})
    (tmp_path / FILE_NAME).rename(tmp_path / "elsewhere")
    (tmp_path / FILE_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link"):
        read_rows(tmp_path)


def test_training_goes_on_where_they_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME / "in the way").mkdir(parents=True)
    kept = KeptRows(tmp_path)
    kept.write({"f1": np.zeros(2)})
    assert FILE_NAME in str(kept.warning())

"""What is read from the folders of earlier runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from runner.errors import UserError
from runner.run.earlier import saved_settings

SETTINGS = {
    "tracking": {"uri": "http://user:word@host"},
    "sync": {"k": 4},
    "device": {"file": None},
    "trusted_packages": ["mine"],
}


@pytest.mark.parametrize(("kind", "mlflow"), [("mlflow", True), ("none", False)])
def test_a_run_from_before_there_were_several_trackers(tmp_path: Path, kind: str, mlflow: bool) -> None:
    content = {**SETTINGS, "tracking": {"kind": kind, "uri": "http://user:word@host"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    settings, trusted = saved_settings(tmp_path)
    assert settings["tracking"] == {"mlflow": mlflow, "uri": None}
    assert (settings["trusted_packages"], trusted) == ([], ["mine"])


def test_a_run_from_before_settings_were_removed(tmp_path: Path) -> None:
    """Without a value they are left out; one that was used is refused later, by its name."""
    sync = {"k": 4, "qsr_alpha": None, "rank": None, "drift_target": 0.1}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**SETTINGS, "sync": sync}))
    settings, _ = saved_settings(tmp_path)
    assert settings["sync"] == {"k": 4, "qsr_alpha": None, "drift_target": 0.1}


@pytest.mark.parametrize("content", ["", "a: [", "tracking: none", "- 1"])
def test_a_file_without_settings(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=r"config\.yaml does not hold the settings"):
        saved_settings(tmp_path)

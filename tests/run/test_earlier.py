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


def test_what_a_folder_does_not_decide(tmp_path: Path) -> None:
    """Where the run is sent, and whose code is trusted."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(SETTINGS))
    settings, trusted = saved_settings(tmp_path)
    assert settings["tracking"] == {"uri": None}
    assert (settings["trusted_packages"], trusted) == ([], ["mine"])


def test_a_run_from_before_settings_were_removed(tmp_path: Path) -> None:
    """They are left out if they have no effect; one that was used is refused later, by its name."""
    sync = {"k": 4, "average": "weights", "rank": None, "drift_target": 0.1}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**SETTINGS, "sync": sync}))
    assert saved_settings(tmp_path)[0]["sync"] == {"k": 4, "drift_target": 0.1}


@pytest.mark.parametrize("content", ["", "a: [", "tracking: none", "- 1"])
def test_a_file_without_settings(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=r"config\.yaml does not hold the settings"):
        saved_settings(tmp_path)

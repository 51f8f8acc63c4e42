"""Which overrides the command that continues a run may have, and must have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from runner.config.compose import compose, settings
from runner.config.plain import to_plain
from runner.errors import UserError
from runner.run.resume import prepare_resume
from runner.run.same_experiment import changes_execution
from tests.replicas import TINY


@pytest.mark.parametrize(
    ("override", "needed"),
    [
        ("tracking.uri=http://me:word@host", True),
        ("device.workers=2", True),
        ("+recipe.api_key=word", True),
        ("accumulation.steps=2", False),
        ("accumulation=fit", False),
        ("optimizer.lr=1e-3", False),
        ("+recipe.width=3", False),
    ],
)
def test_overrides_of_workers_that_torchrun_starts_again(override: str, needed: bool) -> None:
    assert changes_execution(override) is needed


def test_a_secret_has_to_be_given_again(tmp_path: Path) -> None:
    """It is not in the run's folder."""
    content = to_plain(settings(compose(TINY)))
    content["recipe"] = {**content["recipe"], "model": {**content["recipe"]["model"], "api_key": "***"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(content))))
    with pytest.raises(UserError, match=r"without the value of recipe\.model\.api_key: add recipe\.model\.api_key="):
        prepare_resume(str(tmp_path), [], [])

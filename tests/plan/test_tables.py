"""The plan and the certificate on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from runner.plan.tables import brief_tables, plan_tables
from tests.configured import prepared


def printed(table: RenderableType) -> list[str]:
    output = io.StringIO()
    Console(file=output, width=80).print(table)
    return output.getvalue().splitlines()


@pytest.mark.parametrize(
    ("overrides", "level", "differs"),
    [
        ("device=cpu", "equivalent", []),
        ("device=cpu2", "comparable", ["dropout", "world size"]),
        ("device=cpu4 sync.k=4 precision=bf16", "comparable", ["sync", "precision", "dropout", "world size"]),
    ],
)
def test_the_brief_plan(overrides: str, level: str, differs: list[str]) -> None:
    """Ten lines on 80 columns, and one for each property that differs; none for those that are equal."""
    experiment = prepared(overrides)
    lines = printed(brief_tables(experiment))
    certificate = next(number for number, line in enumerate(lines) if level in line)
    assert certificate <= 10
    different = [p.name.replace("_", " ") for p in experiment.certificate.properties if not p.equal]
    assert [line[2:].split("  ")[0] for line in lines[certificate + 1 :]] == different
    assert set(differs) <= set(different)
    assert len(printed(plan_tables(experiment))) > certificate

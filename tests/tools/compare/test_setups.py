"""Setups and their names; baselines; blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runner.errors import UserError
from runner.tools.compare.comparison import choose_baseline
from runner.tools.compare.runs import FoundRuns, Run, newest_of_each_seed
from runner.tools.compare.setups import setups_by_block
from runner.tools.compare.text import notices, remarks
from tests.tools.compare.make import BASE, KEY, block, compared, run, runs


def names(*groups: list) -> list[str]:  # type: ignore[type-arg]
    (setups,) = setups_by_block([one for group in groups for one in group]).values()
    return [setup.name for setup in setups]


def test_runs_of_one_digest_are_one_setup() -> None:
    """Seeds in order, whatever the order of the runs; few workers first, accumulation before k."""
    one = runs("cpu", [1.0, 2.0, 3.0])
    others = [run("cpu4 · k=4", 0, 1.0, workers=4, k=4), run("cpu4 · acc=2", 0, 1.0, workers=4, accumulation=2)]
    (setups,) = setups_by_block([*others, *reversed(one)]).values()
    assert [setup.name for setup in setups] == ["cpu", "cpu4 · acc=2", "cpu4 · k=4"]
    assert setups[0].seeds == (0, 1, 2)


def test_equal_names_get_what_was_varied() -> None:
    """Two learning rates under one name: the varied setting is appended, not the others that differ."""
    a = runs("cpu", [1.0], digest="a", varied={"optimizer.lr": "0.1"}, values={"optimizer.lr": "0.1", "x": "1"})
    b = runs("cpu", [1.0], digest="b", varied={"optimizer.lr": "0.2"}, values={"optimizer.lr": "0.2", "x": "2"})
    assert names(a, b) == ["cpu · lr=0.1", "cpu · lr=0.2"]


def test_equal_names_without_a_sweep_get_the_shortest_setting() -> None:
    """The shortest of the settings that differ; a setting is preferred to what the plan derives from it."""
    first = {"batch.global_batch": "48", "plan.lr": "1", "note": "a long text that says little", "same": "1"}
    second = {"batch.global_batch": "96", "plan.lr": "2", "note": "another long text of that kind", "same": "1"}
    assert names(runs("cpu", [1.0], digest="a", values=first), runs("cpu", [1.0], digest="b", values=second)) == [
        "cpu · global_batch=48",
        "cpu · global_batch=96",
    ]


def test_as_many_settings_as_it_takes() -> None:
    """A grid of two settings: both are named, and not one that is the same everywhere."""
    grid = [
        runs("cpu", [1.0], digest=f"{lr}{warm}", varied={"lr": lr, "warm": warm, "device": "cpu"})
        for lr in ("1", "2")
        for warm in ("3", "4")
    ]
    assert set(names(*grid)) == {f"cpu · lr={lr}, warm={warm}" for lr in "12" for warm in "34"}


def test_rehearsed_and_real_are_two_setups() -> None:
    """The same digest and name, on the named device and rehearsed: never in one mean."""
    real, rehearsed = runs("tpu8", [1.0], workers=8), runs("tpu8", [2.0], workers=8, rehearsed=True)
    assert sorted(names(real, rehearsed)) == ["tpu8 · rehearsed=no", "tpu8 · rehearsed=yes"]


def test_the_baseline_is_one_plain_worker() -> None:
    """One worker in fp32 without accumulation, though a bf16 setup comes first by name; no note is needed."""
    groups = [
        runs("cpu", [1.0]),
        runs("bf16", [1.0], precision="bf16"),
        runs("acc", [1.0], accumulation=2),
        runs("cpu4", [1.0], workers=4),
    ]
    (setups,) = setups_by_block([one for group in groups for one in group]).values()
    chosen, note = choose_baseline(setups, None)
    assert (chosen.name, note) == ("cpu", "")


@pytest.mark.parametrize(
    ("groups", "name", "words"),
    [
        ([runs("b2", [1.0], workers=2), runs("a4", [1.0], workers=4)], "b2", "no setup with one worker"),
        ([runs("x", [1.0]), runs("y", [1.0]), runs("z", [1.0], workers=4)], "x", "2 setups with one worker"),
        ([runs("a", [1.0], precision="bf16"), runs("x", [1.0]), runs("y", [1.0])], "x", "2 setups with one worker"),
    ],
)
def test_a_choice_that_is_not_obvious_has_a_note(groups: list, name: str, words: str) -> None:  # type: ignore[type-arg]
    """None or several such setups: the first with the fewest workers."""
    found = block(*groups)
    assert found.baseline.name == name
    assert words in found.baseline_note
    assert words in next(remarks(found))
    assert "--baseline" in next(remarks(found))


def test_a_baseline_by_name() -> None:
    """A block without a setup of this name uses its usual baseline, with a note; a misspelt name is an error."""
    four = runs("four", [1.0, 2.0], workers=4)
    other = [replace(one, block=replace(KEY, samples=2000)) for one in BASE]
    first, second = compared(BASE, four, other, baseline="four").blocks
    assert (first.baseline.name, first.baseline_note) == ("four", "")
    assert second.baseline.name == "one"
    assert "four is not in this block" in second.baseline_note
    with pytest.raises(UserError, match=r"--baseline=fuor .*did you mean 'four'"):
        compared(BASE, four, baseline="fuor")


def test_different_experiments_are_never_compared() -> None:
    """Another recipe, number of samples, metric or data: another block with another title."""
    changes = ({"experiment": "x"}, {"samples": 2}, {"metric": "f1"}, {"data": "aaaaaaaa"})
    others = [[replace(one, block=replace(KEY, **change)) for one in BASE] for change in changes]  # type: ignore[arg-type]
    blocks = compared(BASE, *others).blocks
    assert len(blocks) == 5
    assert len({one.title for one in blocks if one.key.metric == "accuracy"}) == 4
    assert all(len(one.rows) == 1 for one in blocks)


def swept(
    device: str, settings: dict[str, str], metric: float, choices: dict[str, str] | None = None, **more: Any
) -> list[Run]:
    """Two runs of a sweep over the device and `choices`, which are the settings where they are not given."""
    choices = settings if choices is None else choices
    name = " · ".join([device, *(f"{name.rpartition('.')[2]}={value}" for name, value in choices.items())])
    varied = {"device": device, **choices}
    fields = {"workers": int(device[3:] or 1), "digest": f"{device} {settings}", "varied": varied, "values": settings}
    return runs(name, [metric, metric + 1], **{**fields, **more})


def setups_of(*groups: list[Run], **options: Any) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """Names and seeds of the setups, by what the title of their block says of them."""
    return {
        " ".join(one.key.conditions): [(row.setup.name, row.setup.seeds) for row in one.rows]
        for one in compared(*groups, **options).blocks
    }


def test_a_setup_is_compared_with_the_baseline_that_differs_in_the_setup_only() -> None:
    """A sweep of learning rate × seed × device × k: a block for each learning rate, each with its baseline."""
    high, low = {"optimizer.lr": "0.001"}, {"optimizer.lr": "0.0003"}
    groups = [swept("cpu", high, 80), swept("cpu2", high, 80), swept("cpu", low, 60), swept("cpu2", low, 60)]
    blocks = compared(*groups, swept("cpu2", low, 50, k=4, digest="k=4")).blocks
    assert [one.key.conditions for one in blocks] == [("lr=0.0003",), ("lr=0.001",)]
    assert [one.baseline.name for one in blocks] == ["cpu · lr=0.0003", "cpu · lr=0.001"]
    assert [[row.difference.value for row in one.rows if row.difference] for one in blocks] == [[0.0, -10.0], [0.0]]
    alone = block(groups[0], groups[2])  # nothing but the learning rate: which is better?
    assert [row.setup.name for row in alone.rows] == ["cpu · lr=0.0003", "cpu · lr=0.001"]


def test_runs_with_the_same_values_are_in_one_block_however_they_were_started() -> None:
    """Further seeds of one learning rate in a sweep of their own, written in another way or the default."""
    sweep = [swept(device, {"optimizer.lr": lr}, 80) for device in ("cpu", "cpu2") for lr in ("0.01", "0.001")]
    for choices in ({}, {"optimizer.lr": "1e-3"}):
        more = [swept(device, {"optimizer.lr": "0.001"}, 80, choices) for device in ("cpu", "cpu2")]
        more = [[replace(one, seed=one.seed + 2) for one in group] for group in more]
        assert setups_of(*sweep, *more) == {
            "lr=0.001": [("cpu · lr=0.001", (0, 1, 2, 3)), ("cpu2 · lr=0.001", (0, 1, 2, 3))],
            "lr=0.01": [("cpu · lr=0.01", (0, 1)), ("cpu2 · lr=0.01", (0, 1))],
        }


def by_rule(device: str, rule: str, choices: dict[str, str] | None = None) -> list[Run]:
    settings = {"scaling.rule": rule, "scaling.batch": "global_batch"}
    return swept(device, settings, 80, {"scaling": rule} if choices is None else choices)


def test_a_baseline_that_was_run_on_its_own_joins_the_block_with_its_settings() -> None:
    """A sweep of a group is of the settings in it."""
    sweep = [by_rule(device, rule) for device in ("cpu2", "cpu4") for rule in ("none", "linear")]
    assert setups_of(by_rule("cpu", "none", {}), *sweep) == {
        "scaling=linear": [("cpu2 · scaling=linear", (0, 1)), ("cpu4 · scaling=linear", (0, 1))],
        "scaling=none": [("cpu", (0, 1)), ("cpu2 · scaling=none", (0, 1)), ("cpu4 · scaling=none", (0, 1))],
    }
    alone = setups_of(by_rule("cpu", "sqrt", {}), *sweep)
    assert list(alone) == ["rule=linear", "rule=none", "rule=sqrt"]  # nobody chose `scaling` for all of them


def test_a_baseline_that_one_block_has_is_that_of_all() -> None:
    """A setup of one scaling rule by name: which rule is best? One that each block has does not join them."""
    sweep = [by_rule(device, rule) for device in ("cpu", "cpu4") for rule in ("none", "linear")]
    (only,) = compared(*sweep, baseline="cpu · scaling=none").blocks
    assert (only.baseline.name, len(only.rows)) == ("cpu · scaling=none", 4)
    alike = [
        [replace(one, setup=name) for one in group] for name, group in zip(["cpu", "cpu", "b", "b"], sweep, strict=True)
    ]
    assert [one.baseline.name for one in compared(*alike, baseline="cpu").blocks] == ["cpu", "cpu"]


def test_groups_that_only_choose_others_make_no_block() -> None:
    """An experiment of a device and its sync, or a link, which is a fact about the machine."""
    lr = {"optimizer.lr": "0.001"}
    for group in ("experiment", "link", "setup", "hardware"):
        one, four = (swept(device, lr, 80, {group: choice}) for device, choice in (("cpu", "a"), ("cpu4", "b")))
        assert setups_of(one, swept("cpu2", lr, 80, {group: "a"}), four).keys() == {""}


def test_why_nothing_was_compared() -> None:
    """What differs, if every block has one setup; the data by the file's name, or a digest where names are equal."""

    def of_data(path: str, data: str) -> list[Run]:
        return [replace(one, block=replace(KEY, data=data), values={"recipe.data.train": path}) for one in BASE]

    named = compared(of_data("a/x.csv", "aaaaaaaa"), of_data("a/y.csv", "bbbbbbbb"))
    assert [one.title.rpartition(" · ")[2] for one in named.blocks] == ["data x.csv", "data y.csv"]
    assert next(notices(named)).endswith("differ in data.")
    alike = compared(of_data("a/x.csv", "aaaaaaaa"), of_data("b/x.csv", "bbbbbbbb"))
    assert [one.title.rpartition(" · ")[2] for one in alike.blocks] == ["data aaaaaa", "data bbbbbb"]
    assert not [*notices(compared(BASE))]
    assert not [*notices(compared(BASE, runs("four", [1.0], workers=4), of_data("x", "aaaaaaaa")))]


def test_of_a_repeated_run_the_newest_counts() -> None:
    """The newest is compared, the older one is named."""
    older, newer = run("cpu", 0, 1.0, source="a", order="1"), run("cpu", 0, 2.0, source="b", order="2")
    found = newest_of_each_seed(FoundRuns([newer, older]))
    assert [one.source for one in found.runs] == ["b"]
    assert [one.source for one in found.skipped] == ["a"]
    assert "newer run b" in found.skipped[0].reason

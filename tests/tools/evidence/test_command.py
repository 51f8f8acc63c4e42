"""`runner.evidence` on a run of this process: what holds, what a forgery gets wrong, and files that are no bundles."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner import cli
from runner.folder.reading import JSON_LIMIT
from runner.tools.evidence.bundle import make_bundle
from tests.runs import read, run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with `run`, trained by two workers for two epochs."""
    folder = tmp_path_factory.mktemp("evidence")
    before = Path.cwd()
    os.chdir(folder)
    assert run("hydra.run.dir=run", "device=cpu2") == 0
    yield folder
    os.chdir(before)


@pytest.fixture
def trained(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(root)
    return Path("run")


def findings(bundle: Path, *arguments: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit code, and outcome and reason by claim."""
    file = bundle.with_suffix(".json")
    code = cli.run_tool("evidence", ["verify", str(bundle), f"--json={file}", *arguments])
    (found,) = json.loads(file.read_text())["runs"].values()
    return code, {one["claim"]: (one["outcome"], one["why"]) for one in found}


def test_all_that_can_be_verified(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the model; and a second bundle of the run has the same bytes, whatever was written into the model's card."""
    one, two = tmp_path / "one.zip", tmp_path / "two.zip"
    for bundle in (one, two):
        with (trained / "model" / "README.md").open("a") as card:
            card.write("Licence: MIT\n")
        assert cli.run_tool("evidence", [str(trained), "-o", str(bundle), "--with-models"]) == 0
    assert one.read_bytes() == two.read_bytes()
    code, found = findings(one)
    assert code == 0
    claimed = {claim for claim, (outcome, _) in found.items() if outcome == "only claimed"}
    assert claimed == {"environment", "speed"}
    assert {outcome for outcome, _ in found.values()} == {"verified", "only claimed"}
    printed = capsys.readouterr().out
    assert "digest" in printed
    assert not list(Path().glob("run/evaluations"))


def test_without_weights(trained: Path, tmp_path: Path) -> None:
    """They can be given, and what is given is compared with the digests."""
    bundle = tmp_path / "bundle.zip"
    assert cli.run_tool("evidence", [str(trained), "-o", str(bundle)]) == 0
    _, found = findings(bundle)
    assert [found[name][0] for name in ("weights", "result")] == ["only claimed"] * 2
    code, found = findings(bundle, f"--model={trained / 'model'}")
    assert (code, found["weights"][0], found["result"][0]) == (0, "verified", "verified")
    other = tmp_path / "other"
    shutil.copytree(trained / "model", other)
    (other / "config.json").write_text("{}")
    _, found = findings(bundle, f"--model={other}")
    assert found["weights"][0] == "only claimed"


def test_other_data(trained: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.zip"
    assert cli.run_tool("evidence", [str(trained), "-o", str(bundle), "--with-models"]) == 0
    code, found = findings(bundle, "recipe.data.seed=1")
    assert (code, found["data"][0], found["result"][0]) == (3, "different", "only claimed")


def change(name: str, action: Callable[[Any], None]) -> Callable[[Path], None]:
    """Change the content of a JSON file."""

    def apply(folder: Path) -> None:
        content = read(folder, name)
        action(content)
        (folder / name).write_text(json.dumps(content))

    return apply


def replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return apply


def log(key: str, step: int, value: float) -> Callable[[Path], None]:
    """Change a logged value."""

    def apply(folder: Path) -> None:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            if (line["key"], line["step"]) == (key, step):
                line["value"] = value
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    return apply


def drop_step(folder: Path) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(line for line in lines if '"step": 4' not in line))


def better_loss(folder: Path) -> None:
    log("eval/loss", 10, 0.25)(folder)
    change("summary.json", lambda summary: summary["eval"].update(loss=0.25))(folder)


def leave_out_an_epoch(folder: Path) -> None:
    """With all numbers that follow from it, except that the learning rate was logged for all steps."""

    def cut(ledger: Any) -> None:
        (first, _) = ledger["epochs"]
        digest = hashlib.sha256(first["digest"].encode()).hexdigest()
        ledger.update(epochs=[first], digest=digest, samples_seen=first["samples_seen"])

    change("ledger.json", cut)(folder)
    change("summary.json", lambda summary: summary.update(samples_seen=100))(folder)


FORGED: dict[str, tuple[str, Callable[[Path], None]]] = {
    "another learning rate in the plan": ("plan", change("plan.json", lambda plan: plan.update(lr=0.5))),
    "another batch in the settings": ("plan", replace("config.yaml", "global_batch: 24", "global_batch: 48")),
    "another level": ("certificate", change("certificate.json", lambda one: one.update(level="comparable"))),
    "a difference left out": (
        "certificate",
        change("certificate.json", lambda one: one["equal"].append({**one["different"].pop(), "equal": True})),
    ),
    "another seed": ("ledger", replace("config.yaml", "seed: 0", "seed: 1")),
    "a digest of an epoch": ("ledger", change("ledger.json", lambda one: one["epochs"][1].update(digest="0" * 32))),
    "an epoch left out": ("ledger", leave_out_an_epoch),
    "more samples": ("ledger", change("summary.json", lambda one: one.update(samples_seen=400))),
    "another learning rate in a step": ("learning rate", log("train/lr", 3, 0.7)),
    "a step left out": ("learning rate", drop_step),
    "a better metric in the summary": (
        "logged metrics",
        change("summary.json", lambda one: one["eval"].update(accuracy=99.0)),
    ),
    "a better loss in both": ("result", better_loss),
}


def test_a_property_left_out_of_the_certificate(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    change("certificate.json", lambda one: one["different"].pop())(folder)
    make_bundle([folder], tmp_path / "forged.zip", with_models=False)
    assert findings(tmp_path / "forged.zip")[1]["certificate"][0] == "only claimed"


def test_runs_of_one_name(trained: Path, tmp_path: Path) -> None:
    for name in ("a b", "a_b"):
        shutil.copytree(trained, tmp_path / name)
    make_bundle([tmp_path / "a b", tmp_path / "a_b"], tmp_path / "both.zip", with_models=False)
    with zipfile.ZipFile(tmp_path / "both.zip") as archive:
        assert json.loads(archive.read("manifest.json"))["runs"] == ["0-a_b", "1-a_b"]


@pytest.mark.parametrize(("claim", "forge"), FORGED.values(), ids=FORGED)
def test_a_forged_run_is_found_out(trained: Path, tmp_path: Path, claim: str, forge: Callable[[Path], None]) -> None:
    """Its bundle is whole, since its digests are of the forged files."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    forge(folder)
    make_bundle([folder], tmp_path / "forged.zip", with_models=claim == "result")  # evaluating it takes seconds
    code, found = findings(tmp_path / "forged.zip")
    assert code == 3
    assert found[claim][0] == "different", found


def rewritten(bundle: Path, to: Path, name: str, content: bytes) -> Path:
    """The bundle with another content of one file."""
    with zipfile.ZipFile(bundle) as old, zipfile.ZipFile(to, "w") as new:
        for one in old.namelist():
            new.writestr(one, content if one == name else old.read(one))
    return to


def test_a_changed_bundle(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "bundle.zip"
    assert cli.run_tool("evidence", [str(trained), "-o", str(bundle)]) == 0
    with zipfile.ZipFile(bundle) as archive:
        manifest, ledger = json.loads(archive.read("manifest.json")), archive.read("run/ledger.json")
    outside = {**manifest["files"], "../../ledger.json": manifest["files"]["run/ledger.json"]}
    changed = {
        "another size": ("run/ledger.json", b"{}", "size"),
        "the same size": ("run/ledger.json", ledger.replace(b"true", b"fals", 1), "has changed"),
        "another list of runs": ("manifest.json", json.dumps({**manifest, "runs": ["run"] * 2}).encode(), "digest"),
        "no runs": ("manifest.json", json.dumps({**manifest, "runs": []}).encode(), "lists no run"),
        "no weights": ("manifest.json", json.dumps({**manifest, "weights": {}}).encode(), "not a bundle"),
        "an infinite size": (
            "manifest.json",
            json.dumps({**manifest, "files": {"a": [1e999, ""]}}).encode(),
            "infinity",
        ),
        "a path that leads out": ("manifest.json", json.dumps({**manifest, "files": outside}).encode(), "outside"),
        "another format": ("manifest.json", json.dumps({**manifest, "format": 7}).encode(), "format 7"),
        "no manifest": ("manifest.json", b"[1]", "not a bundle"),
    }
    for what, (name, content, words) in changed.items():
        file = rewritten(bundle, tmp_path / f"{what}.zip", name, content)
        assert cli.run_tool("evidence", ["verify", str(file)]) == cli.EXIT_USER_ERROR, what
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
    assert not (tmp_path.parent / "ledger.json").exists()


def test_a_bundle_that_would_fill_memory_or_disk(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few kilobytes that unpack to a large manifest, or to large files."""
    bundle, file = tmp_path / "bundle.zip", tmp_path / "bomb.zip"
    make_bundle([trained], bundle, with_models=False)
    with zipfile.ZipFile(bundle) as archive:
        manifest = json.loads(archive.read("manifest.json"))
    zeros = 2**24
    files = {"run/zeros": [zeros, "0" * 64], **manifest["files"]}
    large = {**manifest, "files": files}
    negative = {**manifest, "files": {**files, "run/plan.json": [-zeros, "0" * 64]}}  # all sizes add up to little
    unpacked: list[str] = []
    monkeypatch.setattr(shutil, "copyfileobj", lambda source, *_: unpacked.append(source.name))
    for content, words in (
        (b" " * (JSON_LIMIT + 1), "bytes"),
        (json.dumps(large).encode(), "times as large"),
        (json.dumps(negative).encode(), "another size"),
    ):
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("manifest.json", content)
            archive.writestr("run/zeros", bytes(zeros))
            archive.writestr("run/plan.json", b"{}")
            for name in manifest["files"].keys() - {"run/plan.json"}:
                archive.writestr(name, bytes(manifest["files"][name][0]))
        assert file.stat().st_size < 2**18
        assert cli.run_tool("evidence", ["verify", str(file)]) == cli.EXIT_USER_ERROR
        assert words in capsys.readouterr().err
    assert unpacked == []


@pytest.mark.parametrize(("value", "words"), [(None, "does not say"), ("many", "optimizer_steps is 'many'")])
def test_a_summary_that_claims_nothing(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: object, words: str
) -> None:
    """Refused in a sentence, when the bundle is made or when it is verified."""
    folder, bundle = tmp_path / "run", tmp_path / "x.zip"
    shutil.copytree(trained, folder)
    change("summary.json", lambda one: one.update(optimizer_steps=value))(folder)
    made = cli.run_tool("evidence", [str(folder), "-o", str(bundle)])
    assert cli.EXIT_USER_ERROR in (made, made or cli.run_tool("evidence", ["verify", str(bundle)]))
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


MALFORMED: dict[str, tuple[str | None, Callable[[Path], None]]] = {
    "epochs that are none": ("ledger", change("ledger.json", lambda one: one.update(epochs="NaN"))),
    "a ledger without a unit": ("speed", change("ledger.json", lambda one: one.pop("unit"))),
    "a negative learning rate": ("certificate", change("plan.json", lambda one: one.update(lr=-1.0))),
    "properties left out": ("certificate", change("certificate.json", lambda one: one.update(equal=[]))),
    "no environment": ("environment", lambda run: (run / "environment.json").write_text("[]") and None),
    "steps that would take for ever": (
        "learning rate",
        change("summary.json", lambda one: one.update(optimizer_steps=10**15)),
    ),
    "no properties": (None, change("certificate.json", lambda one: one.update(equal=None))),
    "segments that are none": (None, change("certificate.json", lambda one: one.update(segments=[{}]))),
    "a data set that is none": (None, change("tracking.json", lambda one: one.update(dataset=[1]))),
}


@pytest.mark.parametrize(("claim", "forge"), MALFORMED.values(), ids=MALFORMED)
def test_content_that_no_run_has_is_no_traceback(
    trained: Path, tmp_path: Path, claim: str | None, forge: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Anybody can write a bundle: a claim does not hold, or the file is refused in a sentence."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    forge(folder)
    make_bundle([folder], tmp_path / "forged.zip", with_models=False)
    if claim is not None:
        code, found = findings(tmp_path / "forged.zip")
        assert (code, found[claim][0]) == (3, "different")
    else:
        assert cli.run_tool("evidence", ["verify", str(tmp_path / "forged.zip")]) == cli.EXIT_USER_ERROR
        (line,) = capsys.readouterr().err.splitlines()
        assert ".json" in line


def test_a_link_is_not_packed(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    (folder / "environment.json").unlink()
    (folder / "environment.json").symlink_to("/etc/passwd")
    assert cli.run_tool("evidence", [str(folder), "-o", str(tmp_path / "x.zip")]) == cli.EXIT_USER_ERROR
    assert "environment.json is a link" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["run"], "--output"),
        (["run", "-o", "x.tar"], "--output=x.tar"),
        (["run", "-o", "bundle.zip"], "--overwrite"),
        (["run/model", "-o", "x.zip"], "run/model"),
        (["killed", "-o", "x.zip"], "KILLED"),
        (["verify", "none.zip"], "none.zip"),
        (["verify", "run/config.yaml"], "run/config.yaml"),
        (["verify", "bundle.zip", "seed=1"], "seed=1"),
        (["verify", "bundle.zip", "--json=run"], "--json=run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input(trained: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str) -> None:
    if not Path("bundle.zip").exists():
        make_bundle([trained], Path("bundle.zip"), with_models=False)
        Path("killed").mkdir()
        shutil.copy(trained / "config.yaml", "killed")
    before = sorted(Path().rglob("*"))
    assert cli.run_tool("evidence", arguments) == cli.EXIT_USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line
    assert sorted(Path().rglob("*")) == before

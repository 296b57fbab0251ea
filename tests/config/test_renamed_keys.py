"""Renamed settings: users are told the new name, and runs and studies of older versions are read by it."""

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from slipstream.cli import main
from slipstream.config.file import fields, flat, load, overridden, parse, read
from slipstream.config.renamed_keys import RENAMED, RENAMED_VALUES, former_setting, new_setting, with_new_keys
from slipstream.errors import ConfigError
from slipstream.run_dir.reading import RunDir
from slipstream.run_dir.writing import check_unchanged as check_run_unchanged
from slipstream.studies.directory import check_unchanged, removed_cells
from slipstream.studies.results import Sweep
from slipstream.studies.study import Study, with_new_settings

BASE = {"student": "builtin:student", "teachers": {"main": {"model": "builtin:teacher"}}}
CURRICULUM: dict[str, Any] = {"data": {"order": "curriculum"}}
ADAPTIVE: dict[str, Any] = {"data": {"order": "adaptive", "adapt": "kl"}}
SAVED: dict[str, tuple[Any, dict[str, Any]]] = {
    "runtime.turns": (True, {"runtime": {"kind": "inline"}, "schedule": {"kind": "sync"}}),
    "sampler.interleave": (3, {"loss": {"kind": "forward_kl"}}),
    "sampler.longest": (300, {}),
    "teachers.NAME.longest": (300, {}),
    "data.by": ("level", CURRICULUM),
    "data.ramp": (0.5, {"data": CURRICULUM["data"] | {"by": "level"}}),
    "data.adapt": ("kl", ADAPTIVE),
    "data.half_life": (5.0, ADAPTIVE),
    "data.floor": (0.5, ADAPTIVE),
    "loss.as": ("reward", {"loss": {"kind": "k1"}}),
    "freshness.over": ("samples", {}),
    "freshness.also": (
        ["policy"],
        {"policy": {"loss": "vanilla"}, "sampler": {"group": 4}, "task": {"reward": "exact"}},
    ),
    "freshness.every": (5, {"freshness": {"refresh": "fixed"}}),
    "freshness.buffer": ("measured", {}),
}
"""Value of each renamed setting in a run of an older version, and settings of that version that make it legal."""


def key_in(key: str) -> str:
    return key.replace("NAME", "main")


def value_in(new: str, value: Any) -> Any:
    """Return the value under its new name."""
    return RENAMED_VALUES[new][value] if new in RENAMED_VALUES else value


def old_tree(old: str) -> dict[str, Any]:
    value, others = SAVED[old]
    settings = flat(others) if others else {}
    changes = {**settings, key_in(old): value}
    return overridden(BASE, [(key, json.dumps(each)) for key, each in changes.items()], say=print)


def old_run(path: Path, old: str) -> Path:
    """Write the files with the settings of a run, as a version before the rename did."""
    path.mkdir()
    tree = old_tree(old)
    (path / "config.toml").write_text(tomli_w.dumps(tree))
    (path / "meta.json").write_text(json.dumps({"format": 1, "config": tree, "prompts": None}))
    return path


def line_of(old: str) -> str:
    """Return the line that a user is told."""
    new = key_in(RENAMED[old])
    value = f' = "{value_in(new, SAVED[old][0])}"' if new in RENAMED_VALUES else ""
    return f"{key_in(old)} was renamed: write {new}{value}"


def test_every_renamed_setting_has_a_new_name_that_is_a_setting() -> None:
    known = {name for name, _, _ in fields()}
    assert set(RENAMED.values()) <= known and not known & RENAMED.keys()
    assert len({*RENAMED.values()}) == len(RENAMED) == len(SAVED) and SAVED.keys() == RENAMED.keys()
    assert RENAMED_VALUES.keys() <= {*RENAMED.values()}


# --- configs of users -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_key_is_refused_with_its_new_name(old: str, tmp_path: Path) -> None:
    tree, (value, _) = old_tree(old), SAVED[old]
    with pytest.raises(ConfigError) as refused:
        parse(tree, say=print)
    # another old key may be there to make this one legal
    assert f"config: {line_of(old)}" in str(refused.value).split("; ")
    with pytest.raises(ConfigError) as refused:
        parse(BASE, [(key_in(old), json.dumps(value))], say=print)
    assert str(refused.value) == f"config: {line_of(old)}"
    path = tmp_path / "train.toml"
    path.write_text(tomli_w.dumps(tree))
    with pytest.raises(ConfigError, match=f"^{path}: "):
        load(path, say=print)


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_key_in_a_grid_or_an_arm_is_refused_with_its_new_name(old: str) -> None:
    value = SAVED[old][0]
    for table in ({"grid": {key_in(old): [value]}}, {"arms": {"one": {key_in(old): value}}}):
        with pytest.raises(ConfigError) as refused:
            Study({**BASE, "sweep": {"seeds": [1], "measure": "tokens", **table}})
        assert str(refused.value).startswith("study: ") and str(refused.value).endswith(f": {line_of(old)}")


def test_a_command_tells_the_new_name_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.toml"
    path.write_text(tomli_w.dumps(BASE))
    assert main(["config", str(path), "--teachers.main.longest", "300"]) == 2
    line = "error: {}: teachers.main.longest was renamed: write teachers.main.max_length\n"
    assert capsys.readouterr().err == line.format(path)


def test_an_old_value_is_refused_with_the_new_one() -> None:
    with pytest.raises(ConfigError) as refused:
        parse({**BASE, "loss": {"kind": "k1", "use": "reward"}}, say=print)
    assert str(refused.value) == "config: loss.use = 'reward' was renamed: write loss.use = \"advantage\""
    with pytest.raises(ConfigError, match="loss.use: input should be 'loss' or 'advantage', got 'other'"):
        parse({**BASE, "loss": {"kind": "k1", "use": "other"}}, say=print)


# --- saved runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_key_of_a_saved_run_is_translated(old: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, new = old_run(tmp_path / "run", old), RENAMED[old]
    config = RunDir(run).config
    section, _, name = new.rpartition(".")
    holder = config.teachers["main"] if section == "teachers.NAME" else attrgetter(section)(config)
    found, wanted = getattr(holder, name), value_in(new, SAVED[old][0])
    assert (list(found) if isinstance(found, tuple) else found) == wanted
    assert load(run / "config.toml", say=print) == config, "commands may be given the config of a run"
    check_run_unchanged(run, config)
    assert main(["config", str(run / "config.toml")]) == 0
    out, err = capsys.readouterr()
    assert f"{name} = " in out and "renamed" not in out + err


def test_a_saved_run_with_both_names_is_refused(tmp_path: Path) -> None:
    run = old_run(tmp_path / "run", "sampler.longest")
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("longest = 300", "longest = 300\nmax_length = 200"))
    with pytest.raises(ConfigError, match="config.toml: sampler.longest was renamed: write sampler.max_length$"):
        RunDir(run).config  # noqa: B018


def test_only_renamed_settings_of_a_saved_config_change() -> None:
    tree = {"a": {"b": 1}, "sampler": {"longest": 3, "top_k": 5}, "teachers": {"x": {"longest": 2}, "y": {}}}
    before = json.dumps(tree)
    assert with_new_keys(tree) == {
        "a": {"b": 1},
        "sampler": {"max_length": 3, "top_k": 5},
        "teachers": {"x": {"max_length": 2}, "y": {}},
    }
    assert json.dumps(tree) == before
    assert with_new_keys({"learner": {"shared_prompt": True, "lr": 1.0}}) == {"learner": {"lr": 1.0}}
    arms = {"sweep": {"arms": {"a": {"learner.shared_prompt": True, "learner.lr": 1.0}}}}
    assert with_new_settings(arms)["sweep"]["arms"] == {"a": {"learner.lr": 1.0}}
    for odd in ({}, {"sampler": 3, "teachers": "no"}, {"teachers": {"x": []}}, {"data": {"by": "x", "curriculum": 4}}):
        assert with_new_keys(odd) == odd
    deep: dict[str, Any] = {}
    for _ in range(10_000):
        deep = {"sampler": deep}
    assert with_new_keys(deep).keys() == {"sampler"}, "whether it is a config is decided elsewhere"
    assert new_setting("teachers.x.longest", 3) == ("teachers.x.max_length", 3)
    assert new_setting("loss.as", "reward") == ("loss.use", "advantage")
    for setting in (("teachers.x.longest", 3), ("loss.as", "reward"), ("loss.kind", "k1"), ("data.floor", 0.5)):
        assert former_setting(*new_setting(*setting)) == setting


# --- saved studies ----------------------------------------------------------------------------------------------------

STUDY = """
student = "builtin:student"
teachers.main = { model = "builtin:teacher" }
sampler.longest = 300

[sweep]
seeds = [1]
measure = "tokens"
x = "sampler.interleave"
grid = { sampler.interleave = [2, 3] }

[sweep.arms.forward]
loss.kind = "forward_kl"

[sweep.arms.own]
loss = { kind = "k1" }
grid = { "loss.as" = ["reward"], sampler.interleave = [0] }

[sweep.conditions.long]
teachers.main.longest = 300
"""
CELLS = {
    "forward/condition=long,sampler.interleave=2/seed-1": {
        "loss": {"kind": "forward_kl"},
        "sampler": {"interleave": 2},
    },
    "own/condition=long,sampler.interleave=0,loss.as=reward/seed-1": {"loss": {"kind": "k1", "as": "reward"}},
}


def test_a_saved_study_is_read_by_the_new_names(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    for name, settings in CELLS.items():
        cell = tmp_path / "cells" / name
        cell.mkdir(parents=True)
        tree = {**BASE, "seed": 1, **settings}
        tree["sampler"] = {**settings.get("sampler", {}), "longest": 300}
        tree["teachers"] = {"main": {"model": "builtin:teacher", "longest": 300}}
        costs = {"updates": 1, "tokens": 2.0, "seconds": 3.0, "cpu_seconds": 4.0}
        (cell / "cell.json").write_text(json.dumps({"config": tree, **costs}))
    sweep = Sweep(tmp_path)
    assert sweep.study.x == "sampler.teacher_replaces" and [point.x for point in sweep.study.points] == [2, 3, 0]
    assert [cell.finished for cell in sweep.cells] == [True, False, True]
    assert sweep.cells[1].path.parent.name == "condition=long,sampler.teacher_replaces=3"
    assert sweep.finished[1].config.loss.use == "advantage"  # type: ignore[union-attr]
    check_unchanged(sweep)
    assert removed_cells(sweep) == []
    with pytest.raises(ConfigError, match="sampler.longest was renamed: write sampler.max_length"):
        Study(read(tmp_path / "study.toml"))

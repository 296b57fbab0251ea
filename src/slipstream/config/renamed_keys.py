"""Settings that were renamed or dropped.

Configs of users are refused with the new name, or the reason. Saved runs and studies are translated.
"""

import json
from collections.abc import Mapping
from typing import Any

ANY_TEACHER = "NAME"
"""Stands in a key for the name of any teacher."""
RENAMED = {
    "runtime.turns": "runtime.time_share",
    "sampler.interleave": "sampler.teacher_replaces",
    "sampler.longest": "sampler.max_length",
    "teachers.NAME.longest": "teachers.NAME.max_length",
    "data.by": "data.curriculum.column",
    "data.ramp": "data.curriculum.epochs",
    "data.adapt": "data.adaptive.weight_by",
    "data.half_life": "data.adaptive.half_life",
    "data.floor": "data.adaptive.uniform_share",
    "loss.as": "loss.use",
    "freshness.over": "freshness.normalise_by",
    "freshness.also": "freshness.apply_to",
    "freshness.every": "freshness.refresh_every",
    "freshness.buffer": "freshness.estimate",
}
"""New dotted key by old dotted key."""
DROPPED = {"learner.shared_prompt": "the prompt of a group is computed once wherever learner.packing is on"}
"""Reason by dotted key that is no setting any more."""
RENAMED_VALUES = {"loss.use": {"reward": "advantage"}}
"""New value by old value, by the new dotted key."""


def new_setting(key: str, value: Any = None) -> tuple[str, Any]:
    """Return the present key and value of a setting; those of a setting that was not renamed stay as they are."""
    new = _looked_up(RENAMED, key)
    return (new, _renamed_value(new, value)) if new is not None else (key, value)


def former_setting(key: str, value: Any) -> tuple[str, Any]:
    """Return the key and value that a setting had before it was renamed."""
    old = _looked_up({new: old for old, new in RENAMED.items()}, key)
    if old is None:
        return key, value
    values = {new: old for old, new in RENAMED_VALUES.get(key, {}).items()}
    return old, values.get(value, value) if isinstance(value, str) else value


def renaming(key: str, value: Any) -> str | None:
    """Return what to write instead of an old key, or of an old value; None if neither was renamed."""
    new, now = new_setting(key, value)
    if new != key:
        return new if now == value else f"{new} = {json.dumps(now)}"
    now = _renamed_value(key, value)
    return None if now == value else f"{key} = {json.dumps(now)}"


def with_new_keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a saved config with the new names. An old key stays, to be refused, if its new one is there."""
    found = {key: _copied(value, 2) for key, value in tree.items()}
    teachers = found.get("teachers")
    for key in DROPPED:
        section, name = key.split(".")
        if isinstance(found.get(section), dict):
            found[section].pop(name, None)
    for old, new in RENAMED.items():
        for name in teachers if isinstance(teachers, dict) and ANY_TEACHER in old else [ANY_TEACHER]:
            _move(found, *(key.replace(ANY_TEACHER, name).split(".") for key in (old, new)))
    return found


def _copied(tree: Any, levels: int) -> Any:
    """Return a copy of a nested dict in which dicts at so many levels are copies."""
    if not isinstance(tree, dict) or not levels:
        return tree
    return {key: _copied(value, levels - 1) for key, value in tree.items()}


def _move(tree: dict[str, Any], old: list[str], new: list[str]) -> None:
    """Move a value of a nested dict to its new key, unless that key is there."""
    source: Any = tree
    for part in old[:-1]:
        source = source.get(part) if isinstance(source, dict) else None
    if not isinstance(source, dict) or old[-1] not in source:
        return
    target: Any = tree
    for part in new[:-1]:
        target = target.setdefault(part, {}) if isinstance(target, dict) else None
    if isinstance(target, dict) and new[-1] not in target:
        target[new[-1]] = _renamed_value(".".join(new), source.pop(old[-1]))


def _looked_up(table: Mapping[str, str], key: str) -> str | None:
    match key.split("."):
        case ["teachers", name, *rest]:
            found = table.get(".".join(["teachers", ANY_TEACHER, *rest]))
            return None if found is None else found.replace(ANY_TEACHER, name)
    return table.get(key)


def _renamed_value(key: str, value: Any) -> Any:
    return RENAMED_VALUES.get(key, {}).get(value, value) if isinstance(value, str) else value

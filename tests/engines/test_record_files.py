"""Records on disk: whatever one can hold comes back as it was, without pickle."""

import json
import tempfile
from dataclasses import fields, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.engines.record_files import GROUP_ARRAYS, GROUP_REST, read_groups, write_groups
from slipstream.errors import RunDirError
from slipstream.records import Handle, Prompt, Rollout, SamplingSupport, Scored, header_of, one_turn

TEXT = st.text(st.characters(codec="utf-8"), max_size=5)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(TEXT, below, max_size=3),
    max_leaves=8,
)
FLOATS = st.sampled_from([np.float16, np.float32, np.float64])
INTS = st.sampled_from([np.int16, np.uint16, np.int32, np.int64])
REWARDS = st.dictionaries(TEXT, st.floats(allow_nan=False, allow_infinity=False), max_size=3)


@st.composite
def prompts(draw: Any) -> Prompt:
    return Prompt(
        id=draw(TEXT),
        number=draw(st.integers(0, 9)),
        tokens=np.arange(draw(st.integers(1, 4)), dtype=draw(INTS)),
        data_source=draw(TEXT),
        ground_truth=draw(JSON),
        teacher=draw(TEXT),
        seed=draw(st.integers(0, (1 << 63) - 1)),
        offset=draw(st.integers(0, 9)),
        meta=draw(st.dictionaries(TEXT, JSON, max_size=3)),
    )


@st.composite
def rollouts(draw: Any, prompt: Prompt) -> Rollout:
    rng, t, m = np.random.default_rng(draw(st.integers(0, 1 << 20))), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    ids, logs = draw(INTS), draw(FLOATS)
    mask = rng.random(t) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    n = int(mask.sum())
    actions, action_logp = rng.integers(0, 30, (n, m)).astype(ids), -rng.random((n, m)).astype(logs)
    tokens, logp = rng.integers(0, 30, t).astype(ids), np.full(t, np.nan, logs)
    tokens[mask], logp[mask] = actions[:, 0], action_logp[:, 0]
    best, kept = draw(st.booleans()), draw(st.booleans())
    return Rollout(
        prompt=prompt,
        index=draw(st.integers(0, 9)),
        episode=draw(st.integers(0, 9)),
        branch=draw(st.integers(0, 9)),
        tokens=tokens,
        versions=np.where(mask, 3, -1).astype(draw(st.sampled_from([np.int32, np.int64]))),
        logp=logp,
        turn=np.where(mask, 0, -1).astype(np.int32),
        loss_mask=mask,
        actions=np.asfortranarray(actions) if draw(st.booleans()) else actions,
        action_logp=action_logp,
        best_ids=rng.integers(31, 60, (n, 4)) if best else None,
        best_logp=-rng.random((n, 4)) if best else None,
        finish=draw(st.sampled_from(["eos", "length", "error", "released"])),
        kept=SamplingSupport(np.tile(np.arange(30, dtype=np.int32), n), np.full(n, 30, np.int32)) if kept else None,
        rewards=draw(REWARDS),
    )


@st.composite
def scored(draw: Any, rollout: Rollout) -> Scored:
    rng, n, logs = np.random.default_rng(0), rollout.trained_tokens, draw(FLOATS)
    logp = -rng.random(n).astype(logs)
    cache: dict[str, Any] = {}
    match draw(st.sampled_from(["none", "sampled", "topk", "hidden", "best"])):
        case "sampled":
            cache["teacher_action_logp"] = -rng.random(rollout.actions.shape).astype(logs)
            cache["teacher_action_logp"][:, 0] = logp
        case "topk":
            cache = {"teacher_ids": rng.integers(31, 60, (n, 2)), "teacher_topk_logp": -rng.random((n, 2))}
        case "hidden":
            cache["teacher_hidden"] = rng.integers(0, 1 << 16, (n, 3)).astype(np.uint16)
        case "best" if rollout.best_ids is not None:
            cache["teacher_best_logp"] = -rng.random(rollout.best_ids.shape)
    return Scored(rollout=rollout, teacher=draw(TEXT), context_id=draw(TEXT), teacher_logp=logp, **cache)


@st.composite
def handles(draw: Any, prompt: Prompt) -> Handle:
    rollout = draw(rollouts(prompt))
    header = replace(header_of(rollout), rewards=draw(REWARDS), greedy_tokens=draw(st.integers(0, 9)))
    match draw(st.sampled_from(["rollout", "scored", "none"])):
        case "rollout":
            return Handle(header, rollout)
        case "scored":
            return Handle(header, draw(scored(rollout)))
        case _:
            return Handle(header, None)


groups = st.lists(prompts().flatmap(lambda prompt: st.lists(handles(prompt), max_size=3)), max_size=3)


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, Prompt | Rollout | Scored | SamplingSupport):
        for field in fields(one):
            assert_equal(getattr(one, field.name), getattr(other, field.name))
    else:
        assert json.dumps(one) == json.dumps(other), "NaN is not equal to itself"


@given(groups)
def test_whatever_a_record_holds_comes_back(written: list[list[Handle]]) -> None:
    with tempfile.TemporaryDirectory() as path:
        write_groups(Path(path), written)
        found = read_groups(Path(path))
    assert [len(group) for group in found] == [len(group) for group in written]
    for group, expected in zip(found, written, strict=True):
        assert len({id(h.body.prompt) for h in group if isinstance(h.body, Rollout)}) <= 1, "one prompt for all"
        for one, other in zip(group, expected, strict=True):
            assert repr(one.header) == repr(other.header)
            assert_equal(one.body, other.body)


@pytest.mark.parametrize("value", [date(2026, 1, 1), b"x", (1, 2), {1: 2}, np.float32(1)])
def test_what_json_does_not_hold_is_refused_in_one_line(tmp_path: Path, value: Any) -> None:
    prompt = Prompt(id="p7", number=0, tokens=np.array([1]), ground_truth=[{"a": value}])
    logp, ids = np.zeros((1, 1)), np.zeros((1, 1), np.int32)
    rollout = one_turn(prompt, 0, actions=ids, action_logp=logp, versions=ids[:, 0], finish="eos")
    with pytest.raises(RunDirError, match=r"^prompt p7: ground_truth = .* cannot be saved: JSON does not hold it$"):
        write_groups(tmp_path, [[Handle(header_of(rollout), rollout)]])


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    write_groups(tmp_path, [])
    assert {path.name for path in tmp_path.iterdir()} == {GROUP_ARRAYS, GROUP_REST}
    assert read_groups(tmp_path) == []

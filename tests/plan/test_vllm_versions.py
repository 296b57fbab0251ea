"""Versions of vLLM: a run with another one than the code was written for says so when it begins."""

from __future__ import annotations

import pytest

from slipstream.config.file import parse
from slipstream.plan.vllm import with_vllm

NOTE = (
    "note: vLLM 0.33.0 was never tested; publishes use internals of vLLM 0.32 with torch 2.13: "
    "run pip install 'vllm==0.32.*'"
)


@pytest.mark.parametrize(
    ("engine", "version", "notes"),
    [("vllm", "0.33.0", [NOTE]), ("vllm", "0.32.1", []), ("native", "0.33.0", [])],
)
def test_a_version_that_was_never_tested_costs_one_line(engine: str, version: str, notes: list[str]) -> None:
    sampler = {"engine": engine, "longest": 64, "max_tokens": 8}
    tree = {"student": "builtin:student", "teachers": {"main": {"model": "builtin:teacher"}}, "loss": {"m": 1}}
    said = list[str]()
    with_vllm(parse(tree | {"sampler": sampler}), said.append, planned=version)
    assert said == notes

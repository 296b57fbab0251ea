"""Versions of vLLM: a run with another one than the code was written for says so when it begins."""

import pytest

from slipstream.config.file import parse
from slipstream.plan.completion import completed
from slipstream.plan.facts import Facts
from slipstream.plan.notes import vllm_notes

NOTE = (
    "note: vLLM 0.33.0 was never tested; publishes use internals of vLLM 0.32 with torch 2.13: "
    "run pip install 'vllm==0.32.*'"
)


@pytest.mark.parametrize(
    ("engine", "version", "notes"),
    [("vllm", "0.33.0", [NOTE]), ("vllm", "0.32.1", []), ("native", "0.33.0", [])],
)
def test_a_version_that_was_never_tested_costs_one_line(engine: str, version: str, notes: list[str]) -> None:
    sampler = {"engine": engine, "max_length": 64, "max_tokens": 8}
    tree = {"student": "builtin:student", "teachers": {"main": {"model": "builtin:teacher"}}, "loss": {"m": 1}}
    said = list[str]()
    config = parse(tree | {"sampler": sampler})
    completed(config, Facts(config, vllm=version), said.append)
    assert said == notes


KERNEL = (
    "note: vLLM's kernel of experts must keep their layout, or the run stops as it starts: on other GPUs than Hopper "
    'write sampler.engine_args = { moe_backend = "triton" }'
)
MIXTURE, DENSE = "shapes:Qwen/Qwen3-30B-A3B-Instruct-2507", "shapes:Qwen/Qwen3-4B"


@pytest.mark.parametrize(
    ("student", "engine", "device", "args", "notes"),
    [
        (MIXTURE, "vllm", "cuda", {}, [KERNEL]),
        (MIXTURE, "vllm", "auto", {"moe_backend": "flashinfer_cutlass"}, [KERNEL]),
        (MIXTURE, "vllm", "cuda", {"moe_backend": "triton"}, []),
        (MIXTURE, "vllm", "cpu", {}, []),
        (MIXTURE, "native", "cuda", {}, []),
        (DENSE, "vllm", "cuda", {}, []),
    ],
)
def test_experts_under_vllm_need_a_kernel_that_keeps_their_layout(
    student: str, engine: str, device: str, args: dict[str, str], notes: list[str]
) -> None:
    sampler = {"engine": engine, "max_length": 64, "max_tokens": 8} | ({"engine_args": args} if args else {})
    tree = {"student": student, "teachers": {"main": {"model": student}}, "loss": {"m": 1}, "sampler": sampler}
    config = parse(tree | {"runtime": {"device": device}})
    assert list(vllm_notes(config, Facts(config))) == notes

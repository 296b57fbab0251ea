"""Settings that would do nothing, or next to nothing: each is refused, warned of or noted, and says so itself."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from slipstream.cli import main
from slipstream.config.file import load
from slipstream.plan.plan import plan
from slipstream.runs.start import train
from slipstream.runtimes.inline import open_engines

BASE = """
student = "builtin:student"
updates = 2
output = "run"
[teachers.main]
model = "builtin:teacher"
[data]
limit = 8
[sampler]
max_tokens = 8
[learner]
batch_size = 4
[runtime]
kind = "inline"
device = "cpu"
"""
RL = "loss.weight=0 teachers={} policy.loss=vanilla task.reward=exact sampler.group=2"
HELD_OUT = "data.eval=builtin:arithmetic task.reward=exact eval.prompts=4"
SERVER = "sampler.server.url=http://127.0.0.1:1 sampler.server.folder=/tmp loss.m=1"
TWO = "teachers.other.model=builtin:teacher data.train=routed.jsonl"
NOTHING = "has almost no effect: every update is one step on answers of its own weights"

REFUSED = {
    "data.train=rows.jsonl data.split=test": "data.split = 'test' does nothing: rows.jsonl has no splits; drop it",
    "data.teacher_key=level": "data.teacher_key does nothing without several teachers",
    "data.template_args={quiet=true}": "data.template_args.quiet does nothing: prompts are plain text; drop it",
    "data.train=talks.jsonl student=chatty teachers.main.model=chatty data.template_args={quite=true}": (
        "data.template_args.quite does nothing: the chat template of chatty does not read it; drop it"
    ),
    "learner.compute_dtype=float64": 'learner.compute_dtype = "float64" does nothing over weights in float32',
    "learner.dtype=bfloat16 learner.compute_dtype=float32": 'compute_dtype = "float32" does nothing over weights in bf',
    "learner.dtype=float64 learner.compute_dtype=bfloat16": 'compute_dtype = "bfloat16" does nothing over weights in f',
    "learner.dtype=float64 learner.compute_dtype=float16": 'compute_dtype = "float16" does nothing over weights in f',
    "learner.dtype=float16": 'learner.dtype = "float16" would round small steps and squares of gradients to 0: write',
    "learner.optimizer_dtype=float16": 'learner.optimizer_dtype = "float16" would round small steps and squares',
    "sampler.quantisation=int8 sampler.engine=vllm": "sampler.quantisation: vLLM would quantise weights in its own way",
    f"sampler.quantisation=fp8 sampler.engine=server {SERVER}": "a rollout server quantises weights by its",
    "sampler.quantisation=fp8 learner.lora.rank=4": "[learner.lora] publishes adapters, and sampler.quantisation",
    f'{RL} policy.loss=gspo learner.perturbation.std=0.01 environment.sandbox="none" environment.gateway.command=ls': (
        "[learner.perturbation] adds no noise to ratios of episodes with several branches, and policy.loss = 'gspo' "
        'has such ratios with [environment.gateway]: write policy.loss = "vanilla", or drop it'
    ),
    "learner.perturbation.std=0.01": "[learner.perturbation] is for policy losses: write loss.weight = 0 or",
    "learner.quantised=true": "learner.quantised rounds as the sampler does: write sampler.quantisation",
    "loss.kind=jsd loss.k=4": "k = 4 does nothing: the hidden cache is the whole distribution",
    "loss.kind=forward_kl loss.cache=hidden loss.k=4": "k = 4 does nothing: the hidden cache is the whole",
    f"{RL} loss.m=4": "loss.m does nothing without loss.weight",
    f"{RL} loss.kind=k2": "loss.kind does nothing without loss.weight",
    f"{RL} loss.temperature=0.5": "loss.temperature does nothing without loss.weight",
    "data.eval=builtin:arithmetic": "data.eval does nothing without eval.every",
    "eval.prompts=10": "eval.prompts does nothing without eval.every",
    "eval.n=2": "eval.n does nothing without eval.every",
    "eval.temperature=0.5": "eval.temperature does nothing without eval.every",
    "task.timeout=5.0": "task.timeout does nothing without task.reward",
    "runtime.graders=2": "runtime.graders does nothing without task.reward",
    "log.project=mine": "log.project does nothing without a tracker in log.to that has projects",
    "teachers.main.weight=0": "teachers.main.weight = 0 leaves nothing to distil: raise one, or drop [teachers]",
    f"{TWO} teachers.main.weight=0 teachers.other.weight=0": (
        "teachers.main.weight and teachers.other.weight = 0 leaves nothing to distil"
    ),
    "sampler.temperature=1e-9": "sampler.temperature: input should be greater than or equal to 0.001",
    "sampler.temperature=1e300": "sampler.temperature: input should be less than or equal to 100",
    "loss.temperature=1e-9": "loss.temperature: input should be greater than or equal to 0.001",
    "loss.temperature=1e300": "loss.temperature: input should be less than or equal to 100",
    f"eval.every=1 {HELD_OUT} eval.temperature=1e-9": "eval.temperature: 1e-09 is as good as greedy: write 0, or 0.001",
    f"eval.every=1 {HELD_OUT} eval.temperature=1e300": "eval.temperature: input should be less than or equal to 100",
    "output=": "output: string should have at least 1 character",
    "data.train=": "'' names no data: write a file",
    "student=": "'' names no model: write an HF directory or a hub name",
    "teachers.main.model=": "'' names no model: write an HF directory or a hub name",
    "sampler.slots=1000000000": "lower sampler.slots, sampler.max_tokens or the draws of the loss",
    "loss.m=100000": "loss.m: input should be less than or equal to 10000, got 100000",
    "learner.lora.rank=100000": "learner.lora.rank = 100000 is more than the width of any of these layers of built",
    "runtime.device=cpu:7": "runtime.device = 'cpu:7': all CPUs are one device: write \"cpu\"",
    "learner.batch_size=1000000000": "samples in flight, which need at least 4,768.4 GiB; this machine has",
    "freshness.refresh_every=5": 'refresh_every is for refresh = "fixed": write that, or drop it',
    "freshness.refresh=never freshness.kappa_f=0.2": 'kappa_f is for refresh = "adaptive": write that, or drop it',
    "freshness.refresh=fixed freshness.estimate=measured": (
        'estimate is for refresh = "adaptive": write that, or drop it'
    ),
    "freshness.refresh=never freshness.measure=5": 'measure is for refresh = "adaptive": write that, or drop it',
    "policy.loss=vanilla freshness.weight=equal freshness.apply_to=policy": (
        'apply_to = "policy" does nothing with weight ='
    ),
    "freshness.weight=lag freshness.threshold=0.1": 'threshold is for weight = "freshness" or "common": write one of',
    "freshness.weight=equal freshness.anchor=0 freshness.refresh=never": "leave nothing to do: drop [freshness], or",
    "freshness.apply_to=policy": 'freshness.apply_to = "policy" weighs a policy loss, and there is none',
    f"{RL} freshness.anchor=0.2": (
        "[freshness] weighs the distillation loss, and loss.weight = 0: write freshness.apply_to"
    ),
    "freshness.drift=snapshots learner.snapshots=0": "learner.snapshots = 0 keeps none: drop learner.snapshots",
    "freshness.m=4": 'freshness.m does nothing: loss.kind = "reverse_kl_mc" has draws of its own',
    "loss.kind=forward_kl freshness.m=4 freshness.drift=snapshots freshness.anchor=0": (
        'freshness.m does nothing: drift = "snapshots" is exact, and anchor = 0: drop it'
    ),
    "loss.kind=forward_kl freshness.anchor=0.2 sampler.top_p=0.9": "[freshness] estimates the KL by the ratio of a",
}
WARNED = {
    "checkpoint.every=3": "checkpoint.every = 3 is more than updates = 2: only what checkpoint.minutes asks for is",
    f"eval.every=3 {HELD_OUT}": "eval.every = 3 is more than updates = 2: only the first and the final student are",
    "loss.kind=k3": 'loss.kind = "k3" takes every token for a draw of the current student, and async(4)',
    "loss.importance=false schedule.kind=replay schedule.k=2": 'loss.kind = "reverse_kl_mc" takes every token for a',
    "learner.warmup=3": "learner.warmup = 3 is more than updates = 2: learner.lr is never reached",
    f"{RL} reference.weight=0.1 reference.host=true": "reference.host = true does nothing on a CPU",
    'learner.offload=["optimizer"]': "learner.offload = ['optimizer'] does nothing on a CPU",
    "learner.token_budget=100000000000 learner.batch_size=40000": "its device has",
    "checkpoint.minutes=0": "a run that is killed loses everything",
    "reference.weight=0.1": "drop [reference] if that is not intended",
}
NOTED = {
    "loss.clip=0.2 schedule.kind=sync": f"loss.clip {NOTHING}",
    "loss.ratio_cap=2.0 schedule.tau=0": f"loss.ratio_cap {NOTHING}",
    "loss.kind=k1 loss.use=advantage loss.dual_clip=4.0 schedule.kind=periodic": f"loss.dual_clip {NOTHING}",
    f"{RL} policy.options={{clip_high=0.3}} schedule.kind=sync": f"policy.options.clip_high {NOTHING}",
    "freshness.anchor=0.2 schedule.kind=sync": "[freshness] has almost no effect: every update trains on answers of",
    "freshness.anchor=0.2 schedule.kind=sync learner.minibatches=2": "has almost no effect, apart from the anchor:",
    "freshness.anchor=0.2": "freshness: no teacher scores answers again (relabel), so that supervision drift is",
    "loss.m=64": 'loss.m = 64 draws of 39 tokens: loss.kind = "reverse_kl" computes all of them',
}
QUIET = [
    "loss.clip=0.2",
    "loss.clip=0.2 schedule.kind=sync learner.minibatches=2",
    "loss.clip=0.2 schedule.kind=replay schedule.k=1",
    "schedule.kind=sync",
    "loss.kind=k3 schedule.kind=periodic",
    "loss.m=39",
    "checkpoint.every=2 learner.warmup=2",
    "learner.compute_dtype=bfloat16",
    "learner.compute_dtype=float16 sampler.dtype=float16",
    "learner.compute_dtype=float32",
    "learner.dtype=float64 learner.compute_dtype=float64",
    f"{TWO} teachers.other.weight=0",
]
"""Settings that have an effect, or that nobody wrote."""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models_dir: Path) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(BASE)
    (tmp_path / "chatty").symlink_to(models_dir / "student")
    talks = [{"messages": [{"role": "user", "content": "1+1="}]}]
    rows = {
        "rows.jsonl": [{"prompt": "A1="}],
        "talks.jsonl": talks,
        "routed.jsonl": [{"prompt": f"A{len(name)}=", "data_source": name} for name in ("main", "other")],
    }
    for name, lines in rows.items():
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return "run.toml"


def words(line: str) -> list[str]:
    return [word for pair in line.split() for word in (f"--{pair.partition('=')[0]}", pair.partition("=")[2])]


def told(kind: str, out: str) -> list[str]:
    lines = [line.removeprefix("# ") for line in out.splitlines() if line.startswith("# ")]
    warnings = [line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")]
    return warnings if kind == "warning" else [line for line in lines if not line.startswith("warning: ")]


@pytest.mark.parametrize("line", REFUSED)
def test_what_can_only_be_a_mistake_is_refused(line: str, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for command in (["config", config, "--check"], ["train", config]):
        assert main([*command, *words(line)]) == 2
        said.append(capsys.readouterr().err.splitlines()[-1])
    assert said[0] == said[1] and said[0].startswith("error: ") and REFUSED[line] in said[0]


@pytest.mark.parametrize("line", WARNED)
def test_what_may_be_meant_is_warned_of(line: str, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", config, "--check", *words(line)]) == 0
    warnings = told("warning", capsys.readouterr().out)
    assert len(warnings) == 1 and WARNED[line] in warnings[0]


@pytest.mark.parametrize("line", NOTED)
def test_what_has_next_to_nothing_to_do_is_noted(line: str, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", config, "--check", *words(line)]) == 0
    notes = told("note", capsys.readouterr().out)
    assert sum(NOTED[line] in note for note in notes) == 1


@pytest.mark.parametrize("line", QUIET)
def test_what_does_something_is_let_be(line: str, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", config, "--check", *words(line)]) == 0
    out = capsys.readouterr().out
    assert told("warning", out) == []
    assert not [note for note in told("note", out) if "nothing to do" in note or "computes all" in note]


class EnginesStart(Exception):
    pass


def test_train_prints_every_warning_of_check_as_it_is(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what looks like markup: [reference]."""
    line = "reference.weight=0.1 reference.host=true checkpoint.every=9 learner.warmup=9 learner.lr=0.5"
    assert main(["config", config, "--check", *words(line)]) == 0
    checked = told("warning", capsys.readouterr().out)

    def start(*anything: Any, **given: Any) -> None:
        raise EnginesStart

    monkeypatch.setattr("slipstream.runtimes.inline.open_engines", start)
    text = io.StringIO()
    changes = [(key, value) for key, _, value in (pair.partition("=") for pair in line.split())]
    with pytest.raises(EnginesStart):
        train(load(config, changes), Console(file=text, width=60), name="run")
    printed = [each.removeprefix("warning: ") for each in text.getvalue().splitlines() if each.startswith("warning: ")]
    assert printed == checked and len(checked) == 5
    assert any("drop [reference] if" in each for each in checked)


def test_check_counts_gpus_as_train_does(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    check = ["config", config, "--check", "--runtime.kind", "local", "--runtime.device"]
    short = "3 GPUs are needed (learner 1, sampler 1, teacher main 1), there are 1"
    assert main([*check, "auto"]) == 0
    assert f"# running on CPU: {short}; see runtime.kind" in capsys.readouterr().out
    monkeypatch.setattr("slipstream.engines.native.model.pick_device", lambda device, where: None)
    monkeypatch.setattr("slipstream.plan.rules.memory.check_room", lambda plan: [])
    monkeypatch.setattr("slipstream.plan.placement.needs", lambda plan: [])
    assert main([*check, "cuda"]) == 2
    assert f"runtime.device = 'cuda': {short}; lower" in capsys.readouterr().err


@pytest.fixture
def threads_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.processes
def test_threads_are_those_of_each_engine_in_one_process_too(config: str, threads_before: None) -> None:
    made = plan(load(config, [("learner.threads", "3"), ("runtime.threads", "2")]))
    engines = open_engines(made.engines, made.tokenizer, say=str)
    try:
        (sampler,), ((scorer,),) = engines.samplers, engines.scorers.values()
        found = [e.thread.submit(torch.get_num_threads).result() for e in (engines.learner, sampler.sampler, scorer)]  # type: ignore[attr-defined]
        assert found == [3, 2, 2]
    finally:
        engines.close()

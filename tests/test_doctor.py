"""Planted faults in real engines: each is found, and named with its cause."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from slipstream.assets import DEMO, model_path
from slipstream.cli import main
from slipstream.commands import train as launch
from slipstream.commands.doctor import arrival, by_itself, doctor, rewarded, room
from slipstream.config.file import load
from slipstream.config.objective import PolicyConfig
from slipstream.config.schema import Config
from slipstream.engines.base import Engines, Loaded, Sampling
from slipstream.errors import ModelError
from slipstream.plan.checks import PROMPTS, CheckFailed, Finding, quick, raised
from slipstream.plan.plan import Plan, plan
from slipstream.records import Handle
from slipstream.runtimes import inline
from slipstream.runtimes.inline import open_engines

QUIET = Console(quiet=True)
INLINE = [("runtime.kind", "inline"), ("runtime.device", "cpu")]


def config(*changes: tuple[str, str]) -> Config:
    return load(DEMO, [*INLINE, ("learner.lr", "1e-2"), ("learner.warmup", "0"), *changes], say=str)


class Fault:
    """An engine, but for one method."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class OtherTemperature(Fault):
    async def generate(self, prompt: Any, sampling: Sampling, begun: Any = ()) -> Any:
        return await self.engine.generate(prompt, replace(sampling, temperature=0.7), begun)


class NotLoaded(Fault):
    """Says that it runs what it was sent, and goes on with what it has."""

    versions = 0

    async def publish(self, weights: Any, mode: Any) -> Loaded:
        self.versions += 1
        if self.versions == 1:
            return await self.engine.publish(weights, mode)
        return Loaded(self.expected)

    expected = ""


class Forgetful(Fault):
    """Never loads anything, and says so by its fingerprint."""

    async def publish(self, weights: Any, mode: Any) -> Loaded:
        return Loaded("0123456789abcdef")


class Shifted(Fault):
    """Every row is about the token before."""

    async def score(self, group: Any) -> Any:
        found = []
        for handle in await self.engine.score(group):
            scored = handle.body
            logp = np.roll(scored.teacher_action_logp, 1, axis=0)
            found.append(
                Handle(handle.header, replace(scored, teacher_action_logp=logp, teacher_logp=logp[:, 0].copy()))
            )
        return found


def examined(settings: Config, wrap: Any, check: Any) -> list[Finding]:
    job = plan(settings)
    engines = open_engines(job.engines, job.tokenizer, say=str)
    try:
        prompts = [job.prompts.at(number) for number in range(PROMPTS)]
        found: list[Finding] = asyncio.run(check(job, wrap(engines), prompts))
        return found
    finally:
        engines.close()


async def at_the_start(made: Plan, engines: Engines, prompts: Any) -> list[Finding]:
    return await quick(made, engines, prompts, version=0)


def test_engines_that_agree_are_found_to() -> None:
    found = examined(config(), lambda engines: engines, at_the_start)
    assert all(finding.ok for finding in found)
    pearson = float(found[0].said.split()[1].strip(","))
    assert pearson >= 0.9999
    raised(found)


def test_another_temperature_in_the_sampler_is_found() -> None:
    def wrap(engines: Engines) -> Engines:
        return replace(engines, samplers=tuple(OtherTemperature(sampler) for sampler in engines.samplers))

    found = examined(config(), wrap, at_the_start)
    assert not found[0].ok and "another temperature on one side?" in found[0].fix
    with pytest.raises(CheckFailed, match="sampler and learner, one checkpoint: .*--skip-checks"):
        raised(found)


def test_shifted_rows_of_a_teacher_are_found() -> None:
    def wrap(engines: Engines) -> Engines:
        return replace(engines, scorers={name: (Shifted(s[0]),) for name, s in engines.scorers.items()})

    found = examined(config(), wrap, at_the_start)
    assert [finding.ok for finding in found] == [True, False]
    assert "the rows are shifted by one token" in found[1].fix


def test_a_load_that_was_skipped_and_lied_about_is_found() -> None:
    def wrap(engines: Engines) -> Engines:
        sampler, export = NotLoaded(engines.samplers[0]), engines.learner.export

        async def exported() -> Any:
            weights, sampler.expected = await export()
            return weights, sampler.expected

        engines.learner.export = exported  # type: ignore[method-assign]
        return replace(engines, samplers=(sampler,))

    found = examined(config(), wrap, arrival)
    assert [finding.ok for finding in found] == [True, False]
    assert found[1].name == "sampler and learner, after a publish"
    assert found[1].fix.startswith("weights that were published are not what runs")


def test_a_load_that_was_skipped_is_told_by_the_fingerprint() -> None:
    def wrap(engines: Engines) -> Engines:
        return replace(engines, samplers=(Forgetful(engines.samplers[0]),))

    with pytest.raises(ModelError, match="sampler runs weights 0123456789abcdef, the learner exported .* the student"):
        examined(config(), wrap, at_the_start)


def test_a_swapped_tokenizer_is_named_by_its_first_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "teacher"
    shutil.copytree(model_path("builtin:teacher"), other)
    text = (other / "tokenizer.json").read_text()
    assert '"3": ' in text and '"4": ' in text
    (other / "tokenizer.json").write_text(
        text.replace('"3": ', '"#": ').replace('"4": ', '"3": ').replace('"#": ', '"4": ')
    )
    changes = [f"--{name}={value}" for name, value in [*INLINE, ("teachers.main.model", str(other))]]
    assert main(["doctor", *changes]) == 1
    out = capsys.readouterr().out.replace("\n", " ")
    assert "FAIL stopped" in out and "have different tokenizers: id" in out and "1 of 1 checks failed" in out


def test_the_doctor_finds_nothing_in_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *(f"--{name}={value}" for name, value in INLINE)]) == 0
    out = capsys.readouterr().out
    assert "sampler and learner, after a publish" in out and "all is well" in out and "FAIL" not in out
    assert "a teacher equal to the student teaches nothing: largest difference of a log-prob 0" in out


def test_a_policy_loss_without_a_teacher_is_examined_too() -> None:
    settings = load(Path(__file__).parents[1] / "configs" / "decoupled.toml", INLINE, say=str)
    assert by_itself(plan(settings)) is None
    assert doctor(settings, QUIET)
    group = [Handle(replace(header, rewards={}), None) for header in [_header(0), _header(1)]]
    assert [handle.header.rewards for handle in rewarded(settings, group)] == [{"exact": 0.0}, {"exact": 1.0}]
    against_greedy = settings.model_copy(update={"policy": PolicyConfig(advantage="remax")})
    assert rewarded(against_greedy, group)[1].header.rewards == {"exact": 1.0, "greedy_exact": 0.5}


def _header(index: int) -> Any:
    from slipstream.records import Header

    return Header(
        prompt="p",
        number=0,
        index=index,
        episode=index,
        data_source="d",
        prompt_tokens=1,
        tokens=1,
        versions=((0, 1),),
        finish="eos",
    )


def test_train_tries_its_engines_before_it_writes_and_can_be_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any, **options: Any) -> Engines:
        engines = open_engines(*args, **options)
        return replace(engines, samplers=tuple(OtherTemperature(sampler) for sampler in engines.samplers))

    monkeypatch.setattr(inline, "open_engines", wrong)
    settings = config(("updates", "1"), ("learner.batch_size", "8"), ("output", str(tmp_path / "run")))
    settings = settings.model_copy(update={"eval": settings.eval.model_copy(update={"every": 0})})
    with pytest.raises(CheckFailed):
        launch.train(settings, QUIET, name="x")
    assert not (tmp_path / "run").exists()
    assert launch.train(settings, QUIET, name="x", checks=False) == tmp_path / "run"


# --- placement --------------------------------------------------------------------------------------------------------


def test_memory_is_worked_out_from_the_config() -> None:
    settings = config(("sampler.longest", "200"))
    learner, sampler, teacher = plan(settings).needs
    parameters = learner.parts["weights"] / 4
    assert 130_000 < parameters < 150_000, "the student of the demo"
    assert learner.parts["gradients"] == parameters * 4 and learner.parts["moments"] == parameters * 8
    assert sampler.parts["weights"] == parameters * 4 and teacher.name == "teacher main"
    halves = plan(config(("learner.ranks", "2"), ("runtime.kind", "ray"), ("learner.lora.rank", "4"))).needs
    assert [need.name for need in halves[:2]] == ["learner-0", "learner-1"]
    assert halves[0].parts["weights"] == parameters * 2 and halves[0].parts["moments"] < parameters


def test_what_does_not_fit_is_said() -> None:
    findings = room(plan(config(("sampler.slots", "100000000"))))
    assert not findings[-1].ok and "in all, there are" in findings[-1].said and "sampler.slots" in findings[-1].fix

"""Planted faults in real engines: each is found, and named with its cause."""

import asyncio
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from slipstream.cli import main
from slipstream.commands.doctor import check_publish, doctor, memory_findings, self_taught_plan, with_rewards
from slipstream.config.file import load, parse
from slipstream.config.objective import PolicyConfig
from slipstream.config.schema import Config
from slipstream.engines.score_checks import Probed, scored
from slipstream.errors import ConfigError, ModelError
from slipstream.models.resolve import DEMO, model_path
from slipstream.plan.checks import (
    PROMPTS,
    CheckFailed,
    Finding,
    agreement,
    episode_finding,
    failure_findings,
    raise_fatal,
    start_checks,
)
from slipstream.plan.plan import Plan, plan, plan_with_texts, with_known_texts
from slipstream.protocols import Engines, Loaded, Sampling
from slipstream.records import Handle
from slipstream.runs import start as launch
from slipstream.runtimes import inline
from slipstream.runtimes.inline import open_engines
from support.sandboxes import NO_BUBBLEWRAP

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


class Lying(Probed, Fault):
    """Says something else than the teacher."""

    def __init__(self, engine: Any, lie: Callable[..., np.ndarray], prompt: Any = lambda tokens: tokens) -> None:
        """Score with another prompt, and change the log-probs; a lie about some tokens gets their ids, too."""
        super().__init__(engine)
        self.lie, self.prompt = lie, prompt

    def shown(self, handle: Handle) -> Handle:
        rollout = handle.body
        return replace(
            handle, body=replace(rollout, prompt=replace(rollout.prompt, tokens=self.prompt(rollout.prompt.tokens)))
        )

    async def score(self, group: Any) -> Any:
        honest = zip(group, await self.engine.score([self.shown(handle) for handle in group]), strict=True)
        lies = [(rolled, self.told(scored.body)) for rolled, scored in honest]
        return [
            scored(rolled, teacher="main", teacher_logp=logp_NM[:, 0], teacher_action_logp=logp_NM)
            for rolled, logp_NM in lies
        ]

    def told(self, body: Any) -> np.ndarray:
        logp_NM = body.teacher_action_logp.copy()
        return hates(logp_NM, body.rollout.actions) if self.lie is hates else self.lie(logp_NM)


def noise(logp_NM: np.ndarray) -> np.ndarray:
    return -np.random.default_rng(np.abs(logp_NM[0]).view(np.uint32)).exponential(size=logp_NM.shape)


def one_clamped(logp_NM: np.ndarray) -> np.ndarray:
    logp_NM[0] = -9999
    return logp_NM


LIES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "shifted": (lambda logp: np.roll(logp, 1, axis=0), "the rows are shifted by one token"),
    "zeros": (np.zeros_like, "mean reverse KL to it -0.* and no distribution is below 0"),
    "constant": (lambda logp: np.full_like(logp, -2.0), "it gives the same score to every token"),
    "noise": (noise, "its scores are not of these tokens"),
    "negated": (lambda logp: -logp, "cannot be learned from, as teacher main gives token .* which is above 0"),
    "upside down": (lambda logp: np.log1p(-np.exp(logp) + 1e-3), "add up to .* of the opposite sign"),
    "clamped": (
        one_clamped,
        "answers cannot be learned from, as .* a log-prob of -9999, which is a placeholder for an unknown log-prob",
    ),
    "not in float32": (lambda logp: np.full(logp.shape, -1e300), "is not a usable number"),
}
"""Scores of a faulty teacher, and the message about them."""


EOS = 1


def hates(logp: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return logp - 5.0 * (ids == EOS)


FALSE: dict[str, tuple[Callable[..., np.ndarray], Callable[..., np.ndarray]]] = {
    "times 3": (lambda logp: 3 * logp, np.copy),
    "divided by 3": (lambda logp: logp / 3, np.copy),
    "plus 0.5": (lambda logp: np.minimum(logp + 0.5, 0), np.copy),
    "minus 0.5": (lambda logp: logp - 0.5, np.copy),
    "hates the end token": (hates, np.copy),
    "another prompt": (lambda logp: logp, lambda tokens: np.concatenate([tokens[:1], tokens])),
    "behind the texts of a canary": (lambda logp: np.concatenate([logp[:24], logp[24:] * 1.5]), np.copy),
    "the end of the long text": (lambda logp: np.concatenate([logp[:70], logp[70:] - 3.0]), np.copy),
}
"""Scores of a lying teacher in place of its log-probs, and the prompt that it sees."""


def examined(settings: Config, wrap: Any, check: Any) -> list[Finding]:
    job = plan_with_texts(settings)
    engines = open_engines(job.engines, job.tokenizer, say=str)
    try:
        prompts = [job.prompts.at(number) for number in range(PROMPTS)]
        found: list[Finding] = asyncio.run(check(job, wrap(engines), prompts))
        return found
    finally:
        engines.close()


async def at_the_start(made: Plan, engines: Engines, prompts: Any) -> list[Finding]:
    return await start_checks(made, engines, prompts, version=0)


def test_engines_that_agree_are_found_to() -> None:
    found = examined(config(), lambda engines: engines, at_the_start)
    assert all(finding.ok for finding in found)
    pearson = float(found[0].detail.split()[1].strip(","))
    assert pearson >= 0.9999
    raise_fatal(found)


def test_another_temperature_in_the_sampler_is_found() -> None:
    def wrap(engines: Engines) -> Engines:
        return replace(engines, samplers=tuple(OtherTemperature(sampler) for sampler in engines.samplers))

    found = examined(config(), wrap, at_the_start)
    assert not found[0].ok and "check temperatures" in found[0].fix
    with pytest.raises(CheckFailed, match="sampler and learner, one checkpoint: .*--skip-checks"):
        raise_fatal(found)


COARSE = {"probs_pearson": 0.98, "k3_kl": 0.2, "ppl_ratio": 1.1, "sharpness": 1.02, "probs_diff_max": 0.4}


@pytest.mark.parametrize(
    "rounding, changes, same",
    [
        ("half", {}, True),
        ("exact", {}, False),
        ("half", {"k3_kl": 0.4}, False),
        ("half", {"ppl_ratio": 1.3}, False),
        ("half", {"sharpness": 0.7}, False),  # another temperature
        ("half", {"probs_pearson": 0.9}, False),
    ],
)
def test_rounding_of_a_sensitive_student_is_named_as_rounding(
    rounding: Any, changes: dict[str, float], same: bool
) -> None:
    numbers = {f"drift/{name}": value for name, value in (COARSE | changes).items()}
    (found,) = agreement(numbers, rounding, [[Handle(_header(0), None)]])
    assert found.ok is same and ("16 bits round this student coarsely" in found.detail) is same


@pytest.fixture(scope="module")
def opened() -> Iterator[tuple[Plan, Engines]]:
    job = plan_with_texts(config())
    engines = open_engines(job.engines, job.tokenizer, say=str)
    yield job, engines
    engines.close()


@pytest.mark.parametrize("lie", LIES)
def test_a_teacher_that_lies_is_found_out_before_a_run(lie: str, opened: tuple[Plan, Engines]) -> None:
    job, engines = opened
    told, said = LIES[lie]
    lying = replace(engines, scorers={name: (Lying(s[0], told),) for name, s in engines.scorers.items()})
    found = asyncio.run(at_the_start(job, lying, [job.prompts.at(number) for number in range(PROMPTS)]))
    assert [finding.ok for finding in found] == [True, False, True]
    with pytest.raises(CheckFailed, match=f"^teacher main: .*{said}.*--skip-checks"):
        raise_fatal(found)


@pytest.mark.parametrize("lie", FALSE)
def test_false_log_probs_are_found_by_a_forward_pass(lie: str, opened: tuple[Plan, Engines]) -> None:
    job, engines = opened
    assert EOS in job.end_ids and job.sampling.max_tokens > 70
    lying = replace(engines, scorers={name: (Lying(s[0], *FALSE[lie]),) for name, s in engines.scorers.items()})
    found = asyncio.run(at_the_start(job, lying, [job.prompts.at(number) for number in range(PROMPTS)]))
    why = (
        "add up to .* these are no log-probs"
        if lie == "divided by 3"
        else "away from a forward pass of builtin:teacher"
    )
    with pytest.raises(CheckFailed, match=f"^teacher main: .*{why}"):
        raise_fatal(found)


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantised_weights_are_found(bits: int, dtype: str) -> None:
    def coarse(engines: Engines) -> Engines:
        for weight in engines.scorers["main"][0].lm.model.parameters():  # type: ignore[attr-defined]
            if weight.ndim == 2:
                step = weight.data.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
                weight.data = (weight.data / step).round() * step
        return engines

    found = examined(config(("teachers.main.dtype", dtype)), coarse, at_the_start)
    with pytest.raises(CheckFailed, match="away from a forward pass of builtin:teacher here"):
        raise_fatal(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("student", ["builtin:student", "random"])
@pytest.mark.parametrize("loss", ["reverse_kl_mc", "forward_kl", "reverse_kl"])
def test_an_honest_teacher_passes_whatever_the_student_writes(
    dtype: str, student: str, loss: str, tmp_path: Path
) -> None:
    if student == "random":
        shutil.copytree(model_path("builtin:student"), student := str(tmp_path / "random"))
        weights = load_file(f"{student}/model.safetensors")
        generator = torch.Generator().manual_seed(0)
        save_file(
            {name: torch.randn(w.shape, generator=generator) * 0.3 for name, w in weights.items()},
            f"{student}/model.safetensors",
            metadata={"format": "pt"},
        )
    settings = config(("student", student), ("teachers.main.dtype", dtype), ("loss.kind", loss))
    found = examined(settings, lambda engines: engines, at_the_start)
    assert all(finding.ok for finding in found), found
    assert ("[sft] first helps" in found[1].detail) is (student != "builtin:student")


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_short_answers_accuse_nobody(opened: tuple[Plan, Engines], most: int) -> None:
    job, engines = opened
    short = with_known_texts(replace(job, sampling=replace(job.sampling, max_tokens=most)))
    found = asyncio.run(at_the_start(short, engines, [job.prompts.at(number) for number in range(PROMPTS)]))
    raise_fatal(found)
    assert found[1].ok is (most > 2)


def test_a_load_that_was_skipped_and_lied_about_is_found() -> None:
    def wrap(engines: Engines) -> Engines:
        sampler, export = NotLoaded(engines.samplers[0]), engines.learner.export

        async def exported() -> Any:
            weights, sampler.expected = await export()
            return weights, sampler.expected

        engines.learner.export = exported  # type: ignore[method-assign]
        return replace(engines, samplers=(sampler,))

    found = examined(config(), wrap, check_publish)
    assert [finding.ok for finding in found] == [True, False]
    assert found[1].name == "sampler and learner, after a publish"
    assert found[1].fix.startswith("the sampler does not run the published weights")


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
    assert "sampler and learner, after a publish" in out and "all checks passed" in out and "FAIL" not in out
    assert "a teacher equal to the student teaches nothing: largest difference of a log-prob 0" in out


def test_a_policy_loss_without_a_teacher_is_examined_too() -> None:
    settings = load(Path(__file__).parents[2] / "configs" / "decoupled.toml", INLINE, say=str)
    assert self_taught_plan(plan(settings)) is None
    assert doctor(settings, QUIET)
    group = [Handle(replace(header, rewards={}), None) for header in [_header(0), _header(1)]]
    assert [handle.header.rewards for handle in with_rewards(settings, group)] == [
        {"exact": 0.0},
        {"exact": 1.0},
    ]
    against_greedy = settings.model_copy(update={"policy": PolicyConfig(advantage="remax")})
    assert with_rewards(against_greedy, group)[1].header.rewards == {"exact": 1.0, "greedy_exact": 0.5}


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


@pytest.mark.parametrize(
    ("kinds", "fatal"),
    [
        (["crash", "", "timeout", ""], False),
        (["crash", "crash", "timeout", "crash"], True),
        (["error", "", "", ""], True),
        ([""], None),
    ],
)
def test_a_run_may_begin_without_some_rows_but_not_with_an_environment_that_raises(
    kinds: list[str], fatal: bool | None
) -> None:
    ended = [replace(_header(0), finish="error", outcome={f"failed/{kind}": 1.0}, cause="why") for kind in kinds]
    headers = [header if kind else _header(0) for header, kind in zip(ended, kinds, strict=True)]
    found = failure_findings([[Handle(header, None)] for header in headers])
    assert [finding.fatal for finding in found] == ([] if fatal is None else [fatal])
    assert all(not finding.ok and "episodes failed in every attempt: why" in finding.detail for finding in found)


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([(2, 2), (1, 1)], "; none of the 3 calls is valid: if the student does not know their format, [sft] first"),
        ([(2, 2), (2, 1)], ""),
        ([(0, 0), (0, 0)], ""),
    ],
)
def test_the_doctor_says_if_no_call_of_the_student_is_valid(calls: list[tuple[int, int]], said: str) -> None:
    outcomes = [{"turns": 1.0, "calls": float(made), "invalid": float(invalid)} for made, invalid in calls]
    found = episode_finding([replace(_header(0), number=i, outcome=each) for i, each in enumerate(outcomes)])
    assert found.ok and said in found.detail and ("none of the" in found.detail) is bool(said)


def test_train_tries_its_engines_before_it_writes_and_can_be_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any, **options: Any) -> Engines:
        engines = open_engines(*args, **options)
        return replace(engines, samplers=tuple(OtherTemperature(sampler) for sampler in engines.samplers))

    monkeypatch.setattr(inline, "open_engines", wrong)
    settings = config(("updates", "1"), ("learner.batch_size", "8"), ("output", str(tmp_path / "run")))
    off = {
        "eval": settings.eval.model_copy(update={"every": 0}),
        "health": settings.health.model_copy(update={"canary": 0}),
    }
    settings = settings.model_copy(update=off)
    with pytest.raises(CheckFailed):
        launch.train(settings, QUIET, name="x")
    assert not (tmp_path / "run").exists()
    assert launch.train(settings, QUIET, name="x", checks=False) == tmp_path / "run"


# --- placement --------------------------------------------------------------------------------------------------------


def test_memory_is_worked_out_from_the_config() -> None:
    settings = config(("sampler.max_length", "150"))
    learner, sampler, teacher = plan(settings).needs
    parameters = learner.parts["weights"] / 4
    assert 130_000 < parameters < 150_000, "the student of the demo"
    assert learner.parts["gradients"] == parameters * 4 and learner.parts["moments"] == parameters * 8
    assert sampler.parts["weights"] == parameters * 4 and teacher.name == "teacher main"
    halves = plan(config(("learner.ranks", "2"), ("runtime.kind", "ray"), ("learner.lora.rank", "4"))).needs
    assert [need.name for need in halves[:2]] == ["learner-0", "learner-1"]
    assert halves[0].parts["weights"] == parameters * 2 and halves[0].parts["moments"] < parameters


def test_weights_of_versions_before_count_where_they_are_kept() -> None:
    """They lie in host memory, which here is that of the engines."""
    tree: dict[str, Any] = {
        "student": "builtin:student",
        "teachers": {
            "self": {"model": "self", "context": "{last}{prompt}", "follow": {"copy_every": 2}, "relabel": "stale"}
        },
        "schedule": {"kind": "async", "tau": 3},
        "learner": {"snapshots": 4, "exact_drift": True},
        "sampler": {"max_tokens": 40},
        "runtime": {"device": "cpu"},
    }
    learner, _, teacher = plan(parse(tree)).needs
    assert teacher.parts["~versions before"] == (3 // 2 + 2) * teacher.parts["weights"]
    # four snapshots, the followed version, and the learner's own weights while a pass has others
    assert learner.parts["versions before"] == (4 + 1 + 1) * learner.parts["weights"]
    learner, _, _ = plan(parse(tree | {"freshness": {}})).needs
    assert learner.parts["versions before"] == (4 + 1 + 1 + 3 // 2 + 1) * learner.parts["weights"], (
        "earlier teachers, too"
    )


def test_what_does_not_fit_is_said() -> None:
    """Exact needs beyond the memory are refused; activations are an estimate."""
    findings = memory_findings(plan(config(("learner.token_budget", "10000000000"), ("learner.batch_size", "40000"))))
    assert not findings[-1].ok and re.search(
        r"learner: .*, and its device has .*learner.token_budget", findings[-1].detail
    )
    with pytest.raises(ConfigError, match=r"^sampler: .* GiB .*, and its device has .*: lower sampler.slots"):
        plan(config(("sampler.slots", "100000000")))


@pytest.mark.processes
def test_the_doctor_plays_whole_episodes_and_says_why_an_environment_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text(
        "from slipstream.environments.builtin import Table\n\n\n"
        "class Broken(Table):\n    def start(self, meta, sandbox):\n        super().start(meta)\n\n"
        "    def close(self):\n        raise OSError('the shop is shut')\n"
    )
    tools = str(Path(__file__).parents[2] / "configs" / "tools.toml")
    asked = ["doctor", tools, "--runtime.kind", "inline", "--runtime.device", "cpu"]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert re.search(r"ok   environment: 8 whole episodes: \d\.\d turns, .* for tools; ended by eos \d", said)
    assert "ok   rewards of these: exact " in said
    assert "sandbox limits" not in said
    where = "none" if NO_BUBBLEWRAP else "bubblewrap"
    assert main([*asked, "--environment.use", f"{tmp_path}/broken.py:Broken", "--environment.sandbox", where]) == 1
    said = capsys.readouterr().out
    assert ("ok   sandbox limits: sandbox: " in said) is (not NO_BUBBLEWRAP)
    assert "FAIL environment: 8 of 8 episodes failed in every attempt: close raised OSError: the shop is shut" in said

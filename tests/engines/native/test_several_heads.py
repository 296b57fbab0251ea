"""Losses over the whole vocabulary with several teachers, and with teachers whose weights follow the student's."""

import asyncio
import copy
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from slipstream.config.file import parse
from slipstream.config.learner import LearnerConfig, LoraConfig
from slipstream.config.losses import JSD, ForwardKL, ReverseKL
from slipstream.data.arithmetic import problems
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.engines.native.model import LanguageModel, with_adapters
from slipstream.estimators.divergence import dense
from slipstream.objective.distillation import TeacherHead
from slipstream.objective.method import Method
from slipstream.protocols import Follower
from slipstream.records import Batch, Group, Scored, total
from slipstream.run_dir.writing import read_lines
from slipstream.runs.start import train
from support.engines import native_learner, native_scorer
from support.learners import roll_out, score
from support.tiny_models import SHAPE, VOCAB, logits_of, make_model, wrap

LOSSES = {"reverse": ReverseKL(), "forward": ForwardKL(cache="hidden", temperature=1.5), "jsd": JSD(cache="hidden")}


def wide_teacher() -> PreTrainedModel:
    """A teacher with another width and more embeddings than the student."""
    torch.manual_seed(5)
    config = LlamaConfig(**SHAPE | {"hidden_size": 48, "vocab_size": VOCAB + 5})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


TEACHERS = {"a": lambda: make_model("phi", seed=2, dtype=torch.float64), "b": wide_teacher}


def scored_by(name: str, groups: list[Group], loss: Any) -> list[Group]:
    return score(TEACHERS[name](), groups, name=name, cache="hidden", temperature=loss.temperature, vocabulary=VOCAB)


def learner_of(student: PreTrainedModel, loss: Any, names: str, token_budget: int = 10_000) -> NativeLearner:
    heads = {name: TeacherHead(wrap(TEACHERS[name]()).head) for name in names}
    config = LearnerConfig(dtype="float64", token_budget=token_budget)
    method = Method(loss=loss, teachers=dict.fromkeys(names, 1.0))
    return native_learner(wrap(student), method=method, config=config, updates=1, teacher_heads=heads)


def gradients(learner: NativeLearner, groups: list[Group], n_tokens: int) -> dict[str, Tensor]:
    async def work() -> None:
        batch = Batch(tuple(groups), 1)
        await learner.accumulate(batch, replace(total(await learner.prepare(batch)), n_tokens=n_tokens))

    asyncio.run(work())
    learner.close()
    return {name: p.grad for name, p in learner.lm.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("token_budget", [30, 10_000])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_two_teachers_train_as_two_single_runs_do(loss: Any, token_budget: int) -> None:
    """Prompts of both teachers are mixed in every micro-batch; the gradient is the sum of those of single teachers."""
    student = make_model(seed=1, dtype=torch.float64)
    groups = roll_out(make_model(seed=0))
    own = {name: scored_by(name, groups[start::2], loss) for start, name in enumerate(TEACHERS)}
    mixed = [group for pair in zip(own["a"], [*own["b"], []], strict=True) for group in pair if group]
    n_tokens = sum(int(handle.body.rollout.loss_mask.sum()) for group in mixed for handle in group)
    found = gradients(learner_of(student, loss, "ab", token_budget), mixed, n_tokens)
    single = [gradients(learner_of(student, loss, name, token_budget), own[name], n_tokens) for name in own]
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, single[0][name] + single[1][name], rtol=1e-9, atol=1e-12)
    assert all(each[name].abs().max() > 1e-4 for each in single for name in ("model.norm.weight",))


# --- a teacher that follows the student -------------------------------------------------------------------------------


def student(model: str, lora: LoraConfig | None) -> LanguageModel:
    lm = wrap(make_model(model, dtype=torch.float64))
    return lm if lora is None else with_adapters(lm, lora, seed=3)


def follower_of(model: str, lora: LoraConfig | None) -> NativeLearner:
    config = LearnerConfig(lr=1e-2, dtype="float64", lora=lora)
    follow = {"me": Follower(0.5, 1, "float64", keep=2)}
    return native_learner(
        student(model, lora), method=Method(loss=ReverseKL()), config=config, updates=9, follow=follow
    )


def plain(lm: LanguageModel) -> PreTrainedModel:
    """A copy with the attention of transformers, which needs no rows."""
    model = copy.deepcopy(lm.model)
    model.set_attn_implementation("eager")
    return model


def expected_loss(lm: LanguageModel, teachers: dict[int, PreTrainedModel], samples: list[Scored]) -> Tensor:
    parts = []
    for sample in samples:
        (logits,), (theirs,) = (logits_of(each, [sample]) for each in (plain(lm), teachers[sample.teacher_version]))
        parts.append(dense(logits.log_softmax(-1), theirs.log_softmax(-1), kind="reverse"))
    return torch.cat(parts).mean()


@pytest.mark.parametrize(
    ("model", "lora"),
    [("phi", None), ("qwen3", None), ("qwen3", LoraConfig(rank=2))],
    ids=["head with a bias", "tied head", "lora"],
)
def test_the_head_is_that_of_the_version_that_sent_the_hidden_states(
    model: str, lora: LoraConfig | None, tmp_path: Path
) -> None:
    """Samples of three versions are in one batch, also after a resume. The teacher's logits are those of its model."""
    made, again = follower_of(model, lora), follower_of(model, lora)
    scorer = native_scorer(student(model, lora), name="me", cache="hidden")
    groups, teachers, in_flight = roll_out(make_model(seed=7)), dict[int, PreTrainedModel](), list[Group]()

    async def update(learner: NativeLearner, groups: list[Group], number: int) -> float:
        batch = Batch(tuple(groups), number)
        await learner.accumulate(batch, total(await learner.prepare(batch)))
        return float((await learner.step())["loss"])

    async def work() -> None:
        for number in range(3):
            await scorer.publish((await made.export("me"))[0])
            teachers[number] = plain(scorer.lm)
            in_flight.append(await scorer.score(groups[number]))
            if number < 2:
                await update(made, [await scorer.score(groups[5 + number])], number + 1)
        await made.save(tmp_path, in_flight)
        unfinished = list(await again.restore(tmp_path))
        samples = [handle.body for group in in_flight for handle in group]
        with torch.no_grad():
            expected = expected_loss(made.lm, teachers, samples)
            one_head = expected_loss(made.lm, dict.fromkeys(teachers, teachers[2]), samples)
        for learner, its in ((made, in_flight), (again, unfinished)):
            assert await update(learner, its, 3) == pytest.approx(float(expected), rel=1e-6)
            assert set(learner.heads) == {("me", version) for version in range(3)}
        assert abs(float(one_head - expected)) > 1e-4 * float(expected), "the versions differ"

    asyncio.run(work())
    for each in (made, again, scorer):
        each.close()


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_run_learns_whole_distributions_of_a_constant_teacher_and_of_one_that_follows(tmp_path: Path) -> None:
    short = [question for question, _ in problems("train", 40) if len(question) < 12]
    rows = [{"prompt": each, "answer": "0", "data_source": "xy"[i % 2]} for i, each in enumerate(short)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = parse(
        {
            "student": "builtin:student",
            "updates": 3,
            "output": str(tmp_path / "run"),
            "data": {"train": str(tmp_path / "rows.jsonl")},
            "teachers": {
                "x": {"model": "builtin:teacher"},
                "y": {"model": "self", "context": "{ground_truth}{prompt}", "follow": {"ema": 0.9}},
            },
            "loss": {"kind": "reverse_kl"},
            "sampler": {"max_tokens": 20},
            "learner": {"batch_size": 16},
            "schedule": {"kind": "async", "tau": 2},
            "runtime": {"kind": "inline", "device": "cpu"},
        }
    )
    path = train(config, Console(file=io.StringIO()), name="heads")
    lines = [line for line in read_lines(path / "metrics.jsonl") if line["kind"] == "train"]
    for name in "xy":
        assert all(0 < line[f"teacher/{name}/loss"] < 5 for line in lines if line[f"teacher/{name}/share"])
    assert len(lines) == 3

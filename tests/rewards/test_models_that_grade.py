"""Rewards from models: a reward model in its own process, and a judge behind an endpoint."""

import asyncio
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from slipstream.config.file import parse
from slipstream.data.tokenizers import load_tokenizer
from slipstream.engines.http import client
from slipstream.engines.http.judge import Judge, JudgeEndpoint, as_text, message_of
from slipstream.engines.native.reward_model import encode
from slipstream.engines.native.reward_process import RewardModel
from slipstream.errors import ConfigError
from slipstream.grades import ENDPOINT_DOWN, Grades, Ungraded
from slipstream.plan.plan import fast_checks, plan
from slipstream.rewards.functions import Answer, Unusable
from slipstream.run_dir.writing import read_lines
from slipstream.runs.start import resume, train
from support.fake_endpoint import FakeEndpoint, table

TREE: dict[str, Any] = {
    "student": "builtin:student",
    "updates": 2,
    "loss": {"weight": 0.0},
    "data": {"limit": 24},
    "sampler": {"max_tokens": 8, "group": 4},
    "learner": {"batch_size": 8},
    "policy": {"loss": "vanilla"},
    "schedule": {"kind": "sync"},
    "runtime": {"kind": "inline", "device": "cpu"},
}
PROMPT = "Question: {prompt}\nAnswer: {response}\nRight: {ground_truth}\nRate it."


def answer(text: str, truth: Any = None) -> Answer:
    fields: dict[str, Any] = {"messages": [], "tokens": [1], "prompt": "?", "meta": {}, "data_source": "default"}
    return Answer(text=text, ground_truth=truth, finish="eos", outcome={}, **fields)


def reward_model(path: Path, *, labels: int = 1) -> Path:
    """A tiny Llama with one label and random weights, and the tokenizer of the built-in student."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer("builtin:student")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        num_labels=labels,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForSequenceClassification(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def settings_of(path: Path, **changes: Any) -> RewardModel:
    given: dict[str, Any] = {"max_length": 32, "batch": 3, "dtype": "float32", "device": "cpu", "timeout": 60.0}
    return RewardModel(path=str(path), **given | changes)


def asked(grader: Any, *pairs: tuple[Any, Answer]) -> list[Grades]:
    try:
        return asyncio.run(grader.grades(pairs))
    finally:
        grader.close()


class Fatal:
    """Ends the process that receives it."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


# --- a reward model ---------------------------------------------------------------------------------------------------


def test_a_batch_has_the_scores_of_single_responses_and_counts_what_is_too_long(tmp_path: Path) -> None:
    path = reward_model(tmp_path / "rm")
    texts = ["1", "22", "3" * 20, "4444", "5" * 40]
    found = asked(settings_of(path).open(), *(("A1B2=", answer(text)) for text in texts))
    tokenizer, lm = load_tokenizer(str(path)), AutoModelForSequenceClassification.from_pretrained(path).eval()
    for text, grades in zip(texts[:4], found, strict=False):
        ids = torch.tensor([encode(tokenizer, "A1B2=", text)])
        assert isinstance(grades, dict) and list(grades) == ["model"]
        assert grades["model"] == pytest.approx(lm(input_ids=ids).logits.item(), abs=1e-6)
    assert len({grades["model"] for grades in found[:4] if isinstance(grades, dict)}) == 4
    assert isinstance(found[4], Ungraded) and found[4].cause == "length"
    assert "tokens, more than task.model.max_length = 32" in found[4].text


def test_a_chat_template_writes_the_conversation() -> None:
    tokenizer = load_tokenizer("builtin:tool_student")
    messages = [{"role": "user", "content": "12?"}]
    ids = encode(tokenizer, messages, "34")
    assert ids == encode(tokenizer, "12?", "34")
    both = [*messages, {"role": "assistant", "content": "34"}]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(both, tokenize=False)


def test_a_reward_model_that_dies_leaves_a_group_ungraded_and_comes_back(tmp_path: Path) -> None:
    grader = settings_of(reward_model(tmp_path / "rm")).open()

    async def work() -> list[list[Grades]]:
        found = [await grader.grades([("1", answer("2"))])]
        found.append(await grader.grades([("1", answer(Fatal()))]))  # type: ignore[arg-type]
        return [*found, await grader.grades([("1", answer("2"))])]

    first, lost, again = asyncio.run(work())
    grader.close()
    assert (
        isinstance(lost[0], Ungraded)
        and lost[0].cause == "crash"
        and "ended its process: exit status 3" in lost[0].text
    )
    assert first == again and isinstance(first[0], dict)


@pytest.mark.parametrize(
    ("labels", "task", "line"),
    [
        (2, {}, "has 2 labels: a reward model has one"),
        (1, {"max_length": 65}, "task.model.max_length = 65 exceeds the context of 64"),
        (0, {}, "holds Qwen3ForCausalLM: a reward model is one for sequence classification"),
    ],
)
def test_another_model_is_refused(labels: int, task: dict[str, Any], line: str, tmp_path: Path) -> None:
    path = str(reward_model(tmp_path / "rm", labels=labels)) if labels else "builtin:student"
    config = parse(TREE | {"task": {"reward": "model", "model": {"path": path, **task}}})
    with pytest.raises(ConfigError) as caught:
        fast_checks(config)
    assert line in str(caught.value)


# --- a judge ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "REQUEST_PAUSES", (0.01, 0.01))
    monkeypatch.setattr(client, "PROBE_PAUSES", (0.01, 0.02))
    monkeypatch.setattr(client, "MAX_OUTAGE", 0.5)


def endpoint(says: Any) -> FakeEndpoint:
    return FakeEndpoint(table(np.zeros((2, 2))), name="judge", says=says)


def judge(fake: FakeEndpoint, **changes: Any) -> Any:
    at = JudgeEndpoint(teacher="", url=fake.url, model=fake.name, concurrency=2, timeout=5.0)
    given: dict[str, Any] = {"prompt": PROMPT, "pattern": r"score: (-?[\d.]+)", "key": None, "max_tokens": 9}
    return Judge(endpoint=at, **given | changes).open()


@pytest.mark.parametrize(("finish", "advice"), [("length", "; raise task.judge.max_tokens"), ("content_filter", "")])
def test_a_judge_that_was_cut_off_has_given_no_score(finish: str, advice: str) -> None:
    with endpoint(lambda _: "clarity has the score: 1") as fake:
        fake.finish = finish
        (found,) = asked(judge(fake), ("2+2", answer("4", 4)))
    line = f"the judge was cut off (finish_reason '{finish}'){advice}: 'clarity has the score: 1'"
    assert found == Ungraded("type", line)


def test_an_answer_of_a_judge_may_have_no_text_or_another_reason() -> None:
    choice: dict[str, Any] = {"message": {"content": None}, "finish_reason": "length"}
    with pytest.raises(Unusable, match="was cut off .*; raise task.judge.max_tokens: it says nothing"):
        message_of({"choices": [choice]})
    assert (
        message_of({"choices": [{"message": {"content": "score: 1"}, "finish_reason": {"type": "stop"}}]}) == "score: 1"
    )


def test_a_judge_reads_the_template_and_its_last_score_counts() -> None:
    with endpoint(lambda text: f"score: 1, no, score: {len(text)}") as fake:
        found = asked(judge(fake), ("2+2", answer("4", 4)), ("2+2", answer("five", 4)))
    texts = [f"Question: 2+2\nAnswer: {text}\nRight: 4\nRate it." for text in ("4", "five")]
    assert found == [{"judge": float(len(text))} for text in texts]
    assert sorted(body["messages"][0]["content"] for body in fake.requests) == sorted(texts)
    assert fake.most <= 2 and all(body["temperature"] == 0 and body["max_tokens"] == 9 for body in fake.requests)


@pytest.mark.parametrize(
    ("said", "how", "grades"),
    [
        ('Well: {"why": "x", "score": 0.5}', {"pattern": None, "key": "score"}, {"judge": 0.5}),
        ("[1]", {"pattern": None, "key": "score"}, "says no JSON object with the key 'score': '[1]'"),
        ('{"score": null}', {"pattern": None, "key": "score"}, "gives the score 'None', which is not a number"),
        (
            f'{{"score": 1{"0" * 400}}}',
            {"pattern": None, "key": "score"},
            f"gives the score '1{'0' * 79}', which is not a number",
        ),
        ('{"score": true}', {"pattern": None, "key": "score"}, "gives the score 'True', which is not a number"),
        ("good", {}, "says nothing that task.judge.pattern matches: 'good'"),
        ("score: 1.2.3", {}, "gives the score '1.2.3', which is not a number"),
        ("score: nan", {"pattern": "score: (.*)"}, "returned nan"),
    ],
)
def test_an_answer_without_a_score_is_no_score_of_0(said: str, how: dict[str, Any], grades: Any) -> None:
    with endpoint(lambda text: said) as fake:
        (found,) = asked(judge(fake, **how), ("?", answer("!")))
    if isinstance(grades, dict):
        assert found == grades
    else:
        assert found == Ungraded("nan" if "nan" in said else "type", f"the judge {grades}")


def test_short_failures_are_retried_and_long_ones_leave_the_answer_ungraded() -> None:
    with endpoint(lambda text: "score: 1") as fake:
        fake.tell("broken", "cut")
        assert asked(judge(fake), ("?", answer("!"))) == [{"judge": 1.0}]
        assert len(fake.requests) == 3
        fake.tell("refused")
        (refused,) = asked(judge(fake), ("?", answer("!")))
        fake.always = "broken"
        (down,) = asked(judge(fake), ("?", answer("!")))
        fake.always, fake.retry_after = "busy", None
        (busy,) = asked(judge(fake), ("?", answer("!")))
    for found, cause in ((refused, "refused"), (down, ENDPOINT_DOWN), (busy, ENDPOINT_DOWN)):
        assert isinstance(found, Ungraded) and found.cause == cause
        assert found.text.startswith(f"the judge at {fake.url} ")


def test_messages_are_shown_with_their_roles() -> None:
    assert as_text([{"role": "user", "content": "2+2"}]) == "2+2"
    assert as_text([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]) == "system: a\n\nuser: b"


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["model", "judge"])
def test_a_run_learns_from_it_and_resumes(kind: str, tmp_path: Path) -> None:
    with endpoint(lambda text: f"score: {text.count('1')}") as fake:
        sections: dict[str, Any] = {
            "model": {"path": str(reward_model(tmp_path / "rm"))},
            "judge": {"base_url": fake.url, "model": "judge", "prompt": PROMPT, "pattern": r"score: (\d+)"},
        }
        tree = TREE | {"task": {"reward": ["exact", kind], kind: sections[kind]}}
        whole = train(parse(tree | {"output": str(tmp_path / "whole")}), Console(file=io.StringIO()), name="whole")
        parts = {"output": str(tmp_path / "parts"), "updates": 1}
        path = train(parse(tree | parts), Console(file=io.StringIO()), name="parts")
        resume(path, Console(file=io.StringIO()), updates=2)
    lines, again = (
        [each for each in read_lines(run / "metrics.jsonl") if each["kind"] == "train"] for run in (whole, path)
    )
    assert [line[f"reward/{kind}"] for line in lines] == [line[f"reward/{kind}"] for line in again]
    assert all(line[f"reward/{kind}"] != 0 and not any("ungraded" in name for name in line) for line in lines)


@pytest.mark.parametrize(("fault", "accuracy"), [("broken", None), ("refused", 0.0)])
def test_an_evaluation_leaves_out_answers_whose_judge_is_down_and_counts_refused_ones_as_wrong(
    fault: Any, accuracy: float | None, tmp_path: Path
) -> None:
    asked_before = 6 + 8  # by the first evaluation and the only update

    def says(text: str) -> str:
        if len(fake.requests) == asked_before:
            fake.always = fault
        return "score: 1"

    console = Console(file=io.StringIO(), width=200)
    with endpoint(says) as fake:
        judged = {"base_url": fake.url, "model": "judge", "prompt": PROMPT, "pattern": r"score: (\d+)"}
        held_out = {"data": {"limit": 24, "eval": "builtin:arithmetic"}, "eval": {"every": 1, "prompts": 6}}
        tree = TREE | held_out | {"updates": 1, "task": {"reward": "judge", "judge": judged}}
        run = train(parse(tree | {"output": str(tmp_path / "run")}), console, name="run", checks=False)
    found = [line for line in read_lines(run / "metrics.jsonl") if line["kind"] == "eval"]
    assert [line["accuracy"] for line in found] == [1.0, *([] if accuracy is None else [accuracy])]
    what = "are missing and left out" if accuracy is None else "have no reward and count as wrong"
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"evaluation at update 1: 6 of 6 answers {what}, one of them because the judge at {fake.url} " in said


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"prompt": "{prompt}"}, "does not show the {response}"),
        ({"prompt": "{response} {truth}"}, "no field {truth}: there are {prompt}, {response} and {ground_truth}"),
        ({"pattern": r"\d+"}, "has no group for the score"),
        ({"key": "score"}, "write pattern, or key for a judge that answers in JSON; one of the two"),
        ({"base_url": "http://me:secret@judge/v1"}, "holds a user name or a password"),
        ({"api_key_env": "sk-secret"}, "is not the name of an environment variable"),
    ],
)
def test_a_judge_that_makes_no_sense_is_refused(changes: dict[str, Any], line: str) -> None:
    given = {"base_url": "http://judge/v1", "model": "m", "prompt": PROMPT, "pattern": r"(\d+)"}
    with pytest.raises(ConfigError) as caught:
        parse(TREE | {"task": {"reward": "judge", "judge": given | changes}})
    assert line in str(caught.value) and "secret" not in str(caught.value)


def test_both_need_their_settings_and_real_time() -> None:
    for name in ("model", "judge"):
        with pytest.raises(ConfigError, match=f'reward = "{name}" needs its settings'):
            parse(TREE | {"task": {"reward": name}})
    modelled = TREE | {"runtime": {"kind": "inline", "clock": "modelled"}}
    with pytest.raises(ConfigError, match='rewards "model" and "judge" take real time'):
        parse(modelled | {"task": {"reward": "model", "model": {"path": "rm"}}})


def test_a_judge_that_cannot_be_reached_is_refused_before_the_run_and_by_check(tmp_path: Path) -> None:
    with endpoint(lambda text: "score: 1") as fake:
        reachable = {"base_url": fake.url, "model": "judge", "prompt": PROMPT, "pattern": r"score: (\d+)"}
        tree = TREE | {"task": {"reward": "judge", "judge": reachable}}
        serves = f"the judge at {fake.url} serves judge, at most 120 s a request"
        assert serves in plan(parse(tree)).notes and "no score" not in str(plan(parse(tree)).notes)
        fake.finish = "length"
        cut = "the judge was cut off (finish_reason 'length'); raise task.judge.max_tokens: 'score: 1'"
        notes = list(plan(parse(tree)).notes)
        assert notes[notes.index(serves) + 1] == f"an empty response got no score: {cut}"
    for command in (plan, lambda config: train(config, Console(file=io.StringIO()), name="x")):
        with pytest.raises(ConfigError, match=r"task\.judge\.base_url: the judge at .* correct the address"):
            command(parse(tree | {"output": str(tmp_path / "run")}))
    assert not (tmp_path / "run").exists()

"""Several teachers: whose answers each scores, at what context; and what is found wrong before anything starts."""

import asyncio
import io
import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from slipstream.config.file import load, parse, to_toml
from slipstream.config.schema import Config
from slipstream.data.prompts import Prompts, Row
from slipstream.data.teacher_context import TemplateContext
from slipstream.data.tokenizers import load_tokenizer
from slipstream.engines.http import client
from slipstream.engines.http.client import Endpoint
from slipstream.engines.native.model import load_model
from slipstream.engines.sampling_options import rollout_sampling
from slipstream.engines.score_checks import context_name
from slipstream.errors import ConfigError, DataError, EngineError, ModelError
from slipstream.pipeline.run import Run
from slipstream.plan import teachers as planned
from slipstream.plan.facts import Facts
from slipstream.plan.notes import setting_warnings
from slipstream.plan.prompts import DataFacts, routes
from slipstream.plan.rules import endpoints
from slipstream.protocols import Engines, GradingSampler
from slipstream.records import Group, Handle, Prompt, Rollout, header_of
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.runs import start as launch
from slipstream.simulation import virtual_clock as virtual
from slipstream.testing.endpoint import model
from support import tabular_engines as toy
from support.engines import http_scorer, native_scorer
from support.fake_endpoint import FakeEndpoint
from support.tiny_models import uniform

ENDPOINT = {"model": "t", "base_url": "http://host:8000/v1"}


def parsed(said: list[str] | None = None, **tree: Any) -> Config:
    whole = {"student": "s", "teachers": {"main": {"model": "t"}}} | tree
    return parse(whole, say=(said if said is not None else []).append)


def teachers(**keys: str | None) -> dict[str, Any]:
    return {name: {"model": "t"} | ({} if key is None else {"key": key}) for name, key in keys.items()}


def row(number: int, source: str = "default", **meta: Any) -> Row:
    return Row(id=f"row:{number}", prompt="x", data_source=source, meta=meta)


# --- routing ----------------------------------------------------------------------------------------------------------


def test_a_prompt_goes_to_the_teacher_whose_key_is_its_data_source() -> None:
    rows = [row(0, "math"), row(1, "programs"), row(2, "math")]
    config = parsed(teachers=teachers(math=None, code="programs"))
    assert routes(config, rows) == ["math", "code", "math"]
    prompts = Prompts(rows, [np.array([1])] * 3, seed=0, shuffle=True, teachers=routes(config, rows))
    drawn = [prompts.at(number) for number in range(9)]
    assert [prompt.teacher for prompt in drawn] == [{"math": "math", "programs": "code"}[p.data_source] for p in drawn]
    assert header_of(rollout(drawn[0])).teacher == drawn[0].teacher


def test_another_column_may_name_the_teacher() -> None:
    config = parsed(teachers=teachers(math=None, code=None), data={"teacher_key": "level"})
    assert routes(config, [row(0, level="code"), row(1, level="math")]) == ["code", "math"]
    with pytest.raises(DataError, match=r"row:1: has no 'level' \(data.teacher_key\), which names the teacher"):
        routes(config, [row(0, level="code"), row(1)])


def test_one_teacher_scores_all() -> None:
    assert routes(parsed(teachers=teachers(main=None)), [row(0, "a"), row(1, "b")]) == ["main", "main"]
    nobody = parsed(
        teachers={}, loss={"weight": 0}, policy={"advantage": "reinforce_plus_plus"}, task={"reward": "exact"}
    )
    assert routes(nobody, [row(0)]) == [""]


def test_a_prompt_without_teacher_and_a_teacher_without_prompt_are_errors_that_name_the_field() -> None:
    config = parsed(teachers=teachers(math=None, code="programs"))
    with pytest.raises(ConfigError) as caught:
        routes(config, [row(0, "math"), row(1, "programs"), row(2, "program")])
    assert str(caught.value) == (
        "row:2: no teacher has key = 'program', its data_source (data.teacher_key): add [teachers.NAME] with this key; "
        "did you mean 'programs'?"
    )
    with pytest.raises(ConfigError) as caught:
        routes(config, [row(0, "math")])
    assert str(caught.value) == (
        "teachers.code: no prompt has data_source = 'programs' (data.teacher_key), its key: write another "
        "teachers.code.key, or drop it; prompts have math"
    )


def warnings_of(config: Config) -> list[str]:
    return list(setting_warnings(config, Facts(config)))


def test_a_learning_rate_that_no_model_survives_is_warned_of() -> None:
    (warning,) = warnings_of(parsed(learner={"lr": 0.5}))
    assert warning.startswith("learner.lr = 0.5: an AdamW update changes every weight by about this much")
    assert warnings_of(parsed(learner={"lr": 1e-2})) == []


def test_several_teachers_want_shuffled_prompts() -> None:
    two = parsed(teachers=teachers(a=None, b=None), data={"shuffle": False})
    assert any("several teachers and data.shuffle = false" in warning for warning in warnings_of(two))
    for fine in (parsed(data={"shuffle": False}), parsed(teachers=teachers(a=None, b=None))):
        assert not any("several" in warning for warning in warnings_of(fine))


# --- the configuration ------------------------------------------------------------------------------------------------

TOPK = {"kind": "forward_kl"}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "same key": (
        {"teachers": teachers(math=None, code="math")},
        "teachers.math and teachers.code both have key = 'math'",
    ),
    "several draws": (
        {"teachers": {"main": ENDPOINT}, "loss": {"m": 4}},
        "loss.m = 4: teachers.main is an endpoint, which scores the emitted token and no other draws: write loss.m = 1",
    ),
    "large k": (
        {"teachers": {"main": ENDPOINT}, "loss": TOPK | {"k": 64}},
        "loss.k = 64: teachers.main gives 20 log-probs per token: write loss.k = 20, or start its server with "
        "--max-logprobs 64 and write teachers.main.max_logprobs = 64",
    ),
    "hidden states": (
        {"teachers": {"main": ENDPOINT}, "loss": TOPK | {"cache": "hidden"}},
        'loss.cache = "hidden": teachers.main is an endpoint, which gives no hidden states: write loss.cache = '
        '"teacher_topk"',
    ),
    "dense reverse KL": (
        {"teachers": {"main": ENDPOINT}, "loss": {"kind": "reverse_kl"}},
        'which gives no hidden states: write loss.kind = "reverse_kl_mc"',
    ),
    "temperature": (
        {"teachers": {"main": ENDPOINT}, "loss": {"temperature": 0.7}},
        "loss.temperature = 0.7: teachers.main is an endpoint, which scores at temperature 1 only",
    ),
    "one of two": (
        {"teachers": teachers(a=None) | {"b": ENDPOINT}, "loss": {"m": 2}},
        "loss.m = 2: teachers.b is an endpoint",
    ),
    "of a model here": (
        {"teachers": {"main": ENDPOINT | {"token_budget": 9}}},
        "teachers.main: token_budget is for a model that runs here: drop it or base_url",
    ),
    "of an endpoint": (
        {"teachers": {"main": {"model": "t", "timeout": 9}}},
        "teachers.main: timeout is for an endpoint: drop it, or add base_url",
    ),
    "no URL": (
        {"teachers": {"main": {"model": "t", "base_url": "host:8000/v1"}}},
        "teachers.main.base_url: not a URL of an endpoint: write http://HOST:PORT/v1, and nothing else",
    ),
    "itself at an endpoint": (
        {"teachers": {"main": ENDPOINT | {"model": "self", "context": "{prompt}"}}},
        'teachers.main: model = "self" runs here: drop base_url',
    ),
    "itself as it is": (
        {"teachers": {"main": {"model": "self"}}},
        'teachers.main: model = "self" has nothing to teach before it sees more than the student: add a context',
    ),
    "unknown field": (
        {"teachers": {"main": {"model": "t", "context": "{answer} {prompt}"}}},
        "teachers.main.context: no field {answer}: there are {prompt}, {ground_truth}, {response}, {best}, "
        "{best_reward}, {last}, {last_reward}, and {{ and }} stand",
    ),
    "attribute of a field": (
        {"teachers": {"main": {"model": "t", "context": "{prompt.__class__}"}}},
        "teachers.main.context: no field {prompt.__class__}",
    ),
    "constant": (
        {"teachers": {"main": {"model": "t", "context": "Think."}}},
        "teachers.main.context: would be the same for every prompt: use {prompt}, {ground_truth}, {response}, {best}, "
        "{best_reward}, {last}, {last_reward}",
    ),
    "brace": (
        {"teachers": {"main": {"model": "t", "context": "{prompt} }"}}},
        "teachers.main.context: Single '}' encountered in format string; write {{ and }} for literal braces",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_teachers_cannot_do_is_told_in_one_line(case: str) -> None:
    tree, message = WRONG[case]
    with pytest.raises(ConfigError, match="^config: .*" + re.escape(message)) as caught:
        parsed(**tree)
    assert "\n" not in str(caught.value)


SUITED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one draw": ({}, {"m": 1}),
    "as written": ({"m": 1}, {}),
    "as many as it gives": (TOPK, {"k": 20}),
    "k as written": (TOPK | {"k": 7}, {}),
    "a cache that it has": ({"kind": "jsd"}, {"cache": "teacher_topk", "k": 20}),
}
OTHER_SPELLING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one draw": ({}, {"m": 1}),
    "its most likely tokens": ({"kind": "common_topk"}, {"cache": "teacher_topk", "k": 20}),
    "fewer of them": ({"kind": "common_topk", "k": 7}, {"cache": "teacher_topk"}),
}


@pytest.mark.parametrize("case", SUITED)
def test_defaults_that_an_endpoint_cannot_serve_become_what_it_can_and_it_is_said(case: str) -> None:
    written, changes = SUITED[case]
    said: list[str] = []
    config = parsed(said, teachers={"main": ENDPOINT}, loss=written)
    assert said == [
        f"note: loss.{name} = {json.dumps(value)}, because teachers.main is an endpoint"
        for name, value in changes.items()
    ]
    assert {name: getattr(config.loss, name) for name in written | changes} == written | changes
    again: list[str] = []
    assert parse(tomllib.loads(to_toml(config)), say=again.append) == config and not again
    if config.loss.kind == "reverse_kl_mc":
        assert rollout_sampling(config).draws == 1


@pytest.mark.parametrize("case", OTHER_SPELLING)
def test_an_endpoint_with_another_tokenizer_gives_what_it_can(case: str) -> None:
    written, changes = OTHER_SPELLING[case]
    said: list[str] = []
    config = parsed(said, teachers={"main": ENDPOINT | {"spelling": "own"}}, loss=written)
    assert len(said) == len(changes)
    assert {name: getattr(config.loss, name) for name in written | changes} == written | changes
    with pytest.raises(ConfigError, match='write loss.cache = "teacher_topk", or run the teacher here'):
        parsed(teachers={"main": ENDPOINT | {"spelling": "own"}}, loss={"kind": "common_topk", "cache": "hidden"})


def test_an_endpoint_on_the_command_line_counts_and_plenty_of_log_probs_need_no_change() -> None:
    said: list[str] = []
    where = (
        ("teachers.main.base_url", "http://host/v1"),
        ("loss.kind", "forward_kl"),
        ("teachers.main.max_logprobs", "64"),
    )
    config = parse({"student": "s", "teachers": {"main": {"model": "t"}}}, where, say=said.append)
    assert config.loss.k == 32 and not said  # type: ignore[union-attr]


# --- in a run ---------------------------------------------------------------------------------------------------------

TOY = 6


class Named(toy.ToyScorer):
    """Remembers whom it has scored."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(toy.random_table(TOY, seed=seed))
        self.name, self.seen = name, set[str]()

    async def score(self, group: Group) -> list[Handle]:
        self.seen |= {handle.header.data_source for handle in group}
        assert {handle.header.teacher for handle in group} == {self.name}
        return [Handle(replace(h.header, teacher=self.name), h.body) for h in await super().score(group)]


class Gone(Named):
    async def score(self, group: Group) -> list[Handle]:
        raise ConnectionError("nobody there")


def run_with(path: Path, *scorers: Named, replicas: int = 1, said: list[str] | None = None) -> Run:
    config = parsed(
        teachers=teachers(**{scorer.name: None for scorer in scorers}),
        updates=6,
        sampler={"max_tokens": 6, "group": 2},
        learner={"batch_size": 8},
        schedule={"kind": "async", "tau": 1},
        health={"canary": 0},
    )
    rows = [row(i, scorers[i % len(scorers)].name) for i in range(10)]
    tokens = [np.array([1 + i % (TOY - 1)], np.int32) for i in range(10)]
    prompts = Prompts(rows, tokens, seed=0, shuffle=True, teachers=routes(config, rows))
    student = toy.random_table(TOY, seed=0)
    engines = Engines(
        samplers=(GradingSampler(toy.ToySampler(student), toy.ToyGrader()),),
        scorers={scorer.name: (scorer,) * replicas for scorer in scorers},
        learner=toy.ToyLearner(student),
        close=lambda: None,
    )
    with RunLog.create(config, path) as log:
        run = Run(config, engines, prompts, log, say=(said if said is not None else []).append)
        virtual.run(run.train())
    return run


def test_each_group_is_scored_by_its_own_teacher(tmp_path: Path) -> None:
    math, code = Named("math", 1), Named("code", 2)
    run = run_with(tmp_path, math, code, replicas=2)
    assert (math.seen, code.seen) == ({"math"}, {"code"}) and run.admission.version == 6
    lines = read_lines(tmp_path / "metrics.jsonl")
    for each in lines:  # an update may have responses to only one of them
        counts = {name: each[f"teacher/{name}/tokens"] for name in ("math", "code") if f"teacher/{name}/tokens" in each}
        assert counts and sum(counts.values()) == each["tokens"]
    line = lines[-1]
    idle = {name for name in line if name.startswith("idle/scorer")}
    assert idle == {f"idle/scorer-{name}-{index}" for name in ("math", "code") for index in (0, 1)}


def test_a_teacher_that_is_gone_stops_the_run_by_name_though_another_goes_on_scoring(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(EngineError, match="scoring by code failed at the last 15 tries, .*: ConnectionError: nobody"):
        run_with(tmp_path, Named("math", 1), Gone("code", 2), said=said)
    assert said == [
        "scoring by code has failed at the last 5 tries, and will be retried: ConnectionError: nobody there"
    ]
    reasons = [entry["reason"] for entry in read_lines(tmp_path / "ledger.jsonl") if entry["end"] == "dropped"]
    assert reasons.count("scoring failed") == 2, "it does not go on dropping all that teacher's groups"


# --- contexts ---------------------------------------------------------------------------------------------------------


def rollout(prompt: Prompt, text: str = "5!", tokenizer: PreTrainedTokenizerFast | None = None) -> Rollout:
    ids = [3] * len(text) if tokenizer is None else tokenizer(text, add_special_tokens=False)["input_ids"]
    return uniform(prompt, 0, np.array(ids, np.int32))


def asked(tokenizer: PreTrainedTokenizerFast, **fields: Any) -> Prompt:
    text = "<bos><user>2+3<eos><assistant>"
    tokens = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    return Prompt(id="p", number=0, tokens=tokens, **{"ground_truth": "5"} | fields)


def test_a_template_goes_through_the_tokenizer_once_with_its_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = asked(tokenizer)
    same = TemplateContext("{prompt}", tokenizer)
    np.testing.assert_array_equal(same.before(prompt), prompt.tokens)
    told = TemplateContext("<bos><system>{{it is {ground_truth}}}<eos>{prompt}", tokenizer)
    assert tokenizer.decode(told.before(prompt)) == "<bos><system>{it is 5}<eos><bos><user>2+3<eos><assistant>"
    again = TemplateContext("{prompt}{response} wrong. Again:", tokenizer)
    assert tokenizer.decode(again(rollout(prompt, "4", tokenizer), None)).endswith("<assistant>4 wrong. Again:")
    ids = {context_name(each.before(prompt)) for each in (same, told, again)}
    assert len(ids | {context_name(None)}) == 4 and context_name(None) == "prefix"


def test_a_context_needs_what_it_names(tokenizer: PreTrainedTokenizerFast) -> None:
    silent = asked(tokenizer, ground_truth=None)
    with pytest.raises(
        DataError, match=r"p: the teacher's context needs {ground_truth}, and the row has no answer: data.answer"
    ):
        TemplateContext("{prompt}{ground_truth}", tokenizer).before(silent)
    TemplateContext("{prompt}", tokenizer).before(silent)
    with pytest.raises(DataError, match="is empty for it"):
        TemplateContext("{response}", tokenizer).before(silent)
    assert (
        tokenizer.decode(TemplateContext("{ground_truth}", tokenizer).before(asked(tokenizer, ground_truth=[1])))
        == "[1]"
    )
    digits = load_tokenizer("builtin:student")
    with pytest.raises(DataError, match="builtin:student cannot encode the teacher's context 'Explain it.': WordLevel"):
        TemplateContext("Explain it.", digits).before(asked(tokenizer))


@pytest.mark.parametrize("where", ["here", "endpoint"])
@pytest.mark.parametrize("cache", ["sampled", "teacher_topk"])
def test_the_response_is_scored_behind_the_context_and_aligned_to_its_tokens(
    where: str, cache: Any, models_dir: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    name = str(models_dir / "teacher")
    context = TemplateContext("<bos><system>it is {ground_truth}<eos>{prompt}", tokenizer)
    # token ids that no tokenizer would give for this text stay as they are
    prompt, given = asked(tokenizer), rollout(asked(tokenizer), "5!", tokenizer)
    handle = Handle(header_of(given), given)

    async def here() -> list[Handle]:
        scorer = native_scorer(load_model(name, dtype="float32"), cache=cache, k=4, name="main", context=context)
        try:
            return await scorer.score([handle])
        finally:
            scorer.close()

    if where == "here":
        (scored,) = asyncio.run(here())
    else:
        with FakeEndpoint(model(name)) as fake:
            endpoint = Endpoint("main", fake.url, "teacher")
            (scored,) = asyncio.run(
                http_scorer(endpoint, k=4 if cache == "teacher_topk" else 0, context=context).score([handle])
            )
        assert fake.requests[0]["prompt"] == [*context.before(prompt).tolist(), *given.tokens.tolist()]
    ids = torch.tensor([[*context.before(prompt).tolist(), *given.tokens.tolist()]])
    logq = AutoModelForCausalLM.from_pretrained(name)(ids).logits[0].log_softmax(-1)
    expected = logq[-3:-1].gather(1, torch.from_numpy(given.tokens).long()[:, None])[:, 0].detach()
    np.testing.assert_allclose(scored.body.teacher_logp, expected, atol=2e-5)
    assert scored.body.context_id == context_name(context.before(prompt))
    np.testing.assert_array_equal(scored.body.context, context.before(prompt))
    assert scored.body.rollout.prompt is given.prompt
    assert scored.header.prompt_tokens == len(prompt.tokens)


# --- before a run -----------------------------------------------------------------------------------------------------


def check_teachers(config: Config, prompts: Prompts) -> None:
    """Check the teachers with these prompts in place of those of the config."""
    data = DataFacts(config, Facts(config), print)
    data.prompts = prompts
    planned.check_teachers(data)


def started(models_dir: Path, tokenizer: PreTrainedTokenizerFast, **tree: Any) -> tuple[Config, Prompts]:
    config = parsed(student=str(models_dir / "student"), **({"sampler": {"max_tokens": 8}} | tree))
    rows = [Row(id="row:0", prompt="2+3=", ground_truth="5")]
    tokens = [np.array(tokenizer("2+3=")["input_ids"], np.int32)]
    return config, Prompts(rows, tokens, seed=0, shuffle=True, teachers=routes(config, rows))


def test_a_context_must_fit_the_teacher_and_its_budget(models_dir: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """The context of the models is 64, and a character is a token."""
    teacher = {"model": str(models_dir / "teacher")}
    for filler, hint in ((50, None), (52, "row:0: 57 prompt tokens .* exceed the context of 64")):
        long = {"main": teacher | {"context": "{prompt}" + "x" * filler}}
        config, prompts = started(models_dir, tokenizer, teachers=long)
        if hint is None:
            check_teachers(config, prompts)
        else:
            with pytest.raises(DataError, match=hint):
                check_teachers(config, prompts)
    tight = {"main": teacher | {"context": "{prompt}" + "x" * 20 + "{response}", "token_budget": 40}}
    config, prompts = started(models_dir, tokenizer, teachers=tight)
    with pytest.raises(ConfigError, match=r"teachers.main.token_budget = 40 is less than .* 41 tokens"):
        check_teachers(config, prompts)


def test_an_endpoint_needs_no_model_here_but_the_same_tokenizer(
    models_dir: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    def prepared(**teacher: Any) -> None:
        served = {"main": ENDPOINT | {"model": "a-name-of-its-own"} | teacher}
        config, prompts = started(models_dir, tokenizer, teachers=served)
        check_teachers(config, prompts)

    prepared(tokenizer=str(models_dir / "student"))
    with pytest.raises(ModelError, match="stranger have different tokenizers: id "):
        prepared(tokenizer=str(models_dir / "stranger"))
    with pytest.raises(
        ConfigError, match=r"teachers.main.tokenizer: name the HF directory .* http://host:8000/v1 uses"
    ):
        prepared()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda fake: None, None),
        (lambda fake: setattr(fake, "max_model_len", 13), r"context of 13, but .* are up to 14: lower sampler.max_tok"),
        (
            lambda fake: setattr(fake, "vocabulary", 90),
            "cannot score token 10., the highest that the student may sample",
        ),
        (lambda fake: setattr(fake, "name", "other"), "does not serve it; write one of its models: 'other'"),
    ],
)
def test_endpoints_are_asked_before_anything_is_loaded(
    change: Callable[[FakeEndpoint], None], message: str | None, models_dir: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    with FakeEndpoint(model(str(models_dir / "teacher"))) as fake:
        change(fake)
        served = {"main": {"model": "teacher", "base_url": fake.url}}
        config, prompts = started(models_dir, tokenizer, teachers=served)
        said: list[str] = []
        if message is None:
            endpoints.check_teachers(config, tokenizer, prompts, said.append)
            assert said == [f"teacher main at {fake.url} serves teacher, context 4096"]
        else:
            with pytest.raises(ConfigError, match=message):
                endpoints.check_teachers(config, tokenizer, prompts, said.append)


def write_run(path: Path, models_dir: Path, url: str, **runtime: Any) -> Path:
    rows = [{"prompt": f"{i}+3=", "ground_truth": "5", "data_source": "ab"[i % 2]} for i in range(8)]
    (path / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    context = json.dumps("it is {ground_truth}. {prompt}")
    (path / "two.toml").write_text(f"""
student = "{models_dir / "student"}"
updates = 3
output = "{path / "run"}"
data.train = "{path / "train.jsonl"}"
sampler = {{ max_tokens = 6, group = 2, slots = 8 }}
learner.batch_size = 8
runtime = {{ kind = "{runtime.get("kind", "inline")}", device = "cpu" }}

[teachers.there]
model = "teacher"
base_url = "{url}"
tokenizer = "{models_dir / "teacher"}"
api_key_env = "TEACHER_KEY"
key = "a"
recheck = 1.0

[teachers.b]
model = "self"
context = {context}
recheck = 1.0
""")
    return path / "two.toml"


@pytest.mark.parametrize("kind", ["inline", pytest.param("local", marks=pytest.mark.processes)])
def test_a_run_with_an_endpoint_and_the_student_itself_as_teachers(
    kind: str, tmp_path: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "sk-only-here-0815")
    said, screen = list[str](), io.StringIO()
    with FakeEndpoint(model(str(models_dir / "teacher")), key="sk-only-here-0815") as fake:
        config = load(write_run(tmp_path, models_dir, fake.url, kind=kind), say=said.append)
        path = launch.train(config, Console(file=screen, width=200), name="two")
    assert said == ["note: loss.m = 1, because teachers.there is an endpoint"]
    assert "\nm = 1\n" in (path / "config.toml").read_text()
    lines = read_lines(path / "metrics.jsonl")
    assert len(lines) == 3 and all(np.isfinite(line["loss"]) for line in lines)
    assert {"idle/scorer-there", "idle/scorer-b"} <= lines[-1].keys()
    assert all(line["teacher/differed"] == line["teacher/invalid"] == 0 for line in lines)
    assert sum(line["teacher/rechecked"] for line in lines) >= 3 * 4, (
        "every group was scored twice, and came back alike"
    )
    assert all({"teacher/there/kl", "teacher/b/kl"} <= line.keys() for line in lines), "each update is of both"
    assert f"teacher there at {fake.url} serves teacher" in screen.getvalue()
    assert len(fake.requests) > 5
    texts = "".join(p.read_text() for p in path.rglob("*") if p.suffix in (".toml", ".json", ".jsonl"))
    assert "sk-only-here" not in texts + screen.getvalue()


def test_a_key_that_is_not_in_the_environment_is_missed_before_a_file_is_written(
    tmp_path: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TAKEN", {})
    config = load(write_run(tmp_path, models_dir, "http://127.0.0.1:9/v1"), say=lambda _: None)
    with pytest.raises(
        ConfigError, match="teachers.there.api_key_env = 'TEACHER_KEY': this environment variable is not"
    ):
        launch.train(config, Console(file=io.StringIO()), name="two")
    assert not (tmp_path / "run").exists()

"""One place decides: what `config --check` refuses `train` refuses, with the same line, before a process or a file."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.cli import main
from slipstream.config.file import load
from slipstream.config.schema import Config
from slipstream.data.prompts import Row
from slipstream.engines.http import client
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.models.resolve import model_path
from slipstream.plan.plan import check_shapes, plan
from slipstream.plan.prompts import notes_on_tools
from slipstream.run_dir.writing import read_lines
from slipstream.runs import start as command
from support.illegal_configs import BASE, BOTH, ILLEGAL, RL, SCHEMA

STEPS = "learner.minibatches=2"
OTHER = "teachers.main.model=builtin:pair_teacher teachers.main.spelling=own"

FUSED = "teachers.main.model=builtin:teacher sampler.fusion.alpha=0.5"
LEGAL = f"""
loss.kind=reverse_kl_mc
loss.m=1
loss.m=4 loss.clip=0.2
loss.clip=[0.1,0.3] loss.advantage=behavior
loss.ratio_cap=2.0
loss.importance=false
loss.kind=forward_kl
loss.kind=forward_kl loss.k=4 loss.tail=true
loss.kind=forward_kl loss.renormalise=true
loss.kind=forward_kl loss.cache=hidden
loss.kind=reverse_kl
loss.kind=jsd
loss.kind=jsd loss.cache=teacher_topk loss.k=8 loss.beta=0.1
loss.temperature=0.7
data.train=table.csv data.prompt=question
data.train=table.csv data.prompt=question data.answer=solution task.reward=exact
data.train=table.csv data.template=A1{{question}} data.answer=solution task.reward=exact
loss.kind=decoupled_ppo learner.minibatches=2
loss.kind=decoupled_ppo loss.m=4 loss.advantage=current loss.clip=[0.1,0.3] loss.weight_cap=2.0
loss.kind=m2po
loss.kind=m2po loss.m=2 loss.budget=0.01
loss.kind=m2po sampler.top_p=0.9 sampler.keep_mask=true
loss.kind=decoupled_ppo sampler.min_p=0.1 sampler.keep_mask=true
loss.kind=k1 loss.use=advantage sampler.top_k=5 sampler.keep_mask=true
loss.kind=gold {OTHER}
{OTHER} loss.m=1 teachers.main.context={{best}}{{prompt}} teachers.main.relabel=stale task.reward=exact
loss.kind=gold_merged {OTHER}
loss.kind=gold sampler.temperature=0.7 sampler.top_p=0.9 {OTHER}
loss.kind=common_topk loss.k=8 loss.temperature=0.7 {OTHER}
loss.kind=uld {OTHER}
loss.m=1 sft.updates=1 sft.loss.kind=gold {OTHER}
loss.kind=gold_merged sft.updates=1 sft.loss.kind=uld {OTHER}
loss.kind=gold loss.temperature=0.7 {OTHER}
loss.kind=k1 loss.use=advantage {OTHER}
loss.kind=reverse_kl_topk loss.k=8
loss.kind=reverse_kl_topk loss.k=8 loss.reweight=false
loss.kind=reverse_kl_topk loss.k=8 loss.renormalise=false loss.tail=true
loss.kind=k1 loss.use=advantage
loss.kind=abs
loss.kind=k2 loss.loss_max_clamp=5.0
loss.kind=k3 loss.use=advantage loss.clip=[0.2,0.28] loss.dual_clip=2.0
loss.kind=k1+
loss.kind=k3+ loss.log_prob_min_clamp=-9.0
loss.kind=low_var_kl
loss.kind=forward_kl_topk loss.loss_max_clamp=5.0
{BOTH} loss.kind=k1 loss.use=advantage
schedule.kind=sync
schedule.kind=periodic
schedule.kind=step_off schedule.k=2
schedule.kind=replay schedule.k=0
schedule.tau=0
schedule.tau=1.5 schedule.publish_every=2
schedule.on_publish=restart
schedule.on_publish=drain
schedule.order=submission
schedule.order=completion
data.train=levels.jsonl schedule.mixture=level
data.train=levels.jsonl schedule.mixture=about.level schedule.max_lag=6
data.order=adaptive data.adaptive.weight_by=kl
data.train=levels.jsonl data.order=curriculum data.curriculum.column=about.level data.curriculum.epochs=2.0
data.train={{a="levels.jsonl",b="builtin:arithmetic"}} data.weights={{a=3,b=1}} data.weights_temperature=2.0
data.train=levels.jsonl data.deduplicate=true
data.too_long=skip sampler.max_length=30
data.too_long=cut_left sampler.max_length=20
{RL} data.order=adaptive policy.refill=3.0
{RL} policy.refill=1.5 policy.advantage=gdpo task.reward=["exact","math"]
schedule.max_lag=4
reuse.times=1
reuse.times=4 schedule.kind=sync
reuse.order=freshness reuse.groups=9 reuse.max_lag=7 schedule.max_lag=8
{RL} reuse.order=advantage learner.batch_size=16
reuse.times=2 reuse.gigabytes=0.1 schedule.kind=periodic
schedule.max_lag=1 schedule.on_old=drop
schedule.max_lag=2 schedule.on_old=restart
{RL}
{RL} policy.loss=cispo
{RL} policy.loss=gspo policy.advantage=rloo
{RL} policy.loss=topr
{RL} policy.loss=oapl policy.advantage=oapl policy.advantage_options={{beta=0.5}} policy.drop_alike=true
{RL} policy.loss=vespo schedule.kind=periodic
{RL} policy.loss=a3po schedule.tau=4
{RL} policy.loss=vanilla policy.options={{clip_high=0.28}}
{RL} policy.advantage=grpo policy.advantage_options={{norm=false}}
{RL} policy.old=previous
{RL} correction.preset=decoupled_token_is
{RL} correction.preset=decoupled_token_is correction.is_threshold=3.0 correction.is_normalize=true
{RL} correction.preset=decoupled_geo_rs
{RL} correction.preset=bypass_ppo_clip
{RL} policy.loss=reinforce correction.preset=bypass_pg_is
{RL} reference.weight=0.1
{RL} reference.weight=0.1 reference.into=reward
{RL} reference.weight=0.1 reference.host=true
{RL} correction.preset=decoupled_token_is correction.is_level=sequence
{RL} correction.preset=decoupled_token_is correction.is_level=cumulative correction.ctpo_clip=0.1
{RL} correction.preset=decoupled_geo_rs correction.is_level=turn correction.is_threshold=3.0
{RL} correction.preset=decoupled_geo_rs correction.rs={{seq_mean_k1=[0.9,1.3]}} correction.verl_compat=true
{RL} policy.loss=reinforce correction.preset=bypass_pg_is correction.is_level=prefix_min
{RL} policy.loss=reinforce correction.preset=bypass_pg_geo_rs correction.is_level=geometric
{RL} policy.advantage=gdpo task.reward=["exact","math"]
{RL} policy.advantage=gdpo task.reward=["exact","math"] policy.reward_weights={{math=0.5}}
{RL} task.reward=["math","exact"] policy.reward_weights={{exact=-0.1}}
{RL} policy.advantage=remax
{RL} policy.advantage=gae critic.warmup=1
{RL} policy.advantage=gae critic.model=builtin:teacher critic.dtype=bfloat16 critic.lora.rank=2
{RL} policy.advantage=gae critic.clip=0.1 sampler.group=1 policy.advantage_options={{rho=1.0,c=1.0}}
{RL} policy.advantage=remax sampler.group=1
{RL} policy.advantage=optimal_token_baseline correction.preset=decoupled_token_is
{RL} policy.advantage=optimal_token_baseline policy.advantage_options={{multi_turn=true}}
{RL} policy.advantage=opob policy.loss=reinforce correction.preset=bypass_pg_is
{RL} policy.advantage=opob schedule.kind=periodic
{RL} reference.weight=0.1 reference.estimate=k1
{RL} reference.weight=0.1 reference.importance=false reference.estimate=k3+
{RL} reference.weight=0.1 reference.into=reward reference.estimate=k3
{RL} reference.weight=0.1 reference.control=adaptive reference.target=0.05 reference.horizon=1000
{RL} reference.weight=0.1 reference.importance=false policy.loss=reinforce sampler.top_p=0.9
task.reward=["exact","math"] eval.every=1 data.eval=builtin:arithmetic eval.prompts=4
eval.every=1 data.eval=builtin:arithmetic eval.prompts=4
{RL} {FUSED} correction.preset=bypass_pg_is correction.is_level=token policy.loss=reinforce
{RL} learner.minibatches=2 learner.epochs=2
{RL} schedule.kind=periodic
loss.kind=m2po schedule.kind=periodic
{RL} policy.loss=oapl schedule.kind=periodic reference.weight=0.1
{BOTH} policy.advantage=gdpo task.reward=["exact","math"] schedule.kind=periodic
{BOTH} schedule.kind=periodic learner.minibatches=2
{BOTH} schedule.kind=periodic learner.epochs=2
{BOTH} schedule.kind=periodic policy.loss=m2po
{BOTH} schedule.kind=periodic policy.loss=kl_cov
{BOTH} schedule.kind=periodic policy.loss=clip_cov
{BOTH} schedule.kind=periodic policy.advantage=reinforce_plus_plus
{BOTH} schedule.kind=periodic policy.aggregation=token-sum
{BOTH} schedule.kind=periodic policy.aggregation=seq-mean-token-sum
{BOTH} schedule.kind=periodic correction.preset=decoupled_token_is correction.is_normalize=true
schedule.kind=periodic learner.epochs=2
schedule.kind=periodic learner.minibatches=2
{BOTH}
{BOTH} policy.weight=0.5 loss.kind=forward_kl
{BOTH} policy.weight=0
{BOTH} policy.loss=m2po
{BOTH} policy.loss=kl_cov
{BOTH} sampler.top_p=0.9 loss.kind=forward_kl policy.loss=reinforce
sampler.top_p=0.9 sampler.keep_mask=true
sampler.on_publish=reuse
{BOTH} sampler.top_k=5 sampler.min_p=0.1 sampler.keep_mask=true correction.preset=decoupled_token_is
sampler.top_p=0.9 loss.kind=forward_kl
sampler.top_k=5 loss.importance=false
sampler.temperature=0.7
learner.packing=false
learner.checkpointing=true learner.dropout=false
learner.compute_dtype=bfloat16
learner.lora.rank=2
learner.lora.rank=2 learner.lora.targets=["q_proj","v_proj"]
learner.exact_drift=true
learner.exact_drift=true learner.snapshots=3
{STEPS} learner.epochs=2
eval.every=1 data.eval=builtin:arithmetic task.reward=exact eval.prompts=4
checkpoint.every=1 checkpoint.keep=1
checkpoint.minutes=0
log.to=tensorboard
teachers.main.weight=0.5
teachers.main.replicas=2 sampler.replicas=2
reference.weight=0.01
sft.updates=1
sft.updates=1 sft.source=teacher sft.lr=1e-3 sft.warmup=1 sampler.group=2
sft.updates=1 sft.loss.kind=forward_kl sft.loss.k=4 sft.loss.temperature=0.5
sft.updates=1 sft.loss.kind=jsd schedule.kind=periodic
{RL} sft.updates=1
loss.weight=0 teachers={{}} sft.updates=2
loss.weight=0 sft.updates=2 sft.loss.kind=jsd
loss.weight=0 sft.updates=2 sft.source=teacher
mix.source=teacher loss.m=3 mix.share=0.25 mix.final=0 mix.over=2
mix.share=0.5 loss.kind=jsd sft.updates=1
""".strip().splitlines()


if torch.cuda.is_available():
    ILLEGAL = [line for line in ILLEGAL if "cuda" not in line or "ray" in line]


LEVELS = "".join(
    json.dumps({"prompt": f"A{i % 10}=", "level": i % 3, "about": {"level": i % 2}, "same": "x", "number": i}) + "\n"
    for i in range(24)
)


def words(line: str) -> list[str]:
    return [word for pair in line.split() for word in (f"--{pair.partition('=')[0]}", pair.partition("=")[2])]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(client, "REQUEST_PAUSES", ())  # nobody waits for an endpoint that is not there
    (tmp_path / "run.toml").write_text(BASE)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.toml").write_text("")
    (tmp_path / "table.csv").write_text("question,solution\nB1=,1\nC2=,2\n")
    (tmp_path / "ragged.csv").write_text("prompt,answer\nB1=,1\nC2=\n")
    (tmp_path / "levels.jsonl").write_text(LEVELS)
    os.mkfifo(tmp_path / "pipe.jsonl")
    return "run.toml"


def test_the_corpus_is_large_and_says_nothing_twice() -> None:
    assert len(set(ILLEGAL)) == len(ILLEGAL) and len(set(LEGAL)) == len(LEGAL) >= 60
    assert len(ILLEGAL) + len(SCHEMA) > 150


@pytest.mark.parametrize("line", [*ILLEGAL, *SCHEMA])
def test_check_and_train_refuse_with_the_same_line(
    line: str, config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = []
    for words_before in (["config", config, "--check"], ["train", config]):
        assert main([*words_before, *words(line)]) == 2
        said.append(capsys.readouterr().err.splitlines())
    checked, trained = said
    assert checked == trained and trained[-1].startswith("error: ") and "Traceback" not in trained[-1]
    assert not (tmp_path / "run").exists()


class EnginesStart(Exception):
    pass


@pytest.mark.parametrize("line", LEGAL)
def test_what_is_legal_passes_both(line: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*anything: Any) -> None:
        raise EnginesStart

    monkeypatch.setattr(command, "open_engines", start)
    assert main(["config", config, "--check", *words(line)]) == 0
    with pytest.raises(EnginesStart):
        main(["train", config, *words(line)])


def test_a_plan_says_what_a_greedy_baseline_costs(config: str) -> None:
    words = RL.replace("vanilla", "vanilla policy.advantage=remax").split()
    settings = [(key, value) for key, _, value in (word.partition("=") for word in words)]
    assert any("5 answers are drawn where 4 are trained on" in note for note in plan(load(config, settings)).notes)
    assert not any("are trained on" in note for note in plan(load(config)).notes)


def test_a_critic_that_reads_the_end_of_a_response_needs_one_more_position(config: str) -> None:
    def planned(max_tokens: int, bootstrap: str) -> None:
        words = f"{RL} policy.advantage=gae critic.bootstrap={bootstrap} sampler.max_tokens={max_tokens}".split()
        plan(load(config, [(key, value) for key, _, value in (word.partition("=") for word in words)]))

    with pytest.raises(SlipstreamError, match="prompt tokens") as refused:
        planned(100_000, "false")
    found = re.search(r"(\d+) prompt tokens .* context of (\d+)", str(refused.value))
    assert found is not None
    prompt, context = int(found[1]), int(found[2])
    planned(context - prompt, "false")
    with pytest.raises(SlipstreamError, match=f"context of {context - 1} of .*, less one for critic.bootstrap"):
        planned(context - prompt, "true")
    planned(context - prompt - 1, "true")


def test_a_critics_own_model_reads_every_token_of_every_sequence(config: str) -> None:
    """The longest prompt has 33 tokens, and responses 16."""
    shutil.copytree(model_path("builtin:student"), "critic")
    file = Path("critic/config.json")

    def planned(bootstrap: str, check: Callable[[Config], Any] = plan, **changes: int) -> Any:
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        words = f"{RL} policy.advantage=gae critic.model=critic critic.bootstrap={bootstrap}".split()
        return check(load(config, [(key, value) for key, _, value in (word.partition("=") for word in words)]))

    assert planned("true").engines.learner.critic.name == "critic"
    planned("false", max_position_embeddings=49)
    with pytest.raises(SlipstreamError, match="context of 48 of critic, less one for critic.bootstrap"):
        planned("true")
    with pytest.raises(SlipstreamError, match="context of 48 of critic: shorten"):
        planned("false", max_position_embeddings=48)
    with pytest.raises(
        SlipstreamError, match="critic: sequences of 17 tokens exceed the context of 16 of critic: lower"
    ):
        planned("false", check_shapes, max_position_embeddings=16)
    with pytest.raises(
        SlipstreamError,
        match="critic.model: critic has 9 embeddings, builtin:student has 39: the critic could not read",
    ):
        planned("false", check_shapes, vocab_size=9)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ("schedule.mixture=levle", "levels.jsonl:1: has no 'levle' (schedule.mixture); did you mean 'level'?"),
        ("schedule.mixture=same", "schedule.mixture = 'same' does nothing: every row has 'x' there; drop it"),
        ("schedule.mixture=number", "every row has a different value there: name a column with"),
        ("schedule.mixture=level schedule.order=submission", 'mixture does nothing with order = "submission": write'),
    ],
)
def test_a_mixture_that_follows_no_column_is_refused(config: str, settings: str, line: str) -> None:
    pairs = [
        ("data.train", "levels.jsonl"),
        *((key, value) for key, _, value in (pair.partition("=") for pair in settings.split())),
    ]
    with pytest.raises(SlipstreamError, match=re.escape(line)):
        plan(load(config, pairs))


def test_a_mixture_follows_the_teacher_and_the_column(config: str) -> None:
    pairs = [("data.train", "levels.jsonl"), ("schedule.mixture", "level")]
    prompts = plan(load(config, pairs)).prompts
    found = [(prompts.source(number), prompts.at(number).meta["level"]) for number in range(24)]
    assert all(source == f"main {level}" for source, level in found) and len(set(found)) == 3


def test_a_plan_says_when_checkpoints_come(config: str) -> None:
    def said(*changes: tuple[str, str]) -> list[str]:
        made = plan(load(config, changes))
        return [line for line in (*made.notes, *made.warnings) if "checkpoint" in line]

    assert said() == ["checkpoints every 10 minutes and at the end, of which 2 are kept"]
    both = ("checkpoint.every", "2"), ("checkpoint.minutes", "0.5")
    assert said(*both) == ["checkpoints every 2 updates, every 0.5 minutes and at the end, of which 2 are kept"]
    (warning,) = said(("checkpoint.minutes", "0"))
    assert warning.endswith("a run that is killed loses everything")


def test_a_plan_holds_what_a_person_must_know(config: str) -> None:
    settings = [("reference.weight", "0.1"), ("learner.dtype", "bfloat16")]
    made = plan(load(config, settings, say=str))
    assert any("both a teacher and a reference" in warning for warning in made.warnings)
    assert any("rounds small updates away" in warning for warning in made.warnings)
    coarse = [("learner.optimizer_dtype", "bfloat16"), ("learner.betas", [0.9, 0.999])]
    assert any("the second moment cannot fall" in warning for warning in plan(load(config, coarse)).warnings)
    assert [need.name for need in made.needs] == ["learner", "sampler", "teacher main"]
    assert made.config.sampler.max_length == max(map(len, made.prompts.tokens)) + 16
    proximal = [("loss.kind", "decoupled_ppo")]
    assert any("clips the steps of an update" in warning for warning in plan(load(config, proximal)).warnings)
    several = [*proximal, ("learner.minibatches", "2")]
    assert not any("clips the steps of an update" in warning for warning in plan(load(config, several)).warnings)


def test_prompts_that_are_copies_and_held_out_ones_that_are_trained_on_are_warned_of(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(name: str, prompts: Iterable[str]) -> None:
        rows = [{"prompt": prompt, "answer": "1", "number": number} for number, prompt in enumerate(prompts)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def warned(*changes: tuple[str, str]) -> list[str]:
        made = plan(load(config, [("data.limit", "1000"), *changes]))
        return [warning for warning in made.warnings if warning.startswith("data.")]

    letters = [f"{letter}1=" for letter in "ABCDEFGH"]
    write("equal.jsonl", ["A1="] * 24)
    write("copies.jsonl", letters[:4] * 50)
    write("different.jsonl", [*letters, *letters[:4]])
    write("other.jsonl", [f"{letter}2=" for letter in "ABCD"])
    write("some.jsonl", ["A2=", "B1="])
    assert warned(("data.train", "equal.jsonl")) == [
        "data.train: 24 rows have 1 different prompts; that of equal.jsonl:1 occurs 24 times"
    ]
    assert warned(("data.train", "copies.jsonl")) == [
        "data.train: 200 rows have 4 different prompts; that of copies.jsonl:1 occurs 50 times"
    ]
    assert warned(("data.train", "different.jsonl")) == []
    evaluated = ("data.train", "different.jsonl"), ("eval.every", "1"), ("task.reward", "exact")
    assert warned(*evaluated, ("data.eval", "other.jsonl")) == []
    (leak,) = warned(*evaluated, ("data.eval", "some.jsonl"))
    assert leak.startswith("data.eval: 1 of 2 held-out prompts are in data.train too, ")
    assert main(["config", config, "--check", "--data.limit", "1000", "--data.train", "equal.jsonl"]) == 0
    told = capsys.readouterr()
    assert "24 rows have 1 different prompts" in told.out + told.err


def test_a_reward_that_gives_nothing_to_right_answers_is_warned_of(config: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import time\n"
        "def boxed(text, ground_truth): return float(text == r'\\boxed{' + ground_truth + '}')\n"
        "def other_column(text, meta): return float(text == meta.get('solution'))\n"
        "def fails(text): raise ValueError\n"
        "def slow(text):\n    time.sleep(60)\n"
    )
    for name in ("boxed", "fails"):
        made = plan(load(config, [("task.reward", f"./own.py:{name}")]))
        assert not any("gives 0" in warning for warning in made.warnings), name
    (told,) = [warning for warning in made.warnings if "task.reward" in warning]
    assert told.startswith("task.reward: ./own.py:fails does not grade the right answer of train:0, '") and (
        "in any form that was tried" in told and "ValueError" in told
    )
    with pytest.raises(ConfigError) as refused:
        plan(load(config, [("task.reward", "./own.py:slow"), ("task.timeout", "2")]))
    assert str(refused.value) == (
        "task.reward: ./own.py:slow took more than task.timeout = 2 s for the first answer: make it faster, or raise "
        "the limit"
    )
    (told,) = [w for w in plan(load(config, [("task.reward", "./own.py:other_column")])).warnings if "gives 0" in w]
    assert told.startswith("task.reward = './own.py:other_column' gives 0 to the right answer of train:0 and others")
    assert not any("gives 0" in warning for warning in plan(load(config, [("task.reward", "math")])).warnings)


def test_tools_of_rows_that_their_environment_does_not_have_are_warned_of() -> None:
    add, look = ({"type": "function", "function": {"name": name}} for name in ("add", "look"))

    def row(place: str, environment: str, *tools: Any) -> Row:
        return Row(place, "Hi", tools=list(tools), environment=environment, where=place)

    offered = {"": [add, look], "games": [look], "agents": None}
    rows = [row("a:1", "", look), row("a:2", "agents", add), row("a:3", "", look, {"name": "sell", "function": None})]
    assert list(notes_on_tools([*rows, row("a:4", "", {"name": "buy"})], offered)) == [
        "warning: a:3: the column 'tools' replaces the tools of the environment in the prompt, and names 'sell'; the "
        "environment has add, look"
    ]


def test_an_evaluation_that_cannot_be_is_refused_before_a_weight_is_loaded(
    models_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(models_dir / "student", tmp_path / "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    assert main(["eval", str(tmp_path / "empty"), "--max-tokens", "500"]) == 2
    assert "prompt and --max-tokens exceed the context of 64" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}')
    assert main(["eval", str(tmp_path / "empty"), "--data", str(tmp_path / "rows.jsonl"), "--split", "test"]) == 2
    assert "--split test does nothing: " in capsys.readouterr().err


def test_a_ray_that_is_not_installed_is_one_line(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.plan.facts.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^runtime.kind = 'ray' needs Ray: pip install 'slipstream\[ray\]'$"):
        plan(load(config, [("runtime.kind", "ray")]))


def test_slow_rows_are_held_to_their_share_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers to rows of ten letters are ten times as long as those to rows of one, and every fourth row is such."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": "".join(f"{chr(65 + (i + j) % 10)}{(i * j) % 9 + 1}" for j in range(10 if i % 4 == 0 else 1)) + "="}
        | {"size": "long" if i % 4 == 0 else "short"}
        for i in range(40)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(BASE)
    words = [
        "train",
        "run.toml",
        "--skip-checks",
        "--updates",
        "6",
        "--data.train",
        "rows.jsonl",
        "--data.limit",
        "none",
    ]
    words += ["--sampler.max_tokens", "64", "--sampler.slots", "8", "--schedule.tau", "4", "--schedule.mixture", "size"]
    assert main(words) == 0
    prompts = plan(load("run/config.toml", say=str)).prompts
    due = [prompts.at(number).meta["size"] for number in range(48)]
    ledger = read_lines(tmp_path / "run" / "ledger.jsonl")
    for update in range(1, 7):
        trained = [prompts.at(line["number"]).meta["size"] for line in ledger if line["update"] == update]
        assert sorted(trained) == sorted(due[8 * (update - 1) : 8 * update])
    assert {*due} == {"long", "short"}

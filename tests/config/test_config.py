"""Faults of a config are named, with a value to write instead; a valid config survives the way to TOML and back."""

import math
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pages
import slipstream
from slipstream.config.file import describe, fields, load, members, parse, to_toml
from slipstream.config.foreign_names import DISTILLATION_KEYS, FOREIGN_KEYS, VALUES
from slipstream.config.losses import ForwardKL, ReverseKLMC
from slipstream.config.schedule import Async
from slipstream.config.schema import Config
from slipstream.errors import ConfigError

ROOT = Path(__file__).parents[2]
MINIMAL: dict[str, Any] = {"student": "s", "teachers": {"main": {"model": "t"}}}
Overrides = list[tuple[str, str]]


def silent(note: str) -> None:
    raise AssertionError(f"nothing to say was expected, not: {note}")


def parsed(tree: dict[str, Any] | None = None, overrides: Overrides | None = None) -> Config:
    return parse(MINIMAL | (tree or {}), overrides or [], say=silent)


# --- what a run gets ---------------------------------------------------------------------------------------


def test_student_and_teacher_are_all_that_must_be_said() -> None:
    config = parsed()
    assert (config.student, config.teachers["main"].model) == ("s", "t")
    assert config.loss == ReverseKLMC(m=16, advantage="current", clip=None, importance=True, ratio_cap=None)
    assert (config.schedule.kind, config.sampler.engine) == ("async", "native")
    assert config.schedule == Async(tau=4, publish_every=1, on_publish="keep", order="mixture")
    assert (config.learner.batch_size, config.sampler.group, config.groups_per_update) == (64, 1, 64)
    assert (config.sampler.temperature, config.sampler.top_p, config.sampler.top_k) == (1.0, 1.0, 0)


@pytest.mark.parametrize(
    "path",
    sorted(
        path
        for folder in ("configs", "configs/recipes", "src/slipstream/models/builtin")
        for path in ROOT.glob(f"{folder}/*.toml")
        if path.name != "costs.toml"
    ),
)
def test_every_config_that_ships_loads(path: Path) -> None:
    load(path, say=silent)


def test_every_setting_has_a_help_text_and_a_type() -> None:
    settings = list(fields())
    assert len(settings) > 40
    for name, info, _ in settings:
        assert info.description, f"{name} has no description"
        assert re.search(r"\w", describe(info)), f"{name} has no type"


def test_settings_are_listed_by_dotted_name_and_kind() -> None:
    listed = {(name, kind): describe(info) for name, info, kind in fields()}
    assert listed["learner.lr", ""] == "float = 1e-05"
    assert listed["student", ""] == "str"
    assert listed["teachers.NAME.dtype", ""] == 'float32 | bfloat16 | float16 | float64 = "float32"'
    assert listed["task.reward", ""] == "[str, …] = []"
    assert listed["loss.clip", "reverse_kl_mc"] == "float | [float, float] | none = none"
    assert listed["loss.k", "forward_kl"] == "int = 32"
    assert listed["log.to", ""] == "[tensorboard | wandb | mlflow | trackio, …] = []"
    assert ("loss.k", "reverse_kl_mc") not in listed


# --- to TOML and back --------------------------------------------------------------------------------------

positive = st.floats(1e-8, 1e8)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
reverse_kl = st.fixed_dictionaries(
    {"kind": st.just("reverse_kl_mc"), "m": st.integers(1, 64)},
    optional={"clip": positive | st.tuples(positive, positive).map(list), "temperature": st.floats(1e-3, 100)},
)
forward_kl = st.fixed_dictionaries(
    {"kind": st.just("forward_kl"), "k": st.integers(1, 64)}, optional={"tail": st.booleans()}
)
template_values = st.booleans() | st.integers(-(2**63), 2**63 - 1) | words | st.lists(words, max_size=2)
trees = st.fixed_dictionaries(
    {
        "student": words,
        "teachers": st.dictionaries(
            st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True),
            st.fixed_dictionaries({"model": words}),
            min_size=1,
            max_size=1,
        ),
    },
    optional={
        "seed": st.integers(0, 10**18 - 1),
        "output": words.filter(lambda text: bool(text) and text.isprintable() and not text.startswith("~")),
        "loss": reverse_kl | forward_kl,
        "data": st.fixed_dictionaries(
            {},
            optional={"limit": st.integers(1, 9), "template_args": st.dictionaries(words, template_values, max_size=2)},
        ),
        "learner": st.fixed_dictionaries({"lr": st.floats(1e-8, 1)}, optional={"betas": st.just([0.5, 0.75])}),
        "log": st.fixed_dictionaries({"to": st.lists(st.sampled_from(["wandb", "mlflow"]), max_size=2)}),
    },
)


@given(trees)
def test_the_resolved_config_is_a_config_file_that_says_the_same(tree: dict[str, Any]) -> None:
    config = parse(tree, say=silent)
    assert parse(tomllib.loads(to_toml(config)), say=silent) == config


def test_the_file_that_a_run_writes_can_be_loaded(tmp_path: Path) -> None:
    config = parsed({"student": "schüler/→"}, [("learner.lr", "3e-4"), ("loss.clip", "[0.2, 0.3]")])
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config), "utf-8")
    assert load(path, say=silent) == config


# --- overrides ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("learner.lr", "1e-5", 1e-5),
        ("learner.lr", "1", 1.0),
        ("updates", "7", 7),
        ("data.shuffle", "false", False),
        ("loss.clip", "[0.2, 0.3]", (0.2, 0.3)),
        ("loss.clip", "0.2", 0.2),
        ("loss.clip", "none", None),
        ("task.sandbox", "none", "none"),
        ("output", "runs/a", "runs/a"),
        ("output", '"2024"', "2024"),
        ("output", "2024-05-01", "2024-05-01"),
        ("data.system_prompt", "", ""),
        ("data.system_prompt", "Think = hard!", "Think = hard!"),
        ("log.to", '["wandb", "mlflow"]', ("wandb", "mlflow")),
        ("log.to", "wandb", ("wandb",)),
        ("teachers.main.dtype", "bfloat16", "bfloat16"),
        ("data.template_args", "{enable_thinking = false}", {"enable_thinking": False}),
        ("data.template_args.enable_thinking", "true", {"enable_thinking": True}),
    ],
)
def test_an_override_is_typed_as_the_file_would_be(key: str, text: str, value: object) -> None:
    found: Any = parsed(overrides=[(key, text)]).model_dump()
    for part in key.removesuffix(".enable_thinking").split("."):
        found = found[part]
    assert found == value and type(found) is type(value)


def test_an_override_wins_over_the_file_and_the_last_one_over_the_first() -> None:
    tree = {"learner": {"lr": 0.5, "warmup": 3}}
    config = parsed(tree, [("learner.lr", "0.25"), ("learner.lr", "0.125")])
    assert (config.learner.lr, config.learner.warmup) == (0.125, 3)
    assert tree == {"learner": {"lr": 0.5, "warmup": 3}}, "the tree given is left as it was"


def test_an_override_below_a_value_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--data\.x: data is a value, not a section"):
        parsed({"data": 3}, [("data.x", "1")])


# --- kinds -------------------------------------------------------------------------------------------------


def test_settings_without_a_kind_belong_to_the_default_kind() -> None:
    assert parsed({"loss": {"m": 8}}).loss == ReverseKLMC(m=8)
    assert parsed(overrides=[("loss.m", "8")]).loss == ReverseKLMC(m=8)


def test_a_kind_alone_has_its_defaults() -> None:
    assert parsed({"loss": {"kind": "forward_kl"}}).loss == ForwardKL()
    assert parsed(overrides=[("loss.kind", "forward_kl")]).loss == ForwardKL()


@pytest.mark.parametrize("file", [{"kind": "reverse_kl_mc", "m": 8, "clip": 0.2}, {"m": 8, "clip": 0.2}])
@pytest.mark.parametrize("order", [1, -1])
def test_overriding_the_kind_discards_what_the_file_says_of_the_other_and_says_so(
    file: dict[str, Any], order: int
) -> None:
    notes: list[str] = []
    overrides = [("loss.kind", "forward_kl"), ("loss.k", "5"), ("loss.tail", "true")][::order]
    config = parse(MINIMAL | {"loss": file}, overrides, say=notes.append)
    assert config.loss == ForwardKL(k=5, tail=True)
    assert notes == ["note: kind = 'forward_kl' replaces 'reverse_kl_mc'; its settings clip, m are discarded"]


def test_overriding_the_kind_with_the_same_kind_discards_nothing() -> None:
    config = parsed({"loss": {"m": 8}}, [("loss.kind", "reverse_kl_mc"), ("loss.clip", "0.5")])
    assert config.loss == ReverseKLMC(m=8, clip=0.5)


def test_nothing_is_said_of_a_config_that_is_wrong_anyway() -> None:
    with pytest.raises(ConfigError, match=r"loss.kind: did you mean 'forward_kl'\?"):
        parsed({"loss": {"m": 8}}, [("loss.kind", "forwards_kl")])


# --- what is wrong -----------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key at the top": ({"upates": 3}, "unknown key 'upates'; did you mean 'updates'?"),
    "a key of TRL": ({"max_steps": 30}, "unknown key 'max_steps': write updates = 30"),
    "another key of TRL": (
        {"learner": {"learning_rate": 1e-5}},
        "unknown key 'learner.learning_rate': write learner.lr = 1e-05",
    ),
    "a loss of verl's distillation": (
        {"loss": {"loss_mode": "k1"}},
        "unknown key 'loss.loss_mode': write loss.kind = \"k1\"",
    ),
    "a size of verl's distillation": (
        {"sft": {"loss": {"topk": 8}}},
        "unknown key 'sft.loss.topk': write sft.loss.k = 8",
    ),
    "the same name elsewhere": ({"sampler": {"topk": 8}}, "unknown key 'sampler.topk'; did you mean 'top_k'?"),
    "a section of verl": ({"distillation": {}}, "unknown key 'distillation': write loss.kind, and [teachers.NAME]"),
    "an advantage of a whole distribution": (
        {"loss": {"kind": "forward_kl", "use": "advantage"}},
        'loss.use is for estimates of the KL at the emitted token: write loss.kind = "k1", or drop it',
    ),
    "a key of TRL that counts something else": (
        {"per_device_train_batch_size": 8},
        "unknown key 'per_device_train_batch_size': write learner.batch_size, which counts the samples of an update on",
    ),
    "a loss of verl": (
        {"policy": {"loss": "ppo"}},
        """policy.loss = 'ppo': write policy.loss = "vanilla", which is PPO's clip, and policy.advantage = "grpo\"""",
    ),
    "an advantage of verl": (
        {"policy": {"advantage": "tir_optimal_token_baseline"}},
        "policy.advantage = 'tir_optimal_token_baseline': write policy.advantage = \"optimal_token_baseline\"",
    ),
    "a penalty of verl": (
        {"reference": {"weight": 0.1, "estimate": "kl"}},
        """reference.estimate = 'kl': write reference.estimate = "k1\"""",
    ),
    "unknown section": ({"larner": {"lr": 1.0}}, "unknown key 'larner'; did you mean 'learner'?"),
    "unknown key that is a kind": ({"forward_kl": 3}, "unknown key 'forward_kl'; known: checkpoint, correction"),
    "unknown nested key": (
        {"sampler": {"max_token": 3}},
        "unknown key 'sampler.max_token'; did you mean 'max_tokens'?",
    ),
    "unknown key of the default kind": ({"loss": {"clp": 1}}, "unknown key 'loss.clp'; did you mean 'clip'?"),
    "unknown key of a kind": (
        {"loss": {"kind": "forward_kl", "cach": "hidden"}},
        "unknown key 'loss.cach'; did you mean 'cache'?",
    ),
    "key of the other kind": (
        {"loss": {"kind": "forward_kl", "m": 8}},
        "unknown key 'loss.m'; known: cache, k, kind, log_prob_min_clamp, loss_max_clamp, renormalise, tail, ",
    ),
    "unknown key of a teacher": (
        {"teachers": {"main": {"model": "t", "dtyp": "float32"}}},
        "unknown key 'teachers.main.dtyp'; did you mean 'dtype'?",
    ),
    "unknown key of a teacher called like a kind": (
        {"teachers": {"forward_kl": {"model": "t", "dtyp": "float32"}}},
        "unknown key 'teachers.forward_kl.dtyp'; did you mean 'dtype'?",
    ),
    "unknown kind": ({"loss": {"kind": "reverse_kl_m"}}, "loss.kind: did you mean 'reverse_kl_mc'?"),
    "kind of the wrong type": (
        {"loss": {"kind": 7.5}},
        "loss.kind: known: abs, common_topk, decoupled_ppo, eopd, forward_kl, gold, gold_merged, jsd, k1, k1+, k2",
    ),
    "kind of a schedule": ({"schedule": {"kind": "asynch"}}, "schedule.kind: did you mean 'async'?"),
    "age of what is never old": (
        {"schedule": {"kind": "sync", "max_lag": 3}},
        "unknown key 'schedule.max_lag'; known: kind",
    ),
    "bound that waiting cannot keep": (
        {"schedule": {"tau": 4, "max_lag": 2}},
        "schedule: max_lag = 2 cannot be kept by waiting with work for 4 more updates in flight: write max_lag = 4",
    ),
    "bound within a publish": (
        {"schedule": {"publish_every": 3, "max_lag": 1, "on_old": "drop"}},
        "schedule: max_lag = 1 cannot be kept when weights are published every 3 updates: write max_lag = 2 or more",
    ),
    "what to do about nothing": (
        {"schedule": {"on_old": "drop"}},
        "schedule: on_old does nothing without max_lag: set max_lag, or drop on_old",
    ),
    "two bounds": (
        {"schedule": {"order": "submission", "max_lag": 9}},
        'schedule: order = "submission" bounds the lag by itself: drop max_lag, or the order',
    ),
    "evaluation between two publishes": (
        {"schedule": {"publish_every": 2}, "eval": {"every": 3}, "data": {"eval": "x"}, "task": {"reward": "exact"}},
        "eval.every = 3 is not a multiple of schedule.publish_every = 2",
    ),
    "neither of two": (
        {"sampler": {"replicas": "many"}},
        "sampler.replicas: input should be a valid integer or 'auto', got 'many'",
    ),
    "address of nothing": (
        {"runtime": {"kind": "inline", "address": "auto"}},
        'runtime.address names a Ray cluster: write runtime.kind = "ray", or drop one of them',
    ),
    "nobody comes inline": (
        {"runtime": {"kind": "inline"}, "sampler": {"replicas": "auto"}},
        'replicas = "auto": with runtime.kind = "inline" no worker can be added: write a number',
    ),
    "most of a number": (
        {"sampler": {"replicas": 2, "replicas_max": 4}},
        'sampler.replicas_max does nothing without replicas = "auto"',
    ),
    "text for a number": ({"updates": "many"}, "updates: input should be a valid integer, got 'many'"),
    "digits for a number": ({"updates": "7"}, "updates: input should be a valid integer, got '7'"),
    "truth for a number": ({"updates": True}, "updates: input should be a valid integer, got True"),
    "fraction for a whole number": ({"updates": 2.5}, "updates: input should be a valid integer, got"),
    "number for truth": ({"data": {"shuffle": 1}}, "data.shuffle: input should be a valid boolean, got 1"),
    "number for text": ({"student": 7}, "student: input should be a valid string, got 7"),
    "value for a section": ({"learner": 3}, "learner: input should be an object, got 3"),
    "value for a section of kinds": ({"loss": 3}, "loss: input should be an object, got 3"),
    "value for a teacher": ({"teachers": {"main": "t"}}, "teachers.main: input should be an object, got 't'"),
    "one of two numbers": ({"loss": {"clip": [0.2]}}, "loss.clip: input should be a valid number, got [0.2]"),
    "unknown choice": (
        {"sampler": {"engine": "sglang"}},
        "sampler.engine: input should be 'native', 'vllm' or 'server', got 'sglang'",
    ),
    "unknown tracker": ({"log": {"to": ["wandbb"]}}, "log.to: input should be 'tensorboard', 'wandb', 'mlflow' or"),
    "too small": ({"updates": 0}, "updates: input should be greater than or equal to 1, got 0"),
    "not finite": ({"learner": {"lr": math.inf}}, "learner.lr: input should be a finite number, got inf"),
    "not a number": ({"learner": {"lr": math.nan}}, "learner.lr: input should be a finite number, got nan"),
    "beta of one": ({"learner": {"betas": [0.9, 1.0]}}, "learner.betas: input should be less than 1, got 1.0"),
    "negative clip": ({"loss": {"clip": -0.2}}, "loss.clip: input should be greater than 0 or a valid array, got -0.2"),
    "no teacher": ({"teachers": {}}, "distillation needs a teacher: add [teachers.main], or write loss.weight = 0"),
    "teacher with nothing to do": (
        {"loss": {"weight": 0}, "policy": {}, "task": {"reward": "exact"}},
        "loss.weight = 0 leaves the teacher nothing to do: drop [teachers], or the weight",
    ),
    "nothing to learn from": (
        {"loss": {"weight": 0}, "teachers": {}},
        "loss.weight = 0 leaves nothing to learn from: add [policy] for a loss on task rewards",
    ),
    "policy loss without rewards": (
        {"policy": {}},
        '[policy] learns from rewards: set task.reward, for example "exact"',
    ),
    "unknown policy loss": ({"policy": {"loss": "pppo"}}, "policy.loss: input should be 'vanilla', 'reinforce'"),
    "reference in rewards that are not": (
        {"reference": {"weight": 0.1, "into": "reward"}},
        'reference.into = "reward" needs [policy], whose rewards it changes: write "loss"',
    ),
    "reference without a weight": ({"reference": {}}, "'reference.weight' is missing: Coefficient β of the KL"),
    "mini-batches that do not divide": (
        {"learner": {"minibatches": 3}},
        "learner.minibatches = 3 does not divide the 64 groups of an update",
    ),
    "ranks that would be idle": (
        {"learner": {"ranks": 3, "minibatches": 32}},
        "learner.ranks = 3 is more than the 2 groups of one step: some would have nothing to do",
    ),
    "ranks in one process": (
        {"learner": {"ranks": 2}, "runtime": {"kind": "inline"}},
        'learner.ranks needs a process for each: write runtime.kind = "local"',
    ),
    "a key of an older version": (
        {"learner": {"shared_prompt": True}},
        "learner.shared_prompt was dropped: the prompt of a group is computed once wherever learner.packing is on; "
        "leave it out",
    ),
    "teacher whose name is no word": (
        {"teachers": {"a-b": {"model": "t"}}},
        "teachers: the name 'a-b' must be a plain word, as in [teachers.main]",
    ),
    "teacher without model": ({"teachers": {"main": {}}}, "'teachers.main.model' is missing: HF directory or hub name"),
    "template argument that TOML cannot hold": (
        {"data": {"template_args": {"x": None}}},
        "data.template_args: x cannot be none: leave it out",
    ),
    "batch that splits a group": (
        {"sampler": {"group": 3}},
        "learner.batch_size = 64 is not a multiple of sampler.group = 3",
    ),
    "group larger than the slots": (
        {"sampler": {"group": 64, "slots": 32}},
        "sampler.group = 64 needs sampler.slots of at least 64",
    ),
    "evaluation group larger than the slots": (
        {"eval": {"every": 1, "n": 65}, "data": {"eval": "x.jsonl"}, "task": {"reward": "exact"}},
        "eval.n = 65 needs sampler.slots of at least 65",
    ),
    "evaluation without data": ({"eval": {"every": 1}}, "eval.every needs held-out prompts: set data.eval"),
    "evaluation without reward and teacher": (
        {
            "eval": {"every": 1},
            "data": {"eval": "x.jsonl"},
            "teachers": {},
            "loss": {"weight": 0.0},
            "sft": {"updates": 1, "source": "data"},
            "updates": 1,
        },
        'eval.every needs a way to grade answers: set task.reward, for example "exact"',
    ),
    "temperature of an evaluation without reward": (
        {"eval": {"every": 1, "temperature": 0.5}, "data": {"eval": "x.jsonl"}},
        "eval.temperature does nothing without task.reward: the KL to the teacher is that of the policy that training",
    ),
    "two trust regions": (
        {"loss": {"clip": 0.2, "ratio_cap": 2.0}},
        "loss: clip and ratio_cap both bound the ratio: keep one of them",
    ),
    "trust region without ratio": (
        {"loss": {"importance": False, "clip": 0.2}},
        "loss: importance = false has no ratio for clip or ratio_cap to bound: drop them",
    ),
    "old advantage without ratio": (
        {"loss": {"importance": False, "advantage": "behavior"}},
        'loss: importance = false recomputes the advantage: write advantage = "current"',
    ),
    "two completions": (
        {"loss": {"kind": "forward_kl", "tail": True, "renormalise": True}},
        "loss: tail and renormalise exclude each other: keep one of them",
    ),
    "completion of the whole": (
        {"loss": {"kind": "forward_kl", "cache": "hidden", "tail": True}},
        "loss: the hidden cache is the whole distribution: drop tail and renormalise",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_in_one_line(case: str) -> None:
    tree, message = WRONG[case]
    with pytest.raises(ConfigError, match="^config: " + re.escape(message)) as caught:
        parsed(tree)
    assert "\n" not in str(caught.value)


def test_an_unknown_override_is_named_like_an_unknown_key() -> None:
    with pytest.raises(ConfigError, match=re.escape("unknown key 'learner.learning_rates'; did you mean")):
        parsed(overrides=[("learner.learning_rates", "1")])


def test_a_missing_student_is_named_with_what_it_is() -> None:
    with pytest.raises(ConfigError, match="'student' is missing: Model to train"):
        parse({"teachers": {"main": {"model": "t"}}}, say=silent)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.mkdir(), r"is a directory; name its config\.toml"),
        (lambda path: path.write_text("student = "), "not valid TOML: "),
        (lambda path: path.write_bytes(b'student = "\xff"'), "not valid TOML: "),
        (lambda path: path.symlink_to(path), "cannot be read: "),
    ],
    ids=["missing", "directory", "not TOML", "not UTF-8", "unreadable"],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "a.toml")
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(tmp_path / 'a.toml'))}: {message}"):
        load(tmp_path / "a.toml", say=silent)


def test_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("x = 1")
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(tmp_path / 'a.toml'))}: "):
        load(tmp_path / "a.toml", say=silent)


def test_the_package_has_a_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", slipstream.__version__)


# --- the page -------------------------------------------------------------------------------------------------


def test_every_setting_is_on_the_page_with_its_bounds() -> None:
    text = pages.settings()
    for dotted, info, kind in fields():
        section, _, name = dotted.rpartition(".")
        part = text.partition(f"\n## [{section}]\n" if section else "\n## The run\n")[2].partition("\n## ")[0]
        if kind:
            part = part.partition(f"### {section}.kind = {pages.named(kind)}\n")[2].partition("\n### ")[0]
        if not (kind and name == "kind"):
            assert f"| `{name}` | " in part, (dotted, kind)
        assert " ".join((info.description or "").split()) in part.replace("\\|", "|"), (dotted, kind)
    assert "| `min_p` | `float = 0.0` | ≥ 0, < 1 |" in text
    assert "## [runtime]\n\n| setting" in text, "its kind is a setting like any other"
    assert 'The default is `kind = "async"`.' in text and "## [policy]\n\nLeft out by default." in text


def test_an_address_says_ray_by_itself() -> None:
    config = {"student": "x", "teachers": {"main": {"model": "y"}}}
    assert parse(config).runtime.kind == "local"
    assert parse(config | {"runtime": {"address": "auto"}}).runtime.kind == "ray"
    with pytest.raises(ConfigError, match="runtime.address names a Ray cluster"):
        parse(config | {"runtime": {"address": "auto", "kind": "local"}})


def test_every_foreign_name_leads_to_a_setting_and_is_none_itself() -> None:
    known = {name for name, _, _ in fields()}
    assert {key.partition(",")[0] for key in (FOREIGN_KEYS | DISTILLATION_KEYS).values()} <= known
    assert not FOREIGN_KEYS.keys() & Config.settings().keys()
    for key, values in VALUES.items():
        section, name = key.split(".")
        (holder,) = members(Config.settings()[section].annotation)
        annotation = holder.settings()[name].annotation
        choices = [choice for each in (annotation, *get_args(annotation)) for choice in get_args(each)]
        assert not values.keys() & set(map(str, choices))
        assert all(re.search(rf'write {re.escape(key)} = "(\w+)"|policy', text) for text in values.values())
        assert {text.split('"')[1] for text in values.values()} <= set(map(str, choices))

"""The table of engines: every engine of a config has a row, a plan and classes, and every refusal is a real one."""

from typing import get_args

import pytest

from slipstream.config.engines import ENGINES
from slipstream.config.file import parse
from slipstream.config.sampler import SamplerConfig
from slipstream.config.schema import Config
from slipstream.config.teacher import TeacherConfig
from slipstream.errors import ConfigError
from slipstream.plan.engines import SAMPLERS, SCORERS

BASE = {"student": "builtin:student", "teachers": {"main": {"model": "builtin:teacher"}}}
SERVER = {"url": "http://127.0.0.1:1", "folder": "/tmp"}
SAMPLER: dict[str, dict[str, object]] = {
    "server": {"sampler": {"server": SERVER}},
    "engine_args": {"sampler": {"engine_args": {"seed": 1}}},
    "keep_mask": {"sampler": {"keep_mask": True, "top_p": 0.9}},
    "on_publish": {"sampler": {"on_publish": "reuse"}},
    "teacher_replaces": {"sampler": {"teacher_replaces": 4}, "loss": {"kind": "forward_kl"}},
    "fusion": {"sampler": {"fusion": {}}, "loss": {"kind": "forward_kl"}},
    "quantisation": {"sampler": {"quantisation": "int8"}},
    "speculation": {"sampler": {"speculation": {}}},
    "router": {"learner": {"router": "measure"}},
    "lora": {"learner": {"lora": {"rank": 2}}},
}
TEACHER: dict[str, dict[str, object]] = {
    "token_budget": {"token_budget": 4096},
    "packing": {"packing": False},
    "engine_args": {"engine_args": {"tensor_parallel_size": 2}},
    "devices": {"devices": 2},
    "user_context": {"context": "./context.py:show", "max_length": 64},
    "relabel": {"relabel": "always", "context": "{prompt}{best}"},
    "follow": {"model": "self", "follow": {"ema": 0.9}},
    "ends": {"ends": "map"},
}


def test_every_engine_that_a_config_can_choose_has_a_row_and_a_plan() -> None:
    assert set(get_args(SamplerConfig.model_fields["engine"].annotation)) == SAMPLERS.keys() < ENGINES.keys()
    teachers = {*SCORERS, "auto"}  # the plan replaces "auto" by one of the others
    assert set(get_args(TeacherConfig.model_fields["engine"].annotation)) == teachers < ENGINES.keys()


@pytest.mark.parametrize(("engine", "feature"), [(e, f) for e in SAMPLERS for f in ENGINES[e].sampler_refuses])
def test_a_sampler_refuses_what_its_row_says(engine: str, feature: str) -> None:
    config: dict[str, object] = {**BASE, **SAMPLER[feature]}
    served = {"server": SERVER} if engine == "server" else {}
    config["sampler"] = {**SAMPLER[feature].get("sampler", {}), "engine": engine, **served}  # type: ignore[dict-item]
    with pytest.raises(ConfigError) as refused:
        parse(config)
    assert ENGINES[engine].sampler_refuses[feature] in str(refused.value)


def test_vllm_returns_a_sampling_support_that_top_k_bounds() -> None:
    sampler = {"engine": "vllm", "keep_mask": True, "top_p": 0.9}
    assert parse({**BASE, "sampler": {**sampler, "top_k": 20}}).sampler.keep_mask
    with pytest.raises(ConfigError, match=r"bounded size: write sampler.top_k, for example 128, or sampler.engine = "):
        parse({**BASE, "sampler": sampler})


@pytest.mark.parametrize(
    ("engine", "feature"), [(engine, feature) for engine in ENGINES for feature in ENGINES[engine].teacher_refuses]
)
def test_a_teacher_refuses_what_its_row_says(engine: str, feature: str) -> None:
    chosen = {"base_url": "http://localhost:1/v1"} if engine == "http" else {"engine": engine}
    options = {name: value for name, value in TEACHER[feature].items() if engine != "http" or name != "max_length"}
    with pytest.raises(ConfigError) as refused:
        parse({**BASE, "teachers": {"main": {"model": "builtin:teacher", **options, **chosen}}})
    refusals = ENGINES[engine].teacher_refuses
    needed = [refusals[each] for each in refusals if each in {feature, *TEACHER[feature]}]
    assert any(why in str(refused.value) for why in needed)


def test_every_feature_of_the_table_is_one_that_a_config_can_need() -> None:
    made = parse({**BASE, "sampler": {"keep_mask": True, "top_p": 0.9, "on_publish": "reuse"}})
    assert isinstance(made, Config) and made.sampler_features == {"keep_mask", "on_publish"}
    assert SAMPLER.keys() == {feature for row in ENGINES.values() for feature in row.sampler_refuses}
    assert TEACHER.keys() == {feature for row in ENGINES.values() for feature in row.teacher_refuses}

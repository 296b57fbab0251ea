"""Decisions on what grades answers: rewards of this process, reward models and judges."""

from collections.abc import Mapping
from typing import Any

from slipstream.config.rewards import FormatConfig
from slipstream.config.schema import Config
from slipstream.engines.http.client import key_from_environment
from slipstream.engines.http.judge import Judge, JudgeEndpoint
from slipstream.engines.native.config import context_length, load_config
from slipstream.engines.native.reward_process import RewardModel
from slipstream.plan.engine_plans import GraderPlan
from slipstream.rewards.functions import RewardSettings


def grader_of(config: Config) -> GraderPlan:
    return GraderPlan(
        rewards=config.task.reward,
        processes=config.runtime.graders,
        timeout=config.task.timeout,
        sandbox=config.task.sandbox,
        settings=reward_settings(config),
        model_graders=graders_apart(config),
        keeps_text=any(teacher.shows for teacher in config.teachers.values()),
    )


def reward_settings(config: Config) -> RewardSettings:
    task, found = config.task, dict[str, Mapping[str, Any]]()
    if "format" in task.reward:
        found["format"] = (task.format or FormatConfig()).model_dump()
    if task.overlong is not None:
        found["overlong"] = task.overlong.model_dump() | {"max_tokens": config.sampler.max_tokens}
    if task.model is not None:
        found["model"] = {}
    if task.judge is not None:
        found["judge"] = {"prompt": task.judge.prompt}
    return found


def graders_apart(config: Config) -> tuple[RewardModel | Judge, ...]:
    """Return the reward model and the judge of the config, if any."""
    task, found = config.task, list[RewardModel | Judge]()
    if (model := task.model) is not None:
        found.append(
            RewardModel(
                path=model.path,
                max_length=model.max_length or context_length(load_config(model.path)),
                batch=model.batch,
                dtype=model.dtype,
                device=config.runtime.device,
                timeout=task.timeout,
            )
        )
    if (judge := task.judge) is not None:
        endpoint = JudgeEndpoint(
            teacher="",
            url=judge.base_url,
            model=judge.model,
            key=key_from_environment("task.judge.api_key_env", judge.api_key_env),
            concurrency=judge.concurrency,
            timeout=judge.timeout,
        )
        found.append(Judge(endpoint=endpoint, **judge.model_dump(include={"prompt", "pattern", "key", "max_tokens"})))
    return tuple(found)

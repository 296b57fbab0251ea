"""Tasksets of verifiers: their rows, and the agent that plays one task by verifiers' own harness and rewards.

`verifiers:TASKSET` is data and an environment; `verifiers:TASKSET+HARNESS` names another harness than the taskset's.
As an environment it stands for a gateway, whose command is this file.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

LIMIT = "context_length_exceeded"
"""Code of the gateway's answer at a limit of the episode."""
TASK_KEYS = ("idx", "prompt", "system_prompt", "answer")
"""Fields of a task that are no further columns of its row."""


def taskset_of(name: str) -> Any:
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

    return load_taskset(taskset_config_type(name)(id=name))


def rows(name: str, split: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield the first tasks of a taskset."""
    taskset = name.partition("+")[0]
    for number, task in enumerate(islice(taskset_of(taskset), count)):
        data = task.data.model_dump(mode="json", exclude_defaults=True)
        system = [{"role": "system", "content": data["system_prompt"]}] if data.get("system_prompt") else []
        meta = {key: value for key, value in data.items() if key not in (*TASK_KEYS, "id", "tools", "data_source")}
        yield {**meta, "id": data.get("id") or f"{taskset}:{number}", "data_source": taskset, "verifiers": number,
               "prompt": [*system, {"role": "user", "content": task.data.prompt_text or taskset}],
               "answer": data.get("answer")}  # fmt: skip


def refusal(env: Any, name: str) -> str:
    """Return the reason why a taskset cannot be trained here; empty if it can be."""
    if type(env).__name__ != "SingleAgentEnv":
        return f"verifiers:{name} is played by {type(env).__name__}, and not by one agent"
    (harness,) = env._harnesses.values()
    if harness.EXECUTES_CODE:
        known = harness.config.id or type(harness).__name__
        return (
            f"verifiers:{name}: the harness {known} runs the student's code beside the rewards, which the code can "
            "forge: name one that runs none, as in verifiers:TASKSET+null"
        )
    return ""


def environment_of(name: str, base_url: str) -> Any:
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import environment_class, load_environment

    taskset, _, harness = name.partition("+")
    kind = environment_class(taskset)
    agent: dict[str, Any] = {
        "model": "student",
        "client": {"type": "eval", "base_url": base_url, "api_key_var": "OPENAI_API_KEY"},
        "runtime": vf.SubprocessConfig(),
    } | ({"harness": {"id": harness}} if harness else {})
    if kind is not vf.SingleAgentEnv:
        raise SystemExit(refusal(kind.__new__(kind), name))
    return load_environment(vf.SingleAgentEnvConfig(taskset={"id": taskset}, agent=agent))


async def play(name: str, index: int, base_url: str) -> dict[str, float]:
    """Play a task; return its rewards by name. Raise SystemExit with one line if that fails."""
    from verifiers.v1 import ModelContext

    env = environment_of(name, base_url)
    if why := refusal(env, name):
        raise SystemExit(why)
    task = next(iter(env.taskset.include(idx=[f"{index}:{index + 1}"])))
    (spec,) = env._agent_specs.values()
    async with env.serving():
        episode = await env.run_episode(task, ModelContext("student", spec.client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if any(LIMIT in error.message for error in errors):
        return {"reward": 0.0}  # a harness that does not stop at a limit leaves its task without scores
    if not episode.ok or not episode.traces:
        raise SystemExit(f"{errors[0].type}: {errors[0].message}" if errors else "verifiers lost the episode")
    (trace,) = episode.traces
    named = {reward: each.value for reward, each in trace.rewards.items() if each is not None}
    return {**named, "reward": trace.reward}


def main(name: str) -> None:
    """Play the task of the row, and write its rewards."""
    row = json.loads(Path(os.environ["SLIPSTREAM_TASK"]).read_text("utf-8"))
    if "verifiers" not in row["meta"]:
        raise SystemExit(f'the row is no task of verifiers: write data.train = "verifiers:{name.partition("+")[0]}"')
    rewards = asyncio.run(play(name, row["meta"]["verifiers"], os.environ["OPENAI_BASE_URL"]))
    Path("reward.json").write_text(json.dumps(rewards), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])

"""Agents of five packages in their default modes, unmodified: each calls a tool and ends with the student's answer."""

import asyncio
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dictation import PYTHON

from support.gateways import Babble, serving

TASK = "How is the weather in Paris?"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = "It rains in Paris."
OPENAI_AGENTS = """
import sys
from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def weather(city: str) -> str:
    return f"rain in {city}"


agent = Agent(name="agent", instructions="Be brief.", tools=[weather], model="gpt-5")
print(Runner.run_sync(agent, sys.argv[1]).final_output)
"""
PYDANTIC_AI = """
import sys
from pydantic_ai import Agent

agent = Agent("openai:gpt-5", system_prompt="Be brief.")


@agent.tool_plain
def weather(city: str) -> str:
    return f"rain in {city}"


print(agent.run_sync(sys.argv[1]).output)
"""
PYDANTIC_AI_TYPED = """
import sys
from pydantic import BaseModel
from pydantic_ai import Agent


class Weather(BaseModel):
    city: str
    sky: str


print(Agent("openai-chat:gpt-5", output_type=Weather).run_sync(sys.argv[1]).output.sky)
"""
LANGCHAIN = """
import sys
from langchain.agents import create_agent
from langchain_core.tools import tool


@tool
def weather(city: str) -> str:
    "Return the weather of a city."
    return f"rain in {city}"


agent = create_agent("openai:gpt-5", tools=[weather], system_prompt="Be brief.")
print(agent.invoke({"messages": [("user", sys.argv[1])]})["messages"][-1].content)
"""
SMOLAGENTS = """
import os, sys
from smolagents import KIND, OpenAIServerModel, tool


@tool
def weather(city: str) -> str:
    '''Return the weather of a city.

    Args:
        city: Name of the city.
    '''
    return f"rain in {city}"


model = OpenAIServerModel("gpt-5", api_base=os.environ["OPENAI_BASE_URL"], api_key="none")
print(KIND(tools=[weather], model=model, verbosity_level=0).run(sys.argv[1]))
"""
FINAL = f'<tool_call>\n{{"name": "final_answer", "arguments": {{"answer": "{ANSWER}"}}}}\n</tool_call>'
TYPED = '<tool_call>\n{"name": "final_result", "arguments": {"city": "Paris", "sky": "rain"}}\n</tool_call>'
AGENTS: dict[str, tuple[str, list[str], str]] = {
    "openai-agents": (OPENAI_AGENTS, [CALL, ANSWER], ANSWER),
    "pydantic-ai": (PYDANTIC_AI, [CALL, ANSWER], ANSWER),
    "pydantic-ai, typed output": (PYDANTIC_AI_TYPED, ["It rains.", TYPED], "rain"),
    "langchain": (LANGCHAIN, [CALL, ANSWER], ANSWER),
    "smolagents, calls": (SMOLAGENTS.replace("KIND", "ToolCallingAgent"), [CALL, FINAL], ANSWER),
    "smolagents, code": (
        SMOLAGENTS.replace("KIND", "CodeAgent"),
        [
            "Thought: I look.\n<code>\nprint(weather('Paris'))\n</code> and then",
            f"<code>\nfinal_answer({ANSWER!r})\n</code>",
        ],
        ANSWER,
    ),
}
"""Script, what the student says in its turns, and what the agent prints last."""


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_plays_its_episode_as_it_comes(name: str, tmp_path: Path) -> None:
    """Every token that the student drew is trained once, whether the agent continues a conversation or changes it."""
    script, says, last = AGENTS[name]
    (tmp_path / "agent.py").write_text(script, "utf-8")

    async def main() -> tuple[Babble, str, list[Any]]:
        policy = Babble()
        policy.says = list(says)
        async with serving(policy) as (_, session, url):
            session.sampling = replace(session.sampling, max_tokens=20_000)  # smolagents explains much
            environment = os.environ | {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none"}
            command = [PYTHON, "-W", "ignore", tmp_path / "agent.py", TASK]
            done = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, timeout=200, env=environment
            )
            assert done.returncode == 0, done.stderr
            return policy, done.stdout.strip().splitlines()[-1], session.rollouts("eos", 1, {})

    policy, printed, rows = asyncio.run(main())
    assert printed == last and not policy.says
    drawn = [int(token) for _, ids in policy.calls for token in ids]
    trained = [int(token) for row in rows for token in row.tokens[row.loss_mask]]
    assert len(rows) <= len(says) and len(trained) <= len(drawn)
    if "code" not in name:  # nothing is cut at a stop sequence
        assert sorted(trained) == sorted(drawn), json.dumps([trained, drawn])

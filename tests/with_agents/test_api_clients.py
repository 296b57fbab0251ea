"""The clients of OpenAI and Anthropic, unmodified, with the gateway's responses and messages, whole and streamed."""

import asyncio
import json
import subprocess
from dataclasses import replace

import pytest
from dictation import PYTHON

from support.gateways import FUNCTION, serving

OPENAI = """
import json, sys
from openai import OpenAI

url, tool = sys.argv[1], json.loads(sys.argv[2])
client = OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
items, found = [{"role": "user", "content": "And?"}], []
for turn in range(4):
    given = {"model": "student", "input": items, "tools": [{"type": "function", "strict": None, **tool}]}
    if turn % 2:
        with client.responses.stream(**given) as stream:
            for event in stream:
                pass
            answer = stream.get_final_response()
    else:
        answer = client.responses.create(**given)
    calls = [item for item in answer.output if item.type == "function_call"]
    items += [item.model_dump(exclude={"parsed", "parsed_arguments"}, warnings=False) for item in answer.output]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "seen"} for call in calls]
    items += [] if calls else [{"role": "user", "content": "And then?"}]
    found.append([answer.output_text, [[call.name, json.loads(call.arguments)] for call in calls]])
print(json.dumps(found))
"""
ANTHROPIC = """
import json, sys
from anthropic import Anthropic

url, tool = sys.argv[1], json.loads(sys.argv[2])
client = Anthropic(base_url=url, api_key="none", max_retries=0)
tools = [{"name": tool["name"], "input_schema": tool["parameters"]}]
messages, found = [{"role": "user", "content": "And?"}], []
for turn in range(4):
    given = {"model": "student", "max_tokens": 500, "messages": messages, "tools": tools}
    if turn % 2:
        with client.messages.stream(**given) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**given)
    calls = [block for block in answer.content if block.type == "tool_use"]
    messages.append({"role": "assistant", "content": [block.model_dump(warnings=False) for block in answer.content]})
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "seen"} for call in calls]
    messages.append({"role": "user", "content": results or "And then?"})
    text = "".join(block.text for block in answer.content if block.type == "text")
    found.append([text, [[call.name, call.input] for call in calls]])
print(json.dumps(found))
"""


@pytest.mark.parametrize("seed", range(3))
def test_both_clients_play_the_same_episode(seed: int) -> None:
    """The student says what follows from its seed, so that both clients hear the same, in one branch."""

    async def main(script: str) -> tuple[object, list[int]]:
        async with serving() as (_, session, url):
            session.prompt = replace(session.prompt, seed=seed)
            command = [PYTHON, "-c", script, url, json.dumps(FUNCTION)]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            (lineage,) = session.rollouts("eos", 1, {})
            return json.loads(done.stdout), lineage.tokens.tolist()

    (by_openai, tokens), (by_anthropic, others) = asyncio.run(main(OPENAI)), asyncio.run(main(ANTHROPIC))
    assert by_openai == by_anthropic
    assert len(tokens) and len(others)

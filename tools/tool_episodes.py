"""Episodes of the tasks for tools as somebody who knows how would play them, and as somebody who is careless.

What is said follows a script, and what comes back is from the task's own environment. A careless turn leaves out a
brace, takes a tool that is not there, asks for another key, adds what should be taken off, or answers too soon.
"""

import json
import random
import re
import string
from collections.abc import Callable, Coroutine, Generator, Iterator
from functools import cache
from typing import Any

from slipstream.data.builtin import Problem
from slipstream.environments import Reply, Start
from slipstream.environments.chat.tool_calls import HERMES
from slipstream.environments.forms import Acting, Kind, kind_of

SHOWN = 4096
"""Characters of an observation."""
CALL = re.compile(r"<tool_call>(.*)</tool_call>")
SIGNS = {"+": "add", "-": "subtract"}
WRONG = {"get": "look", "look": "get", "add": "look", "subtract": "look"}
"""A tool that is not there, for each that is."""
OTHER = {"add": "subtract", "subtract": "add"}

UNKNOWN = 0.25
"""The share of errors whose wording is made up, so that no model clings to that of today."""


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@cache
def kind(task: str) -> Kind:
    return kind_of(task)


async def at_once(method: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return method(*given, **named)


def result(asked: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that awaits nothing."""
    try:
        asked.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits")


def opened(task: str, table: dict[str, Any]) -> Acting:
    """An environment, in this process."""
    acting = Acting(kind(task), at_once, SHOWN)
    nothing = Start(id="", prompt="", ground_truth=None, meta={"table": table}, data_source=task, seed=0, sandbox=None)
    result(acting.start(nothing))
    return acting


def act(environment: Acting, said: str) -> tuple[str, bool]:
    """Return the results of a turn that calls tools, and True if all of it were calls."""
    found, before = HERMES.read(said), environment.counts["invalid"]
    step = result(environment.step(Reply(found.text, tuple(found.calls), tuple(found.faults))))
    return "\n".join(message["content"] for message in step.messages), environment.counts["invalid"] == before


def steps(task: str, question: str) -> Generator[tuple[str, bool], str, None]:
    """Yield the turns of a perfect player, and True at the last call; receive the results."""
    words = question.rstrip("?").split()
    if task == "lookup":
        key, hops = words[2], int(words[5])
        for hop in range(hops):
            key = yield call("look", key=key), hop == hops - 1
        yield key, False
        return
    if task == "doors":
        found = words[2].rstrip(".")
        while len(found) == 1:
            found = yield call("get", key=found), False
        yield found, False
        return
    pairs = list(zip(words[2][1::2], words[2][2::2], strict=True))
    total = yield call("get", key=words[2][0]), False
    for place, (sign, key) in enumerate(pairs):
        number = yield call("get", key=key), False
        total = yield call(SIGNS[sign], a=int(total), b=int(number)), place == len(pairs) - 1
    yield total, False


def slip(said: str, seen: str, rng: random.Random, *, answers: bool) -> str:
    """A careless version of a turn after `seen` came back; it ends the episode only if it may be one of the answers."""
    found = CALL.fullmatch(said)
    if not found:
        return guess(said, rng)
    asked = json.loads(found[1])
    name, arguments = asked["name"], asked["arguments"]
    match rng.choice(("brace", "tool", "argument", "answer") if answers else ("brace", "tool", "argument")):
        case "brace":
            return said.replace("}}", "}")
        case "tool":
            return call(WRONG[name], **arguments)
        case "argument":
            return call(name, key=guess("a", rng)) if "key" in arguments else call(OTHER[name], **arguments)
        case _:
            return seen or guess("a" if name == "look" else "0", rng)


def guess(like: str, rng: random.Random) -> str:
    return rng.choice(string.ascii_lowercase) if like.isalpha() else str(rng.randrange(10, 200))


def episode(
    task: str, problem: Problem, rng: random.Random, slips: float, hurry: float = 0.0, *, heeds: bool
) -> Iterator[tuple[str, str, bool]]:
    """Role, text, and whether it is worth learning, of every message.

    A share of the turns is careless. Who heeds that learns nothing of them and mends them; who does not goes on with
    whatever came back, unless it is plainly of no use. Who is in a hurry answers before the last call.
    """
    question, _, table = problem
    environment = opened(task, table)
    yield "user", question, False
    script, seen = steps(task, question), ""
    due, last = next(script)
    while True:
        careless = rng.random() < slips and (not heeds or "<tool_call>" in due)
        said = slip(due, seen, rng, answers=not heeds) if careless else due
        said = seen if last and rng.random() < hurry else said
        yield "assistant", said, not (careless and heeds)
        if "<tool_call>" not in said:
            return
        back, worked = act(environment, said)
        if not worked and rng.random() < UNKNOWN:
            back = "error: " + "".join(rng.choices(string.ascii_letters + " ,:'{}", k=rng.randrange(5, 60)))
        yield "tool", back, False
        if worked and not back.startswith("no key") and not (careless and heeds):
            (due, last), seen = script.send(back), back

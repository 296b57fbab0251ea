"""OpenEnv's own server, unmodified: rows from seeds, moves by its schema, and runs that learn from its rewards."""

import json
import random
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from dictation import ROOT, TOKENIZER

from runs import check_calls, check_laws, trained
from slipstream.data.prompts import load_rows
from slipstream.environments.games import checked, game_of
from slipstream.environments.openenv import OpenEnvGame
from slipstream.environments.pool import EnvironmentSettings, schemas
from slipstream.errors import ConfigError, DataError, EnvironmentFailed

pytestmark = pytest.mark.usefixtures("packages")
SERVERS = """
import random, sys, threading
import uvicorn
from pydantic import BaseModel
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Word(Action):
    word: str


class Count(Action):
    count: int


class Box(BaseModel):
    colour: str


class Order(Action):
    item: str
    number: int = 1
    box: Box | None = None


class Said(Observation):
    text: str


class Shelf(Observation):
    items: list[str]
    note: str | None = None


class Words(Environment[Word, Said, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None):
        self.word, self.tries = random.Random(seed).choice(["red", "green", "blue"]), 0
        return Said(text=f"Which colour has {len(self.word)} letters?")

    def step(self, action):
        self.tries += 1
        if action.word == "crash":
            raise ValueError("out of colours")
        right = action.word == self.word
        return Said(text=f"{action.word}: {'yes' if right else 'no'}", reward=1.0 if right else -0.25, done=right)

    @property
    def state(self):
        return State(step_count=self.tries)


class Counts(Words):
    def step(self, action):
        return Said(text=f"{action.count}", reward=action.count > 3, done=action.count > 3)


class Shop(Words):
    def reset(self, seed=None, episode_id=None):
        super().reset(seed)
        return Shelf(items=["cup", "pen"])

    def step(self, action):
        return Shelf(items=[action.item] * action.number, note="sold", reward=None, done=action.item == "pen")


class Drawers(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("drawers")

        @server.tool
        def look(drawer: int) -> str:
            "Look into a drawer."
            if drawer > 3:
                raise ValueError("there are three drawers")
            return "a key" if drawer == self.place else "nothing"

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **others):
        self.place = random.Random(seed).randint(1, 3)
        return Observation(metadata={"note": "not for the student"})

    def _step_impl(self, action, **others):
        raise NotImplementedError

    async def step_async(self, action, **others):
        seen = await super().step_async(action, **others)
        if isinstance(seen, CallToolObservation):
            seen.done = seen.result is not None and seen.result.data == "a key"
            seen.reward = 1.0 if seen.done else -0.25
        return seen

    @property
    def state(self):
        return State()


def serve(environment, action, observation, port, sessions):
    app = create_fastapi_app(environment, action, observation, max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


ports = [int(port) for port in sys.argv[1:]]
kinds = (Words, Word, Said, 16), (Counts, Count, Said, 16), (Shop, Order, Shelf, 16), (Words, Word, Said, 1), \\
    (Drawers, CallToolAction, CallToolObservation, 16)
threads = []
for port, (environment, action, observation, sessions) in zip(ports, kinds):
    given = environment, action, observation, port, sessions
    threads.append(threading.Thread(target=serve, args=given))
    threads[-1].start()
for thread in threads:
    thread.join()
"""
COLOURS = {3: "red", 4: "blue", 5: "green"}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Serve words, counts, a shop, words to one session at a time, and drawers; yield their names."""
    script = tmp_path_factory.mktemp("servers") / "servers.py"
    script.write_text(SERVERS)
    ports = list[int]()
    for _ in range(5):
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            ports.append(free.getsockname()[1])
    python = ROOT / ".venv-openenv" / "bin" / "python"
    process = subprocess.Popen([python, script, *map(str, ports)])
    try:
        for port in ports:
            wait_for(port, process)
        yield [f"openenv:http://127.0.0.1:{port}" for port in ports]
    finally:
        process.kill()
        process.wait()


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < end:
        with closing(socket.socket()) as trial:
            if trial.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the server does not start")


def test_rows_are_the_first_texts_of_seeds(servers: list[str]) -> None:
    rows = load_rows(servers[0], limit=9)
    assert [row.meta["seed"] for row in rows] == list(range(9))
    texts = [message["content"] for row in rows for message in row.prompt if isinstance(message, dict)]
    assert set(texts) == {f"Which colour has {letters} letters?" for letters in COLOURS}
    assert texts == [game_of(servers[0]).reset(seed) for seed in range(9)]
    assert load_rows(servers[0], split="eval", limit=1)[0].meta["seed"] == 10**9


def test_an_action_with_one_text_is_the_reply_and_rewards_of_steps_are_added(servers: list[str]) -> None:
    game = game_of(servers[0])
    colour = COLOURS[int(game.reset(3).split()[3])]
    wrong = next(each for each in COLOURS.values() if each != colour)
    assert game.act(f" {wrong}\n") == (f"{wrong}: no", False) and game.last_reward == -0.25
    assert game.act(colour) == (f"{colour}: yes", True) and game.last_reward == 1.0
    assert game.end() == (0.75, {"invalid_move": 0.0})
    game.reset(4)
    assert game.end() == (0.0, {"invalid_move": 0.0})


def test_an_action_with_one_integer_is_the_last_number_of_the_reply(servers: list[str]) -> None:
    game = game_of(servers[1])
    assert game.reset(3).endswith("letters?\nAnswer with an integer.")
    for move in ("five", "9" * 5000):
        assert game.act(move) == ("Answer with an integer.", False) and game.last_reward is None
    assert game.act("2, or rather -3") == ("-3", False) and game.last_reward == 0.0
    assert game.act("7") == ("7", True) and game.end() == (1.0, {"invalid_move": 1.0})


def test_an_action_with_several_fields_is_a_json_object_of_the_schema(servers: list[str]) -> None:
    game = game_of(servers[2])
    first, schema = game.reset(3).split("\n")
    assert first == '{"items": ["cup", "pen"]}' and schema.startswith(
        'Answer with a JSON object of this schema: {"item"'
    )
    assert '"$defs": {"Box": ' in schema
    for move in ("a cup", "{item: cup}", '{"item": 3}', '{"item": "cup", "colour": "red"}', "} {"):
        assert game.act(move) == (schema, False)
    assert game.act('I take {"item": "cup", "number": 2}.') == ('{"items": ["cup", "cup"], "note": "sold"}', False)
    assert game.act('{"item": "pen", "metadata": 3}')[1] and game.end() == (0.0, {"invalid_move": 1.0})


def test_a_server_that_fails_or_is_full_or_not_there_is_one_line(servers: list[str]) -> None:
    game = game_of(servers[0])
    game.reset(1)
    with pytest.raises(EnvironmentFailed, match="^the server refused step: out of colours$"):
        game.act("crash")
    game.reset(1)
    game.socket.close()
    with pytest.raises(EnvironmentFailed, match="^the server was lost in step: "):
        game.act("red")
    assert game.reset(1).startswith("Which colour")
    held = checked(servers[3])
    held.reset(1)
    with pytest.raises(ConfigError, match=r"the server refused reset: .*: let it serve as many sessions as episodes"):
        checked(servers[3])
    held.end()
    for spec, line in {
        "openenv:127.0.0.1:9": "'127.0.0.1:9' is no address of a server: write openenv:http://HOST:PORT",
        "openenv:http://127.0.0.1:9": "cannot read the schema of an OpenEnv server at http://127.0.0.1:9: ",
    }.items():
        with pytest.raises(DataError) as as_data:
            load_rows(spec, limit=1)
        with pytest.raises(ConfigError) as as_environment:
            schemas(EnvironmentSettings(spec, None, 200))
        assert str(as_data.value).startswith(f"{spec}: {line}") and "\n" not in str(as_data.value)
        assert str(as_environment.value).startswith(f"environment.use = {spec!r}: {line}")


def test_a_run_learns_from_a_server(
    servers: list[str], tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {0: ["red", "green", "blue"], 1: ["pink", "white"]}
    rows = load_rows(servers[0], limit=4)
    colours = [COLOURS[int(row.prompt[0]["content"].split()[3])] for row in rows]  # type: ignore[index]
    environment = {"use": servers[0], "turns": 2}
    data = {"train": servers[0], "limit": 4, "shuffle": False}
    run = trained(monkeypatch, tmp_path, models, [], environment, lambda p: said[p.first], data=data)
    check_calls(run)
    assert len(run.rollouts) == 4
    for number, rollout in enumerate(run.rollouts):
        update, moves = number // 2, said[number % 2][:2]
        if colours[update] in moves:
            moves = moves[: moves.index(colours[update]) + 1]
        check_laws(rollout, moves)
        expected = [1.0 if move == colours[update] else -0.25 for move in moves]
        assert rollout.outcome["reward"] == sum(expected) and rollout.versions.max() == update
    for line in run.lines:
        assert line["failed_samples"] == 0 and line["environment/invalid_move"] == 0


# --- tools ------------------------------------------------------------------------------------------------------------


def look(*drawers: Any) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': {'drawer': each}})}\n</tool_call>" for each in drawers
    )


def place_of(seed: int) -> int:
    return random.Random(seed).randint(1, 3)


def test_a_server_with_tools_shows_their_schemas_and_what_they_return(servers: list[str]) -> None:
    (schema,) = schemas(EnvironmentSettings(servers[4], None, 200))
    assert schema["function"] == {
        "name": "look",
        "description": "Look into a drawer.",
        "parameters": {
            "type": "object",
            "properties": {"drawer": {"type": "integer"}},
            "required": ["drawer"],
        },
    }
    game = game_of(servers[4])
    assert isinstance(game, OpenEnvGame) and game.reset(3) == ""
    other = 1 + place_of(3) % 3
    assert game.call("look", {"drawer": other}) == ("nothing", False) and game.last_reward == -0.25
    assert not game.invalid
    assert game.call("look", {"drawer": 9})[0].endswith("there are three drawers") and game.invalid
    assert game.call("find", {}) == ("error: Unknown tool: 'find'", False)
    assert game.call("look", {"drawer": place_of(3)}) == ("a key", True)
    assert game.end() == (0.25, {"invalid_move": 1.0})
    with pytest.raises(DataError, match="the game shows no text before the first move: write rows with a prompt"):
        load_rows(servers[4], limit=1)


def test_a_run_learns_to_call_the_tools_of_a_server(
    servers: list[str], tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer of each group looks into two drawers at once and gives up, the second one finds the key."""
    rows = [{"prompt": [{"role": "user", "content": f"Find the key: {n}"}], "seed": n} for n in (3, 4)]

    def said(prompt: Any) -> list[str]:
        place = place_of(3 + prompt.number)
        others = [each for each in (1, 2, 3) if each != place]
        return [[look(*others), "There is none."], [look(others[0]), look(place)]][prompt.first]

    data = {"shuffle": False}
    run = trained(monkeypatch, tmp_path, models, rows, {"use": servers[4], "turns": 4}, said, data=data)
    check_calls(run)
    assert len(run.rollouts) == 4
    for number, rollout in enumerate(run.rollouts):
        assert rollout.outcome["reward"] == [-0.5, 0.75][number % 2] and rollout.versions.max() == number // 2
        seen = str(TOKENIZER.decode(rollout.tokens[~rollout.loss_mask]))
        assert seen.count("nothing") == [2, 1][number % 2] and "not for the student" not in seen
    for line in run.lines:
        assert line["failed_samples"] == 0 and line["environment/invalid_move"] == 0 and line["grad_norm"] > 0


def test_a_server_without_tools_refuses_their_calls(servers: list[str]) -> None:
    game = game_of(servers[0])
    assert isinstance(game, OpenEnvGame) and not game.calls_tools
    with pytest.raises(EnvironmentFailed, match=f"^the server at {game.url} lists no tools$"):
        game.tools()
    game.reset(1)
    assert game.call("look", {}) == ("error: the server refuses this call of look", False)
    assert game.end() == (0.0, {"invalid_move": 1.0})

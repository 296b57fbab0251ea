"""TextArena and Gymnasium, unmodified: rows from seeds, games that play again exactly, and runs that learn."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dictation import TOKENIZER

from runs import check_calls, check_laws, trained
from slipstream.data.prompts import load_rows
from slipstream.environments import Reply
from slipstream.environments.games import game_of
from slipstream.environments.pool import EnvironmentPool, EnvironmentSettings, schemas
from slipstream.errors import ConfigError, DataError, EnvironmentFailed

pytestmark = pytest.mark.usefixtures("packages")
BLACKJACK, GUESS, LAKE = "textarena:Blackjack-v0", "textarena:GuessTheNumber-v0", "gymnasium:FrozenLake-v1"
ECHO = """
import gymnasium
from gymnasium.spaces import Text


class Echo(gymnasium.Env):
    observation_space = action_space = Text(100)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = "".join(self.np_random.choice(list("abc"), 4))
        return f"Say {self.word}.", {}

    def step(self, action):
        if action == "nothing":
            return "?", float("nan"), True, False, {}
        return f"Not {action}.", float(action == self.word), action == self.word, False, {}


gymnasium.register("Echo-v0", Echo)
"""


def given(meta: dict[str, Any], prompt: str) -> dict[str, Any]:
    return {"id": "a", "prompt": prompt, "ground_truth": None, "meta": meta, "data_source": "x", "seed": 5}


def row(spec: str, seed: int) -> dict[str, Any]:
    return given({"game": spec, "seed": seed}, game_of(spec).reset(seed))


def played(spec: str, moves: Sequence[str], *rows: dict[str, Any]) -> list[list[Any]]:
    """Return the texts of games that are played at the same time in one process, with their rewards or failures."""

    async def play(row: dict[str, Any]) -> list[Any]:
        episode, found = hosts.place(), list[Any]()
        await episode.ready()
        try:
            found += [message["content"] for message in await episode.start(row)]
            for move in moves:
                step = await episode.step(Reply(move))
                found += [message["content"] for message in step.messages]
                if step.done:
                    break
            found.append(await episode.close())
        except EnvironmentFailed as error:
            episode.drop()
            found.append(str(error))
        return found

    async def main() -> list[list[Any]]:
        return list(await asyncio.gather(*map(play, rows)))

    hosts = EnvironmentPool(EnvironmentSettings(spec, None, 10_000))
    try:
        return asyncio.run(main())
    finally:
        hosts.close()


def alone(spec: str, moves: Sequence[str], seed: int) -> list[Any]:
    game, found = game_of(spec), list[Any]()
    game.reset(seed)
    for move in moves:
        text, done = game.act(move)
        if done:
            break
        found.append(text)
    return [*found, {"reward": float(game.end()[0])}]


@pytest.mark.parametrize("spec", [BLACKJACK, GUESS, LAKE])
def test_rows_are_the_first_texts_of_seeds_and_splits_share_none(spec: str) -> None:
    rows, held_out = (load_rows(spec, split=split, limit=5) for split in ("train", "eval"))
    assert rows == load_rows(spec, limit=5)
    assert [row.meta["seed"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row.meta["seed"] for row in held_out] == [10**9 + i for i in range(5)]
    for each in (*rows, *held_out):
        (message,) = each.prompt
        assert isinstance(message, dict) and message["role"] == "user" and each.data_source == spec
        assert message["content"] == game_of(spec).reset(each.meta["seed"])


@pytest.mark.parametrize(
    ("spec", "moves"),
    [(BLACKJACK, ["[Hit]", "I take. [hit]"] * 6), (GUESS, ["[9]", "12", "[3]"]), (LAKE, ["2", "1"] * 9)],
)
def test_games_at_the_same_time_are_those_of_their_seeds_alone(spec: str, moves: list[str]) -> None:
    seeds = (3, 4, 5, 3, 6, 7)
    found = played(spec, moves, *(row(spec, seed) for seed in seeds))
    assert found == [alone(spec, moves, seed) for seed in seeds]
    assert len({str(each) for each in found}) > 1


def test_a_game_shows_its_first_text_if_the_prompt_has_it_not_and_refuses_rows_of_another() -> None:
    first = game_of(GUESS).reset(5)
    (shown,) = played(GUESS, ["[1]"], given({}, "Play."))
    assert shown[0] == first and shown[-1] == {"reward": 0.0}
    (other,), (changed,) = played(GUESS, [], row(LAKE, 1), given({"game": GUESS, "seed": 1}, "Play."))
    assert other == f"the row is of {LAKE}, and environment.use is {GUESS}"
    assert changed.startswith("the game does not begin with the text in the prompt: its reset draws beside its seed 1")


def test_moves_come_after_the_reasoning_and_a_number_must_be_one_of_the_actions() -> None:
    def at(square: int) -> str:
        return game_of(LAKE).env.unwrapped.desc.astype(str)[square // 4][square % 4]

    moves = ["<think>3</think> none", "7", "<think>1 or 2?</think> Right, so 2"]
    (found,) = played(LAKE, moves, row(LAKE, 3))
    assert found[:2] == ["Answer with a number from 0 to 3."] * 2 and found[2].startswith("  (Right)\n")
    assert at(0) == "S" and "\x1b" not in found[2] and found[2].count("[") == 1


def test_a_text_environment_of_ones_own_is_found_in_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "echo_game.py").write_text(ECHO)
    monkeypatch.chdir(tmp_path)
    spec = "gymnasium:echo_game:Echo-v0"
    (first,) = load_rows(spec, limit=1)
    (message,) = first.prompt
    assert isinstance(message, dict)
    word = message["content"].removeprefix("Say ").removesuffix(".")
    start = given(first.meta, message["content"])
    assert played(spec, ["aa", word], start) == [["Not aa.", {"reward": 1.0}]]
    assert played(spec, ["nothing"], start) == [["Played.step returned nan for 'reward'"]]


def test_a_move_outside_the_space_of_texts_is_invalid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "strict_game.py").write_text(
        ECHO.replace("        if action ==", "        assert action.isalnum()\n        if action ==")
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    game = game_of("gymnasium:strict_game:Echo-v0")
    word = game.reset(1).removeprefix("Say ").removesuffix(".")
    for move in ("not a word!", "", "a" * 101):
        text, done = game.act(move)
        assert text.startswith("Answer with 1 to 100 characters of 0123456789ABC") and not done
    assert game.act(word)[1] and game.end() == (1.0, {"invalid_move": 1.0})


def test_a_number_with_too_many_digits_is_invalid() -> None:
    lake, guess, digits = game_of(LAKE), game_of(GUESS), "1" * 5000
    lake.reset(1)
    assert lake.act(digits) == lake.act(f"-{digits}") == ("Answer with a number from 0 to 3.", False)
    assert lake.end() == (0.0, {"invalid_move": 1.0})
    guess.reset(1)
    text, done = guess.act(f"[{digits}]")
    assert "You attempted an invalid move. Reason: Exceeds the limit" in text and not done
    assert guess.act(f"[{digits}]") == ("", True) and guess.end()[1] == {"invalid_move": 1.0}


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ("textarena:GuessTheNumbr-v0", "there is no game 'GuessTheNumbr-v0'; did you mean 'GuessTheNumber-v0'?"),
        ("textarena:TicTacToe-v0", "cannot be played by one player: The number of players has to be 2, received 1"),
        ("gymnasium:FrozenLak-v1", "Environment `FrozenLak` doesn't exist. Did you mean: `FrozenLake`?"),
        ("gymnasium:nowhere:A-v1", "No module named 'nowhere'"),
        ("gymnasium:CartPole-v1", "CartPole-v1 shows Box("),
        *([("textarena:Chess-v0", "Chess-v0: ")] if sys.version_info < (3, 12) else []),  # it does not parse there
    ],
)
def test_a_game_that_cannot_be_played_is_one_line(spec: str, line: str) -> None:
    with pytest.raises(DataError) as as_data:
        load_rows(spec, limit=1)
    with pytest.raises(ConfigError) as as_environment:
        schemas(EnvironmentSettings(spec, None, 200))
    assert str(as_data.value).startswith(f"{spec}: {line}") and "\n" not in str(as_data.value)
    assert str(as_environment.value).startswith(f"environment.use = {spec!r}: {line}")


@pytest.mark.parametrize(
    ("spec", "said"),
    [(GUESS, {0: [f"[{n}]" for n in range(1, 21)], 1: ["five", "six"]}), (LAKE, {0: ["1", "2"] * 60, 1: ["3"] * 120})],
)
def test_a_run_learns_from_games(
    spec: str, said: dict[int, list[str]], tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"use": spec, "turns": 120}
    data = {"train": spec, "limit": 4, "shuffle": False}
    run = trained(monkeypatch, tmp_path, models, [], environment, lambda p: said[p.first], data=data)
    check_calls(run)
    assert len(run.rollouts) == 4
    for number, rollout in enumerate(run.rollouts):
        update, moves = number // 2, said[number % 2]
        expected = alone(spec, moves, update)
        check_laws(rollout, moves[: len(expected)])
        assert rollout.outcome["reward"] == expected[-1]["reward"] and rollout.versions.max() == update
        assert rollout.finish == "eos" and rollout.outcome["turns"] == len(expected)
        seen = str(TOKENIZER.decode(rollout.tokens[~rollout.loss_mask]))
        assert all(text.strip() in seen for text in expected[:-1])
    for line in run.lines:
        assert line["failed_samples"] == 0 and "environment/invalid_move" in line, json.dumps(line)
        assert line["grad_norm"] > 0 and abs(line["distill/ratio_max"] - 1) < 1e-5

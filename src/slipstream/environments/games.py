"""Games for one player: of TextArena (`textarena:NAME`), of Gymnasium (`gymnasium:NAME`), or of an OpenEnv server.

As data, such a name has rows whose prompts are the texts of `reset` with different seeds. As an environment, it plays
the game of a row again from its seed.
"""

import importlib
import platform
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import numpy as np

from slipstream.environments import Reply, Step
from slipstream.environments.forms import Kind
from slipstream.environments.openenv import OpenEnvGame, last_integer
from slipstream.environments.tools import schema_of
from slipstream.errors import ConfigError, DataError, EnvironmentFailed, did_you_mean, first_line

SEEDS = {"train": 0, "eval": 1_000_000_000}
"""Seed of the first row of each split; row i has this seed plus i."""
THOUGHT_END = "</think>"
"""Text after which a reply is a move; what is before is the student's reasoning."""
COLOURED = re.compile("\x1b\\[[\\d;]+m(.*?)\x1b\\[0m")
"""Coloured text of a terminal, which is the mark of the player's place; a student reads brackets instead."""
RANDOM = threading.Lock()
"""Lock of Python's and numpy's global random states, which some games draw from."""


class Game(Protocol):
    """Game of another package, which can be played again after a reset."""

    last_reward: float | None
    """Reward of the last move; None if the game rewards no single moves."""

    def __init__(self, name: str) -> None: ...

    def reset(self, seed: int) -> str:
        """Begin a new game; return the first text."""
        ...

    def act(self, move: str) -> tuple[str, bool]:
        """Return the text that follows a move, and True at the end of the game."""
        ...

    def end(self) -> tuple[Any, dict[str, float]]:
        """Return the reward, and metrics."""
        ...


class TextArenaGame:
    last_reward: float | None = None

    def __init__(self, name: str) -> None:
        import textarena
        from textarena.core import Wrapper
        from textarena.envs.registration import ENV_REGISTRY

        if name not in ENV_REGISTRY:
            raise ConfigError(f"there is no game {name!r}; {did_you_mean(name, ENV_REGISTRY)}")
        try:
            self.env = textarena.make(name)
        except SyntaxError as error:  # some of its games are written for newer Pythons
            why = f"{error.filename}:{error.lineno} does not parse with Python {platform.python_version()}: {error.msg}"
            raise ConfigError(f"{name}: {why}") from None
        while isinstance(self.env, Wrapper):  # wrappers show the whole history again, which the student already has
            self.env = self.env.env
        self.random: tuple[Any, Any] = random.Random(0).getstate(), np.random.RandomState(0).get_state()

    @contextmanager
    def own_random(self) -> Iterator[None]:
        """Give this game the global random states, so that games in other threads do not draw from them."""
        with RANDOM:
            before = random.getstate(), np.random.get_state()
            random.setstate(self.random[0])
            np.random.set_state(self.random[1])
            try:
                yield
            finally:
                self.random = random.getstate(), np.random.get_state()
                random.setstate(before[0])
                np.random.set_state(before[1])

    def reset(self, seed: int) -> str:
        self.random = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()
        with self.own_random():
            self.env.reset(num_players=1, seed=seed)
            return self.text()

    def act(self, move: str) -> tuple[str, bool]:
        with self.own_random():
            try:
                done, _ = self.env.step(move)
            except ValueError as error:  # for example of a number with more digits than Python reads
                self.env.state.set_invalid_move(reason=f"{first_line(error)}.")
                done, _ = self.env.state.step()
            return "" if done else self.text(), done

    def text(self) -> str:
        from textarena import ObservationType

        _, found = self.env.get_observation()
        return "\n".join(text for _, text, kind in found if kind is not ObservationType.PLAYER_ACTION)

    def end(self) -> tuple[Any, dict[str, float]]:
        rewards, info = self.env.close()
        return (rewards or {0: 0.0})[0], {"invalid_move": float(info.get(0, {}).get("invalid_move", False))}


class GymnasiumGame:
    def __init__(self, name: str) -> None:
        import gymnasium
        from gymnasium import spaces

        module, _, name = name.rpartition(":")
        try:
            if module:
                importlib.import_module(module)
            spec = gymnasium.spec(name)
            shown = "ansi" in getattr(self.entry_point(spec), "metadata", {}).get("render_modes", ())
            self.env = gymnasium.make(name, **({"render_mode": "ansi"} if shown else {}), disable_env_checker=True)
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            raise ConfigError(first_line(error)) from None
        self.spaces, self.total, self.invalid = spaces, 0.0, False
        self.last_reward: float | None = None
        self.is_rendered = not isinstance(self.env.observation_space, spaces.Text)
        if self.is_rendered and not shown:
            raise ConfigError(f"{name} shows {self.env.observation_space}, and a student reads text: use a Text space")
        if not isinstance(self.env.action_space, spaces.Text | spaces.Discrete):
            raise ConfigError(f"{name} wants {self.env.action_space}, and a student writes text: use a Text space")

    @staticmethod
    def entry_point(spec: Any) -> Any:
        from gymnasium.envs.registration import load_env_creator

        return load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point

    def text(self, observation: Any) -> str:
        return COLOURED.sub(r"[\1]", str(self.env.render() if self.is_rendered else observation))

    def reset(self, seed: int) -> str:
        observation, _ = self.env.reset(seed=seed)
        self.total, self.invalid = 0.0, False
        text, actions = self.text(observation), self.env.action_space
        return f"{text}\n{self.choices(actions)}" if isinstance(actions, self.spaces.Discrete) else text

    def choices(self, actions: Any) -> str:
        if isinstance(actions, self.spaces.Discrete):
            return f"Answer with a number from {actions.start} to {actions.start + actions.n - 1}."
        return f"Answer with {actions.min_length} to {actions.max_length} characters of {actions.characters}"

    def act(self, move: str) -> tuple[str, bool]:
        action: Any = move.strip()
        self.last_reward = 0.0
        if isinstance(self.env.action_space, self.spaces.Discrete):
            action = last_integer(move)
        if action is None or not self.env.action_space.contains(action):
            self.invalid = True
            return self.choices(self.env.action_space), False
        observation, reward, terminated, truncated, _ = self.env.step(action)
        self.last_reward = float(reward)
        self.total += float(reward)
        return self.text(observation), terminated or truncated

    def end(self) -> tuple[Any, dict[str, float]]:
        return self.total, {"invalid_move": float(self.invalid)}


GAMES: dict[str, type[Game]] = {"textarena": TextArenaGame, "gymnasium": GymnasiumGame, "openenv": OpenEnvGame}


class Played:
    """Environment that plays one game. Games that have ended are played again, since some take long to make."""

    spec: ClassVar[str]
    idle: ClassVar[list[Game]]

    def start(self, meta: dict[str, Any], prompt: str, seed: int) -> str | None:
        """Begin the game of the row's seed; return its first text unless the prompt has it."""
        self.metrics: dict[str, float] = {}
        self.game = self.idle.pop() if self.idle else game_of(self.spec)
        first = self.game.reset(int(meta.get("seed", seed)))
        if " ".join(first.split()) in " ".join(prompt.split()):
            return None
        if meta.get("game", self.spec) != self.spec:
            raise EnvironmentFailed("error", f"the row is of {meta['game']}, and environment.use is {self.spec}")
        if "game" in meta:
            why = f"its reset draws beside its seed {meta['seed']}"
            raise EnvironmentFailed("error", f"the game does not begin with the text in the prompt: {why}")
        return first

    def step(self, reply: Reply) -> Step:
        text, done = self.game.act(reply.text.rpartition(THOUGHT_END)[2])
        if done:
            _, self.metrics = self.game.end()
        return Step(() if done else ({"role": "user", "content": text},), done, reward=self.game.last_reward)

    def close(self) -> Any:
        reward, _ = self.game.end()
        self.idle.append(self.game)
        return reward


class PlayedByTools(Played):
    """Environment that plays a game by calls of its tools. A reply without calls ends the episode."""

    tools: ClassVar[list[dict[str, Any]]]
    """JSON schemas of the tools."""

    def step(self, reply: Reply) -> Step:
        assert isinstance(self.game, OpenEnvGame)
        messages, rewards, done = list[dict[str, Any]](), list[float](), not reply.calls
        for call in reply.calls:
            text, done = self.game.call(call.name, call.arguments)
            messages.append({"role": "tool", "content": text, "name": call.name})
            if self.game.last_reward is not None:
                rewards.append(self.game.last_reward)
            if done:
                break
        if done:
            _, self.metrics = self.game.end()
        return Step(() if done else tuple(messages), done, reward=sum(rewards) if rewards else None)


def game_of(spec: str) -> Game:
    prefix, _, name = spec.partition(":")
    return GAMES[prefix](name)


def kind_of(spec: str) -> Kind:
    """Make the game once, which raises ConfigError if it cannot be played."""
    game, base = checked(spec), Played
    own: dict[str, Any] = {"spec": spec, "idle": [game]}
    if isinstance(game, OpenEnvGame) and game.calls_tools:
        try:
            base, own["tools"] = PlayedByTools, [schema_of(tool) for tool in game.tools()]
        except EnvironmentFailed as error:
            raise ConfigError(str(error)) from None
    made = type("Played", (base,), own)
    return Kind(spec, made, ("meta", "prompt", "seed"), {})


def checked(spec: str) -> Game:
    game = game_of(spec)
    try:
        game.reset(0)
        game.end()
    except AssertionError as error:
        raise ConfigError(f"cannot be played by one player: {first_line(error)}") from None
    except EnvironmentFailed as error:
        raise ConfigError(str(error)) from None
    return game


def rows(name: str, split: str, count: int, *, prefix: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each seed, whose prompt is the first text of its game."""
    if split not in SEEDS:
        raise DataError(f"there is no split {split!r}; {did_you_mean(split, SEEDS)}")
    spec = f"{prefix}:{name}"
    try:
        game = checked(spec)
    except ConfigError as error:
        raise DataError(str(error)) from None
    try:
        for seed in range(SEEDS[split], SEEDS[split] + count):
            if not (first := game.reset(seed)):
                write = "write rows with a prompt, and a column `seed`"
                raise DataError(f"the game shows no text before the first move: {write}")
            prompt = [{"role": "user", "content": first}]
            yield {"id": f"{name}:{seed}", "prompt": prompt, "data_source": spec, "game": spec, "seed": seed}
    except EnvironmentFailed as error:
        raise DataError(str(error)) from None
    finally:
        game.end()


def textarena_rows(name: str, split: str, count: int) -> Iterator[dict[str, Any]]:
    return rows(name, split, count, prefix="textarena")


def gymnasium_rows(name: str, split: str, count: int) -> Iterator[dict[str, Any]]:
    return rows(name, split, count, prefix="gymnasium")


def openenv_rows(name: str, split: str, count: int) -> Iterator[dict[str, Any]]:
    return rows(name, split, count, prefix="openenv")

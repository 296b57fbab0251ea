"""Engines that do one thing each, for any runtime to put into a process, which can import them in no time."""

import asyncio
import os
import signal
import time
from collections.abc import Callable

import numpy as np

from slipstream.errors import ConfigError, NonFiniteError
from slipstream.protocols import Fingerprint, Loaded, Mode, Sampling, TensorSpec, WeightsRef
from slipstream.records import Batch, Counts, Group, Handle, Prompt, Rollout, header_of, one_turn

LARGE = 100_000
"""Tokens of a record that is large for any way to send it."""


def prompt(number: int = 0) -> Prompt:
    return Prompt(id=str(number), number=number, tokens=np.array([1], np.int32))


def rollout(prompt: Prompt, tokens: int = 3) -> Rollout:
    ids, logp = np.full((tokens, 1), 2, np.int32), np.zeros((tokens, 1), np.float32)
    return one_turn(prompt, 0, actions=ids, action_logp=logp, versions=np.zeros(tokens, np.int32), finish="eos")


class Maker:
    """Rollouts of a given length, at once."""

    def __init__(self, tokens: int = 3) -> None:
        self.tokens = tokens

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        record = rollout(prompt, self.tokens)
        return [Handle(header_of(record), record) for _ in range(sampling.group)]

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        return Loaded(f"{weights.body.sum()} {weights.body.flags.writeable}")


class Reader:
    """Tells what it was given, as a fingerprint of sorts: teachers named after the sum of the tokens."""

    async def score(self, group: Group) -> list[Handle]:
        return [Handle(header_of(h.body, teacher=str(h.body.tokens.sum())), h.body) for h in group]


class Weigher:
    async def export(self, teacher: str = "") -> tuple[WeightsRef, Fingerprint]:
        spec = TensorSpec("w", "uint8", (LARGE * 10,), 0, LARGE * 10)
        return WeightsRef((spec,), np.ones(LARGE * 10, np.uint8), 1), "print"

    async def prepare(self, batch: Batch) -> list[Counts]:
        return [Counts(n_tokens=sum(len(handle.body.tokens) for handle in group)) for group in batch.groups]


class Keeper:
    """A learner that keeps the records of its last batch."""

    async def prepare(self, batch: Batch) -> list[Counts]:
        self.batch = batch
        return [Counts() for _ in batch.groups]


class Patient:
    """Generates end after a publish, which says how many there were."""

    def __init__(self) -> None:
        self.published, self.running, self.aborted = asyncio.Event(), 0, 0

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        self.running += 1
        try:
            await self.published.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1
        return []

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        running = self.running
        self.published.set()
        return Loaded(f"{running} running, {self.aborted} aborted")


class Own(Exception):
    """Cannot be pickled back: it wants two arguments, and hands one on."""

    def __init__(self, a: str, b: str) -> None:
        super().__init__(a + b)


class Broken:
    async def score(self, group: Group) -> list[Handle]:
        try:
            raise ValueError("deep down")
        except ValueError as error:
            raise NonFiniteError("a score is NaN") from error

    async def odd(self) -> None:
        raise Own("some ", "thing\nelse")

    async def ignore(self) -> None:
        raise asyncio.CancelledError

    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def leave(self) -> None:
        os._exit(3)

    async def wait(self) -> None:
        await asyncio.sleep(3600)

    async def count(self) -> Callable[[], int]:
        return lambda: 1


class Busy:
    """Computes as engines do, in a thread."""

    async def compute(self, seconds: float) -> str:
        await asyncio.to_thread(time.sleep, seconds)
        return "done"


class Threads:
    async def count(self) -> tuple[int, str | None]:
        import torch

        return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")


class Environment:
    async def read(self, name: str) -> str | None:
        return os.environ.get(name)


def no_engine() -> None:
    raise ConfigError("sampler.slots = 0: write more")


def stops_while_it_loads() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loads_for_long() -> Busy:
    time.sleep(17.0)
    return Busy()

"""Cost of the gateway itself: conversations with tools through HTTP, answered by a model that computes nothing.

    python benchmarks/gateway.py [--seconds 10] [--clients 16] [--turns 8]
    python benchmarks/gateway.py --clients 1000 --pace 1        # 1,000 sessions at once, each with one call per second

The gateway has one core, and the clients another where there is one. Every call goes the whole way: HTTP, the template,
the comparison with what was told, ids, log-probs, the text of the answer and its calls. Clients keep their connections.
"""

import argparse
import asyncio
import gc
import http.client
import json
import os
import statistics
import threading
import time
from collections.abc import Collection
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from slipstream.data.tokenizers import load_tokenizer, stop_ids
from slipstream.environments.chat.renderer import Renderer
from slipstream.environments.episodes import Limits
from slipstream.environments.gateway.server import Server
from slipstream.environments.gateway.sessions import Session
from slipstream.protocols import Loaded, Mode, Sampling, WeightsRef
from slipstream.records import Group, Handle, Prompt, header_of, one_turn

SAID = '<tool_call>{"name": "look", "arguments": {"key": "a"}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
ASKED = [{"role": "user", "content": "What is c+h-b?"}]


class NoModel:
    """Calls a tool, always."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        await asyncio.sleep(0)
        zeros = np.zeros((len(self.ids), 1), np.float32)
        versions = np.zeros(len(self.ids), np.int32)
        rollout = one_turn(prompt, 0, actions=self.ids[:, None], action_logp=zeros, versions=versions, finish="eos")
        return [Handle(header_of(rollout), rollout)]

    async def release(self, numbers: Collection[int] = ()) -> None: ...

    async def publish(self, weights: WeightsRef, mode: Mode) -> Loaded:
        return Loaded("")


def client(
    url: str, names: list[str], turns: int, until: float, latencies: list[float], pace: float, due: float
) -> None:
    """Play sessions one after the other; with `pace`, the next call is made `pace` seconds after the last was due."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    for name in names:
        messages: list[Any] = list(ASKED)
        for turn in range(turns):
            if time.monotonic() > until:
                return
            time.sleep(max(0.0, due - time.monotonic()))
            due += pace
            body = json.dumps({"model": "student", "messages": messages, "tools": TOOLS})
            began = time.monotonic()
            connection.request("POST", f"/sessions/{name}/v1/chat/completions", body)
            answer = connection.getresponse()
            said = json.loads(answer.read())
            latencies.append(time.monotonic() - began)
            assert answer.status == 200, said
            message = said["choices"][0]["message"]
            call = message["tool_calls"][0]["id"]
            messages += [message, {"role": "tool", "tool_call_id": call, "content": f"the {turn}. one is 42"}]


def ask(told: Connection, clients: int, turns: int, seconds: float, pace: float, core: int) -> None:
    pinned(core)
    url, names = told.recv()
    latencies: list[list[float]] = [[] for _ in range(clients)]
    began = time.monotonic() + (pace and 1)  # threads start in the first second
    threads = [
        threading.Thread(
            target=client,
            args=(url, names[n::clients], turns, began + seconds, latencies[n], pace, began + pace * n / clients),
        )
        for n in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told.send([latency for each in latencies for latency in each])


def pinned(core: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


async def measure(clients: int, turns: int, seconds: float, pace: float) -> None:
    tokenizer = load_tokenizer("builtin:tool_student")
    ends = stop_ids(tokenizer, None)
    renderer = Renderer(tokenizer, stop_ids=ends)
    said = tokenizer(SAID, add_special_tokens=False)["input_ids"]
    policy = NoModel(np.array([*said, min(ends)], np.int32))
    server = Server("student")
    await server.start()
    prompt = Prompt(id="p", number=0, tokens=renderer.open(ASKED, TOOLS))
    limits = Limits(turns=turns, calls=turns, turn_tokens=None, seconds=2 * seconds, step_seconds=seconds)
    names = [
        server.open(Session(policy, renderer, prompt, Sampling(max_tokens=1 << 20), 0, limits, len(tokenizer)))
        for _ in range(int(4000 * seconds / turns))
    ]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    ours, theirs = get_context("spawn").Pipe()
    asking = get_context("spawn").Process(target=ask, args=(theirs, clients, turns, seconds, pace, cores[-1]))
    asking.start()
    pinned(cores[0])
    gc.freeze()  # as in an engine's process
    began = time.process_time()
    ours.send((server.url, names))
    latencies = sorted(await asyncio.to_thread(ours.recv))
    spent = time.process_time() - began
    asking.join()
    server.close()
    p50, p99 = (statistics.quantiles(latencies, n=100)[n - 1] * 1e3 for n in (50, 99))
    print(
        f"{len(latencies) / seconds:,.0f} calls/s of {turns} turns a session, {clients} clients: p50 {p50:.1f} ms, "
        f"p99 {p99:.1f} ms; {spent / len(latencies) * 1e3:.2f} ms of the gateway's core for a call"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--pace", type=float, default=0, help="seconds between two calls of a client (default: none)")
    given = parser.parse_args()
    asyncio.run(measure(given.clients, given.turns, given.seconds, given.pace))


if __name__ == "__main__":
    main()

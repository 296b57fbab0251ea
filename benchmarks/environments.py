"""Cost of an environment for a sampler, and time that asynchrony saves where tools are slow.

    python benchmarks/environments.py cost    [--turns 1 4 8] [--tokens 256] [--repeats 5]
    python benchmarks/environments.py latency [--seeds 3] [--updates 30] [--seconds 0.1]

`cost`: a model of random weights in the shape of Qwen3 that never stops says so many tokens: in one call, and in turns
of an environment that answers nothing, which is in a process of its own, with the template's few tokens between two
turns. CPU of the sampler's process and of the environments', and wall time, per token. `latency`: configs/tools.toml
with tools that take log-normal times (σ = 1), by sync and by async(4) in turns; samples per second after five updates.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import slipstream
from schedules import spread
from slipstream.data.tokenizers import load_tokenizer
from slipstream.engines.native.model import split
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.engines.settings import SamplerSettings
from slipstream.environments.chat.renderer import Renderer
from slipstream.environments.episodes import Episodes, Limits
from slipstream.environments.pool import EnvironmentPool, EnvironmentSettings
from slipstream.metrics import throughput
from slipstream.protocols import Sampling
from slipstream.records import Prompt

HERE = Path(__file__).parent
STUDENT = "builtin:tool_student"
GROUP, GROUPS, PROMPT = 8, 2, 128


class Silent:
    """Answers every reply with nothing."""

    def step(self, reply: object) -> str:
        return ""


# --- cost -------------------------------------------------------------------------------------------------------------


def make_sampler(args: argparse.Namespace, vocabulary: int) -> NativeSampler:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 64,
        head_dim=32,
        max_position_embeddings=2 * (PROMPT + args.tokens),
    )
    lm = split("random", Qwen3ForCausalLM(config).eval())
    return NativeSampler(lm, SamplerSettings(slots=GROUP * GROUPS), stop_ids=set())


def cost(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(STUDENT)
    sampler = make_sampler(args, len(tokenizer))
    hosts = EnvironmentPool(EnvironmentSettings(f"{HERE / 'environments.py'}:Silent", None, 4096))
    renderer = Renderer(tokenizer, stop_ids={tokenizer.eos_token_id}, tools=hosts.schemas())
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(id=str(n), number=n, tokens=rng.integers(10, len(tokenizer), PROMPT).astype(np.int32), seed=n)
        for n in range(GROUPS)
    ]

    def played(turns: int) -> tuple[float, float]:
        """Microseconds of CPU and of the clock per token that is said or seen."""
        limits = Limits(
            turns=turns, calls=10**6, turn_tokens=args.tokens // max(turns, 1), seconds=1e6, step_seconds=60
        )
        asked: Any = Episodes(sampler, renderer, hosts, limits) if turns else sampler
        sampling = Sampling(max_tokens=args.tokens if not turns else 2 * args.tokens, group=GROUP)

        async def work() -> int:
            groups = await asyncio.gather(*[asked.generate(prompt, sampling) for prompt in prompts])
            return sum(handle.header.tokens for group in groups for handle in group)

        began, used = time.perf_counter(), cpu(hosts)
        tokens = asyncio.run(work())
        return 1e6 * (cpu(hosts) - used) / tokens, 1e6 * (time.perf_counter() - began) / tokens

    found: dict[int, list[tuple[float, float]]] = {turns: [] for turns in (0, *args.turns)}
    for turns in found:
        played(turns)
    for _ in range(args.repeats):
        for turns, values in found.items():
            values.append(played(turns))
    size = sum(weight.numel() for weight in sampler.lm.model.parameters())
    sampler.close()
    hosts.close()
    print(
        f"{size / 1e6:.2f} M parameters, {GROUPS} groups of {GROUP}, {PROMPT} + {args.tokens} tokens; per token "
        "that is said or seen"
    )
    base = [statistics.median(each[i] for each in found[0]) for i in (0, 1)]
    for turns, values in found.items():
        name = f"{turns} turns of {args.tokens // turns}" if turns else "no environment"
        cells = [told([each[i] for each in values], base[i]) for i in (0, 1)]
        print(f"{name:22} CPU {cells[0]}   clock {cells[1]}")


def told(values: list[float], base: float) -> str:
    return f"{spread(values, '.0f'):>20} us  {statistics.median(values) / base:.2f} x"


def cpu(hosts: EnvironmentPool) -> float:
    """Seconds of this process and of the environments' so far."""
    tick, used = os.sysconf("SC_CLK_TCK"), time.process_time()
    for host in hosts.children:
        fields = Path(f"/proc/{host.process.pid}/stat").read_text().rpartition(")")[2].split()
        used += (int(fields[11]) + int(fields[12])) / tick
    return used


# --- latency ----------------------------------------------------------------------------------------------------------

ARMS: dict[str, dict[str, Any]] = {"sync": {"kind": "sync"}, "async(4)": {"kind": "async", "tau": 4}}


def latency(args: argparse.Namespace) -> None:
    import tomllib

    os.environ["SECONDS"] = str(args.seconds)
    tools = tomllib.loads((HERE.parent / "configs" / "tools.toml").read_text())
    tools |= {"updates": args.updates, "eval": {}, "data": {"train": "builtin:table"}, "log": {"samples": 0}}
    tools["environment"] |= {"use": f"{HERE / 'slow_table.py'}:SlowTable"}
    found: dict[str, list[float]] = {name: [] for name in ARMS}
    for seed in range(args.seeds):
        for name, schedule in ARMS.items():
            with tempfile.TemporaryDirectory() as path:
                config = tools | {"seed": seed, "schedule": schedule, "output": str(Path(path) / "run")}
                lines = slipstream.train(config, quiet=True, checks=False).metrics
            found[name].append(throughput([line["samples"] for line in lines], [line["time"] for line in lines]))
            print(f"seed {seed}  {name:10} {found[name][-1]:6.1f} samples/s", flush=True)
    print(f"\ntools take {args.seconds:g} s in the median, sigma 1; {args.seeds} seeds, medians [range]")
    for name, values in found.items():
        ratios = [a / b for a, b in zip(values, found["sync"], strict=True)]
        print(f"{name:10} {spread(values, '.1f'):>22} samples/s   {spread(ratios, '.2f')} x")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["cost", "latency"])
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=0.1)
    args = parser.parse_args()
    {"cost": cost, "latency": latency}[args.what](args)


if __name__ == "__main__":
    main()

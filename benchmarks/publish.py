"""Time for which two samplers stand still while new weights come in, against copying the same bytes.

    python benchmarks/publish.py [--megabytes 100] [--rows 8] [--prefix 256] [--repeats 9]

A random Qwen3 student in float32 and two samplers of it in this process, each on a thread of its own. Every round lets
both run, publishes to both at the same time in keep mode, aborts what runs, and then, with both idle, copies the
weights twice, one copy after the other, into memory that is there already: the reference. `load` is the copy into the
model and the fingerprint of what arrived, of the slower sampler; so are `rebuild`, the running prefixes' keys and
values under the new weights, and `wait`, the time until the next token boundary. Medians and ranges over the rounds.
At the end, the rate at which one thread and several compute a checksum of the weights: the best of nine.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from slipstream.engines import checksums
from slipstream.engines.native.model import split
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.engines.settings import SamplerSettings
from slipstream.engines.weights import export_weights, fingerprint
from slipstream.protocols import Fingerprint, Loaded, Sampler, Sampling, WeightsRef
from slipstream.records import Prompt

CONTEXT, VOCABULARY, HIDDEN = 4096, 8192, 512
LAYER_BYTES = 4 * HIDDEN * (9 * HIDDEN + 3 * HIDDEN)
"""Three matrices of 3·HIDDEN, and query, key, value, output with half as many key/value heads."""


@dataclass(frozen=True)
class Round:
    loaded: Sequence[Loaded]
    reference: float

    @property
    def ratio(self) -> float:
        return self.slowest("load") / self.reference

    def slowest(self, part: str) -> float:
        return max(getattr(loaded, part) for loaded in self.loaded)


def student(megabytes: int, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=max(1, round((megabytes * 10**6 - 4 * VOCABULARY * HIDDEN) / LAYER_BYTES)),
        num_attention_heads=HIDDEN // 64,
        num_key_value_heads=HIDDEN // 128,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


async def measure(
    samplers: Sequence[Sampler], weights: Sequence[tuple[WeightsRef, Fingerprint]], args: argparse.Namespace
) -> list[Round]:
    """Publish to all samplers at once, one of the given weights after the other; the first round warms up."""
    source = weights[0][0].body
    copies = [np.zeros_like(source) for _ in range(2)]
    rounds = []
    for version in range(1, args.repeats + 2):
        running = [asyncio.create_task(s.generate(p, LONG)) for s in samplers for p in prompts(args.rows, args.prefix)]
        await asyncio.gather(*[sampler.generate(prompts(1, 1)[0], SHORT) for sampler in samplers])  # then all run
        ref, expected = weights[version % len(weights)]
        loaded = await asyncio.gather(*[sampler.publish(replace(ref, version=version), "keep") for sampler in samplers])
        assert [found.fingerprint for found in loaded] == [expected] * len(samplers)
        assert not any(task.done() for task in running), "requests must be running as weights come in"
        for task in running:
            task.cancel()
        await asyncio.gather(*[sampler.generate(prompts(1, 1)[0], SHORT) for sampler in samplers])  # then all is idle
        rounds.append(Round(loaded, copied_twice(ref.body, copies)))
    return rounds[1:]


LONG, SHORT = Sampling(max_tokens=2048), Sampling(max_tokens=1)


def prompts(count: int, length: int) -> list[Prompt]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, (count, length)).astype(np.int32)
    return [Prompt(id=f"p{i}", number=i, tokens=tokens[i], seed=i) for i in range(count)]


def copied_twice(source: np.ndarray, targets: Sequence[np.ndarray]) -> float:
    began = time.perf_counter()
    for target in targets:
        np.copyto(target, source)
    return time.perf_counter() - began


def report(rounds: Sequence[Round]) -> None:
    parts = {part: [1e3 * r.slowest(part) for r in rounds] for part in ("load", "rebuild", "wait")}
    parts["reference: copied twice"] = [1e3 * r.reference for r in rounds]
    for name, values in parts.items():
        print(f"{name:24} {statistics.median(values):7.1f} ms   [{min(values):.1f} … {max(values):.1f}]")
    ratios = [r.ratio for r in rounds]
    print(f"load / reference: {statistics.median(ratios):.2f}   [{min(ratios):.2f} … {max(ratios):.2f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rows", type=int, default=8, help="running requests per sampler")
    parser.add_argument("--prefix", type=int, default=256, help="tokens of their prompts")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = [student(args.megabytes, seed) for seed in range(2)]
    weights = [(export_weights(model, "float32"), fingerprint(model, "float32")) for model in models]
    print(f"{weights[0][0].body.nbytes / 1e6:.0f} MB, {args.rows} rows with prefixes of {args.prefix} per sampler")
    settings = SamplerSettings(slots=args.rows + 1)
    samplers = [NativeSampler(split("random", model), settings, stop_ids=set()) for model in models]
    rounds = asyncio.run(measure(samplers, weights, args))
    for sampler in samplers:
        sampler.close()
    report(rounds)
    exported = torch.from_numpy(weights[0][0].body)
    for number in sorted({1, checksums.CHECKSUM_THREADS}):
        checksums.CHECKSUM_THREADS = number
        rate = exported.nbytes / 1e9 / least_time(lambda: checksums.checksum(exported))
        print(f"checksum in host memory, {number} threads: {rate:.1f} GB/s")


def least_time(work: Callable[[], object]) -> float:
    found = []
    for _ in range(9):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


if __name__ == "__main__":
    main()

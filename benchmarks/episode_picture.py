"""docs/episode.svg: an episode as its record holds it, token by token.

python benchmarks/episode_picture.py > docs/episode.svg

The shipped teacher answers a question about the hidden table; new weights come in the middle of its second turn.
"""

import asyncio
import time
from html import escape
from typing import Any

import torch

from slipstream.config.data import DataConfig
from slipstream.data.prompts import Prompts, load_rows
from slipstream.data.tokenizers import encode_rows, load_tokenizer
from slipstream.engines.native.model import load_model
from slipstream.engines.native.sampling.requests import Publish
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.engines.settings import SamplerSettings
from slipstream.engines.weights import export_weights
from slipstream.environments.chat.renderer import Renderer
from slipstream.environments.episodes import Episodes, Limits
from slipstream.environments.pool import EnvironmentPool, EnvironmentSettings
from slipstream.protocols import Sampling
from slipstream.records import Prompt, Rollout

MODEL, QUESTION, AT = "builtin:tool_teacher", 4, 12
ROW, WIDTH, HEIGHT, TOP, LEFT, SHOWN = 9, 100, 58, 62, 12, 13
SAID = ("#cfe3f3", "#cdeed8", "#e3d6f0", "#fbe7bd", "#f8d5cf", "#d5eef0")


class Changing(NativeSampler):
    """Is given other weights when it has drawn so many tokens."""

    drawn = 0
    publish_at: Publish

    def _draw(self) -> Any:
        self.drawn += 1
        if self.drawn == AT:
            self.publishing.append(self.publish_at)
        return super()._draw()


async def played() -> Rollout:
    tokenizer, hosts = load_tokenizer(MODEL), EnvironmentPool(EnvironmentSettings("table", None, 4096))
    lm, ends = load_model(MODEL, dtype="float32", device="cpu"), {tokenizer.eos_token_id}
    sampler = Changing(lm, SamplerSettings(slots=1), stop_ids=ends)
    answer = asyncio.get_running_loop().create_future()
    weights = export_weights(lm.model, "float32", version=1)
    sampler.publish_at = Publish(weights, "keep", answer, time.perf_counter())
    limits = Limits(turns=9, calls=9, turn_tokens=None, seconds=600, step_seconds=60)
    episodes = Episodes(sampler, Renderer(tokenizer, stop_ids=ends, tools=hosts.schemas()), hosts, limits)
    (handle,) = await episodes.generate(asked(tokenizer, hosts), Sampling(max_tokens=160))
    episodes.close()
    rollout: Rollout = handle.body
    return rollout


def asked(tokenizer: Any, hosts: EnvironmentPool) -> Prompt:
    rows = load_rows("builtin:table", DataConfig(), limit=QUESTION + 1)
    tokens = encode_rows(rows, tokenizer, DataConfig(), {"": hosts.schemas()})
    return Prompts(rows, tokens, seed=0, shuffle=False).at(QUESTION)


def cell(place: int, rollout: Rollout, text: str) -> str:
    x, y = LEFT + place % ROW * WIDTH, TOP + place // ROW * (HEIGHT + 8)
    turn, said = int(rollout.turn[place]), bool(rollout.loss_mask[place])
    text = text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
    under = f"turn {turn}, v{rollout.versions[place]}" if said else "seen"
    below = f"{rollout.logp[place]:.3f}" if said else "no loss"
    fill = SAID[turn % len(SAID)] if said else "#fff"
    dash = "" if said else ' stroke-dasharray="3 2"'
    return (
        f'<rect x="{x}" y="{y}" width="{WIDTH - 4}" height="{HEIGHT}" rx="4" fill="{fill}" stroke="#999"{dash}/>'
        f'<text x="{x + 6}" y="{y + 19}" class="code">{escape(text)}</text>'
        f'<text x="{x + 6}" y="{y + 37}">{under}</text><text x="{x + 6}" y="{y + 51}">{below}</text>'
    )


def picture(rollout: Rollout) -> str:
    tokenizer = load_tokenizer(MODEL)
    question = tokenizer.decode(rollout.prompt.tokens)
    texts = [tokenizer.decode([int(each)]) for each in rollout.tokens]
    height = TOP + -(-len(texts) // ROW) * (HEIGHT + 8) + 8
    style = "text{font:11px sans-serif;fill:#222}.code{font:11px monospace;font-weight:bold}.head{font-size:13px}"
    heads = (
        f"Prompt: {question}",
        "Coloured: sampled in this turn, by weights of this version, with this log-prob, and trained. Dashed: put "
        "there by the chat template and the tools.",
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * LEFT + ROW * WIDTH} {height}">',
            f'<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>',
            *(f'<text x="{LEFT}" y="{22 + 20 * n}" class="head">{escape(head)}</text>' for n, head in enumerate(heads)),
            *(cell(place, rollout, text) for place, text in enumerate(texts)),
            "</svg>",
        ]
    )


def main() -> None:
    torch.set_num_threads(1)
    print(picture(asyncio.run(played())))


if __name__ == "__main__":
    main()

"""Cost of a teacher with another tokenizer: bytes of responses scored per CPU second, with and without re-spelling.

    python benchmarks/respelling.py [--groups 64] [--tokenizers build/tokenizers/qwen3 build/tokenizers/llama3_1]
    python benchmarks/respelling.py --model build/real/student --groups 16 --rounds 3

The same model scores the same responses twice: in the student's tokens, and through the re-spelling of these tokens to
the same tokens. The difference is the cost of re-spelling alone, for a small model or a real one (`make real`). With
`--tokenizers`, the last line says how many bytes per CPU second it re-spells from the first tokenizer to the second
(`make tokenizers` fetches both).
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from slipstream.config.losses import LossSpec
from slipstream.data.arithmetic import problems
from slipstream.data.spelling import Spelling, respell
from slipstream.data.tokenizers import load_tokenizer
from slipstream.engines.native.model import load_model
from slipstream.engines.native.scorer import NativeScorer
from slipstream.engines.respelling import RespellingScorer
from slipstream.engines.settings import ScorerSettings
from slipstream.protocols import Respelling
from slipstream.records import Handle, Prompt, header_of, one_turn

TEXT = "def mean(numbers):\n    return sum(numbers) / len(numbers)  # of 12345\n\nThe answer is 42, très bien 中文.\n"


def groups_of(tokenizer: Any, count: int) -> list[list[Handle]]:
    """Return groups of one response, the right answer of a problem, with prompts in both spellings."""
    found = []
    for number, (question, answer) in enumerate(problems("train", count)):
        prompt_T, answer_T = (np.array(ids, np.int32) for ids in tokenizer([question, answer])["input_ids"])
        prompt = Prompt(id=str(number), number=number, tokens=prompt_T, respelled=prompt_T)
        tokens_N = np.append(answer_T, np.int32(tokenizer.eos_token_id))
        zeros_N = np.zeros(len(tokens_N), np.int32)
        logp_N1 = np.zeros((len(tokens_N), 1), np.float32)
        rollout = one_turn(prompt, 0, actions=tokens_N[:, None], action_logp=logp_N1, versions=zeros_N, finish="eos")
        found.append([Handle(header_of(rollout), rollout)])
    return found


def bytes_per_second(scorers: Sequence[tuple[Any, list[list[Handle]]]], rounds: int) -> list[float]:
    """Return the best of the rounds of each scorer. In a round all groups wait together, and the scorers take turns."""

    async def score(scorer: Any, groups: list[list[Handle]]) -> None:
        await asyncio.gather(*(scorer.score(group) for group in groups))

    seconds: list[list[float]] = [[] for _ in scorers]
    for _ in range(rounds + 1):
        for (scorer, groups), spent in zip(scorers, seconds, strict=True):
            began = time.process_time()
            asyncio.run(score(scorer, groups))
            spent.append(time.process_time() - began)
    sizes = [sum(handle.header.tokens for group in groups for handle in group) for _, groups in scorers]
    return [size / min(spent[1:]) for size, spent in zip(sizes, seconds, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin:teacher")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokenizers", nargs=2, default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer, lm = load_tokenizer(args.model), load_model(args.model, dtype="float32", device="cpu")
    settings = ScorerSettings(spec=LossSpec(cache="sampled", formula=""), vocabulary=lm.vocab_size)
    direct, loss = NativeScorer(lm, settings), settings.spec
    end = tokenizer.eos_token_id
    same = Respelling("", lm.vocab_size, {end: end}, 160)
    respelling = RespellingScorer(direct, "teacher", Spelling(tokenizer), Spelling(tokenizer), same, loss=loss)
    groups = groups_of(tokenizer, args.groups)
    plain = [[replace_prompt(handle) for handle in group] for group in groups]
    one, other = bytes_per_second([(direct, plain), (respelling, groups)], args.rounds)
    print(f"scored bytes per CPU second: {one:,.0f} in the student's tokens, {other:,.0f} re-spelled")
    if args.tokenizers:
        named = [f"{path}/tokenizer.json" for path in args.tokenizers]
        mine, theirs = (Spelling(PreTrainedTokenizerFast(tokenizer_file=file)) for file in named)
        ids, _ = mine.spell(TEXT.encode() * 40)
        began = time.process_time()
        for _ in range(args.rounds):
            respell([*ids, -1], mine, theirs, {-1: -2})
        size, seconds = len(TEXT.encode()) * 40 * args.rounds, time.process_time() - began
        print(f"re-spelled bytes per CPU second: {size / seconds:,.0f}")


def replace_prompt(handle: Handle) -> Handle:
    return Handle(handle.header, replace(handle.body, prompt=replace(handle.body.prompt, respelled=None)))


if __name__ == "__main__":
    main()

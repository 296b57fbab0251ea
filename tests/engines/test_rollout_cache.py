"""Stored rollouts are those that were drawn, under a key of everything that determines them; damage is found."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.engines.record_files import RolloutCache
from slipstream.protocols import Sampling
from slipstream.records import Group, Handle, Prompt, SamplingSupport, header_of, one_turn

SAMPLING = Sampling(max_tokens=4, group=2, draws=3, best=2)
PROMPT = Prompt(id="a", number=4, tokens=np.array([3, 4], np.int32), seed=7, supervised=True, source="teacher")


class Drawn:
    """A sampler that draws something else at each call."""

    def __init__(self) -> None:
        self.rng, self.calls = np.random.default_rng(0), 0

    async def generate(self, prompt: Prompt, sampling: Sampling, begun: Group = ()) -> list[Handle]:
        self.calls += 1
        group = []
        for index in range(sampling.group):
            ids = self.rng.integers(0, 9, (4, sampling.draws)).astype(np.int32)
            rollout = one_turn(
                prompt,
                index,
                actions=ids,
                action_logp=-self.rng.random((4, sampling.draws)),
                versions=np.zeros(4, np.int32),
                finish="length" if index else "eos",
                best_ids=ids[:, : sampling.best] + 10,
                best_logp=-self.rng.random((4, sampling.best)).astype(np.float32),
                kept=SamplingSupport(ids.ravel(), np.full(4, sampling.draws, np.int32)) if sampling.keep_mask else None,
            )
            group.append(Handle(header_of(rollout), rollout))
        return group


def drawn(sampler: RolloutCache, prompt: Prompt = PROMPT, sampling: Sampling = SAMPLING) -> list[Handle]:
    return asyncio.run(sampler.generate(prompt, sampling))


@pytest.mark.parametrize("keep_mask", [False, True])
def test_what_is_read_is_what_was_drawn(keep_mask: bool, tmp_path: Path) -> None:
    sampling, source = replace(SAMPLING, keep_mask=keep_mask), Drawn()
    sampler = RolloutCache(source.generate, tmp_path, "one")
    first, prompt = drawn(sampler, sampling=sampling), replace(PROMPT, number=9)
    for one, other in zip(first, drawn(sampler, prompt, sampling), strict=True):
        assert other.header == replace(one.header, number=9) and other.body.prompt is prompt
        for name in ("tokens", "logp", "actions", "action_logp", "best_ids", "best_logp", "versions", "turn"):
            values = getattr(one.body, name), getattr(other.body, name)
            np.testing.assert_array_equal(*values, strict=True)
        assert (one.body.kept is None) == (other.body.kept is None) == (not keep_mask)
        if keep_mask:
            np.testing.assert_array_equal(one.body.kept.ids, other.body.kept.ids, strict=True)
    assert source.calls == 1


@pytest.mark.parametrize(
    ("prompt", "sampling", "identity"),
    [
        (replace(PROMPT, seed=8), SAMPLING, "one"),
        (replace(PROMPT, tokens=np.array([3, 5], np.int32)), SAMPLING, "one"),
        (PROMPT, replace(SAMPLING, temperature=0.5), "one"),
        (PROMPT, replace(SAMPLING, group=1), "one"),
        (PROMPT, SAMPLING, "two"),
        (replace(PROMPT, supervised=False), SAMPLING, "one"),
    ],
)
def test_another_prompt_seed_option_or_teacher_draws_again(
    prompt: Prompt, sampling: Sampling, identity: str, tmp_path: Path
) -> None:
    source = Drawn()
    drawn(RolloutCache(source.generate, tmp_path, "one"))
    drawn(RolloutCache(source.generate, tmp_path, identity), prompt, sampling)
    assert source.calls == 2


@pytest.mark.parametrize("cut", [0, 10, 100, -1])
def test_a_damaged_file_is_drawn_again_with_a_line(cut: int, tmp_path: Path) -> None:
    source = Drawn()
    sampler = RolloutCache(source.generate, tmp_path, "one")
    drawn(sampler)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:cut])
    again = drawn(sampler)
    assert {handle.header.cause for handle in again} == {
        f"{path} is damaged (its checksum differs): its rollouts are drawn again"
    }
    assert source.calls == 2 and not drawn(sampler)[0].header.cause, "the new draws are stored"
    assert source.calls == 2

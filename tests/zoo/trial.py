"""One family on trial: everything the native engines do with it, against HF's plain pass over one sequence at a time.

A trial returns the largest error; a ModelError is a refusal, and its sentence the answer.
"""

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream.config.learner import LearnerConfig, LoraConfig
from slipstream.engines.draws import process
from slipstream.engines.native.adapters import merge
from slipstream.engines.native.config import experts_of
from slipstream.engines.native.learning.storage import State, save
from slipstream.engines.native.model import LanguageModel, is_recurrent, split, with_adapters
from slipstream.engines.native.packing import pack
from slipstream.engines.native.ranks import Ranks
from slipstream.engines.native.routers import routers_of
from slipstream.engines.native.rows import Rows
from slipstream.engines.weights import export_weights, fingerprint, load_weights
from slipstream.errors import ConfigError, ModelError
from slipstream.models.adapters import adapter_of
from slipstream.protocols import Sampling
from slipstream.records import Handle, Prompt, Rollout, derive_seed, header_of
from support.engines import native_sampler, native_scorer, student_passes
from support.tiny_models import random_rollouts
from zoo.families import EOS, VOCAB

LONGEST, LONGEST_RECURRENT = 40, 96
"""Prompt and response: past windows, chunks, and the original context of scaled positions; with recurrent layers, more,
because an error in a state adds up token by token."""


def longest_of(model: PreTrainedModel) -> int:
    return LONGEST_RECURRENT if is_recurrent(model.config) else LONGEST


def apart(model: PreTrainedModel) -> LanguageModel:
    """A copy, so that an engine's changes stay its own."""
    return split("tiny", copy.deepcopy(model), max_length=longest_of(model))


def nudged(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    later, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in later.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter += 0.05 * noise * parameter.std(correction=0)
    return later


SAMPLES = random_rollouts([(7, [20, 1, 9]), (1, [5, 3]), (19, [2, 21])])


def plain(lm: LanguageModel, rollout: Rollout, sampling: Sampling | None = None) -> Tensor:
    """Log-probs [T, V] by HF alone, in one pass over this sequence."""
    ids = torch.from_numpy(np.concatenate([rollout.prompt.tokens, rollout.tokens]).astype(np.int64))
    logits = lm.model(ids[None], use_cache=False).logits[0, len(rollout.prompt.tokens) - 1 : -1]
    return process(logits, sampling) if sampling else logits.log_softmax(-1)


# --- what is tried ----------------------------------------------------------------------------------------------------


def sampler(model: PreTrainedModel) -> float:
    """Ragged groups in fewer slots than rows, every sampling option, two publishes in the middle of responses."""
    versions = [model, nudged(model, 1), nudged(model, 2)]
    rng, lengths = np.random.default_rng(1), (3, 1, 8, 5, 19, 2)
    prompts = [
        Prompt(id=f"p{i}", number=i, tokens=rng.integers(2, VOCAB, n).astype(np.int32), seed=derive_seed(0, i))
        for i, n in enumerate(lengths)
    ]
    options = [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05, "temperature": 0.7}, {}, {"temperature": 1.5}]
    samplings = [
        Sampling(max_tokens=min(9 + 2 * i, LONGEST - n), group=1 + i % 3, draws=1 + i % 4, **options[i])
        for i, n in enumerate(lengths)
    ]
    samplings[-1] = replace(
        samplings[-1], max_tokens=longest_of(model) - lengths[-1] if is_recurrent(model.config) else 19
    )
    engine = native_sampler(apart(model), slots=6, stop_ids={EOS})
    found: list[Rollout] = []

    async def main() -> None:
        engine._wake = lambda: None  # steps below, on this thread: every token boundary can be reached
        jobs = [asyncio.ensure_future(engine.generate(p, s)) for p, s in zip(prompts, samplings, strict=True)]
        await asyncio.sleep(0)
        step = version = 0
        while engine.rows or engine.waiting or engine.publishing:
            if step in (4, 9):
                version += 1
                weights = export_weights(versions[version], "float64", version=version)
                jobs.append(asyncio.ensure_future(engine.publish(weights, "keep")))
                await asyncio.sleep(0)
            for answer, result in engine._step():
                answer.set_result(result)
            step += 1
        done = await asyncio.gather(*jobs)
        found.extend(handle.body for group in done if isinstance(group, list) for handle in group)

    asyncio.run(main())
    engine.close()
    assert {int(v) for rollout in found for v in rollout.versions} == {0, 1, 2}
    hf, worst = [apart(each) for each in versions], 0.0
    with torch.no_grad():
        for rollout in found:
            for version in np.unique(rollout.versions):
                at = rollout.versions == version
                logp = plain(hf[version], rollout, samplings[rollout.prompt.number])
                expected = logp.gather(1, torch.from_numpy(rollout.actions).long()).numpy()
                worst = max(worst, float(np.abs(rollout.action_logp[at] - expected[at]).max()))
    return worst


def scorer(model: PreTrainedModel, *, packing: bool = True) -> float:
    engine = native_scorer(apart(model), packing=packing, token_budget=64)
    found = engine._score([Handle(header_of(rollout), rollout) for rollout in SAMPLES])
    engine.close()
    hf = apart(model)
    with torch.no_grad():
        return max(
            float(np.abs(handle.body.teacher_logp - taken(plain(hf, rollout), rollout).numpy()).max())
            for handle, rollout in zip(found, SAMPLES, strict=True)
        )


def scorer_of_either(model: PreTrainedModel) -> float:
    """Packed where it can be."""
    try:
        return scorer(model)
    except ModelError:
        return scorer(model, packing=False)


def learner(model: PreTrainedModel, *, packing: bool, shared_prompt: bool = True, checkpointing: bool = False) -> float:
    """Gradients of a weighted sum of log-probs, relative to the largest entry of each tensor's."""
    config = LearnerConfig(packing=packing, checkpointing=checkpointing, token_budget=128)
    lm, hf = apart(model), apart(model)
    passes = student_passes(lm, config, Ranks(), temperature=1.0)
    batches = pack(SAMPLES, budget=128, hidden=passes.student.width, packing=packing, shared_prompt=shared_prompt)

    def by(batch: object) -> Tensor:
        chosen = [SAMPLES[i] for i in batch.members]
        logp_NV = passes.student(Rows(SAMPLES, batch, lm.device), lambda h, head: head(h).log_softmax(-1))
        return loss_of(chosen, logp_NV.split([len(r.tokens) for r in chosen]))

    found = gradients(lm, [lambda b=b: by(b) for b in batches])
    expected = gradients(hf, [lambda r=r: loss_of([r], [plain(hf, r)]) for r in SAMPLES])
    assert found.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    return max(
        float((found[n] - expected[n]).abs().max() / max(float(expected[n].abs().max()), 1e-3 * largest)) for n in found
    )


def taken(logp_TV: Tensor, rollout: Rollout) -> Tensor:
    return logp_TV.gather(1, torch.from_numpy(rollout.tokens).long()[:, None])[:, 0]


def loss_of(rollouts: Sequence[Rollout], logp: Sequence[Tensor]) -> Tensor:
    weights = [np.cos(np.arange(len(r.tokens)) + r.prompt.number + 3 * r.index) for r in rollouts]
    return torch.stack(
        [(taken(x, r) * torch.from_numpy(w).to(x)).sum() for r, x, w in zip(rollouts, logp, weights, strict=True)]
    ).sum()


def gradients(lm: LanguageModel, losses: Sequence[Callable[[], Tensor]]) -> dict[str, Tensor]:
    lm.model.zero_grad()
    for loss in losses:
        loss().backward()
    return {name: p.grad.clone() for name, p in lm.model.named_parameters() if p.grad is not None}


def lora(model: PreTrainedModel) -> float:
    """Adapters that were moved travel to a sampler, and are in what is saved: merged, and by themselves."""
    config = LoraConfig(rank=2)
    ours, theirs = (with_adapters(apart(model), config, seed=7) for _ in range(2))
    with torch.no_grad():
        for parameter in ours.model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    weights = export_weights(ours.model, "float64")
    load_weights(theirs.model, weights)
    assert fingerprint(theirs.model, "float64") == fingerprint(ours.model, "float64", exported=weights)
    return max(reloaded(ours, base=model), difference(ours, theirs))


def saved(model: PreTrainedModel) -> float:
    return reloaded(apart(model))


def reloaded(lm: LanguageModel, *, base: PreTrainedModel | None = None) -> float:
    """The saved model is the same, and so are adapters on their base."""
    with TemporaryDirectory() as folder:
        save(Path(folder), lm, None, Ranks(), State(1, {}, {}, {}, {}, {}, {}, {}, None, ()), optimizer=None)
        saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
        found = [apart(saved)]
        if base is not None:
            found.append(apart(base))
            merge(found[-1].model, adapter_of(f"{folder}/adapter"))
    return max(difference(lm, each) for each in found)


@torch.no_grad()
def difference(one: LanguageModel, other: LanguageModel) -> float:
    return max(float((plain(one, r) - plain(other, r)).abs().max()) for r in SAMPLES[:3])


@torch.no_grad()
def half(model: PreTrainedModel) -> float:
    """Sampling in bfloat16 against HF in bfloat16: the mean difference of log-probs, over HF's own rounding error."""
    lower = copy.deepcopy(model).to(torch.bfloat16)
    engine = native_sampler(split("tiny", copy.deepcopy(lower), max_length=longest_of(lower)), slots=6, stop_ids={EOS})
    rng = np.random.default_rng(1)
    prompts = [
        Prompt(id=f"p{i}", number=i, tokens=rng.integers(2, VOCAB, 2 + i).astype(np.int32), seed=derive_seed(0, i))
        for i in range(8)
    ]

    async def main() -> list[list[Handle]]:
        sampling = Sampling(max_tokens=20, group=2)
        return await asyncio.gather(*[engine.generate(prompt, sampling) for prompt in prompts])

    rollouts = [handle.body for group in asyncio.run(main()) for handle in group]
    engine.close()
    hf, exact = split("tiny", lower, max_length=longest_of(lower)), apart(copy.deepcopy(lower).double())
    ours = np.concatenate([rollout.logp for rollout in rollouts])
    theirs, right = (
        np.concatenate([taken(plain(lm, rollout), rollout).float().numpy() for rollout in rollouts])
        for lm in (hf, exact)
    )
    usual = np.abs(theirs - right).mean() + 1e-6
    return float(np.abs(ours - right).mean() / usual)


def router(model: PreTrainedModel) -> float | None:
    """Choices of experts, recorded and replayed: `routers_of` compares bits, and refuses. None without experts."""
    return 0.0 if experts_of(model.config) and routers_of(apart(model), field="learner.router") else None


TRIALS: dict[str, Callable[[PreTrainedModel], float | None]] = {
    "generates": sampler,
    "bf16": half,
    "scores": scorer_of_either,
    "packed": partial(learner, packing=True, shared_prompt=False),
    "shared prompt": partial(learner, packing=True),
    "padded": partial(learner, packing=False),
    "recomputed": partial(learner, packing=False, checkpointing=True),
    "adapters": lora,
    "saved": saved,
    "router": router,
}
LIMIT = dict.fromkeys(TRIALS, 2e-4) | {"bf16": 1.6}
"""Log-probs and relative gradients in float64, in which HF still rounds norms to float32; bf16 in HF's own errors."""


def attempt(model: PreTrainedModel, trial: str) -> float | str | Exception | None:
    """The largest error, the sentence of a refusal, or whatever else was raised; None if there is nothing to try."""
    try:
        return TRIALS[trial](model)
    except (ModelError, ConfigError) as refusal:
        return str(refusal).replace("tiny: ", "")
    except Exception as error:
        return error

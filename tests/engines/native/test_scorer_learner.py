"""Native scorer and learner against dense computations on the same models."""

import asyncio
import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from slipstream.config.learner import LearnerConfig
from slipstream.config.losses import ForwardKL, LossConfig, ReverseKL, ReverseKLMC
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.engines.native.learning.step import learning_rate
from slipstream.engines.native.learning.student import prepare as prepare_training
from slipstream.engines.native.model import LanguageModel, load_model, split
from slipstream.engines.native.packing import MOST_PADDED, micro_batches
from slipstream.engines.native.rows import CURRENT_ROWS, use_rows
from slipstream.engines.settings import LearnerSettings
from slipstream.engines.weights import export_weights, fingerprint, load_weights
from slipstream.errors import ModelError, NonFiniteError
from slipstream.estimators.divergence import dense, forward_kl_topk
from slipstream.estimators.surrogate import mc_reverse_kl
from slipstream.objective.distillation import TeacherHead
from slipstream.objective.method import Method
from slipstream.records import ONE_COUNT, Batch, Handle, Scored, header_of, total
from support.engines import native_learner, native_sampler, native_scorer
from support.learners import roll_out, run, score
from support.tiny_models import (
    EOS,
    SHAPE,
    TEACHERS,
    VOCAB,
    littered,
    logits_of,
    make_model,
    masked,
    masked_sample,
    wrap,
)

# --- scorer -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token_budget", [30, 10_000])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@torch.no_grad()
def test_sampled_cache_is_the_teachers_log_prob_of_every_draw(token_budget: int, temperature: float) -> None:
    student, teacher = make_model(seed=0), make_model("llama", seed=1)
    groups = roll_out(student)
    scored = score(teacher, groups, token_budget=token_budget, temperature=temperature)
    assert [[h.header.index for h in g] for g in scored] == [[0, 1]] * len(groups)
    for handle in (handle for group in scored for handle in group):
        sample: Scored = handle.body
        logq = (logits_of(teacher, [sample])[0] / temperature).log_softmax(-1)
        expected = logq.gather(1, torch.from_numpy(sample.rollout.actions).long()).numpy()
        np.testing.assert_allclose(sample.teacher_action_logp, expected, atol=2e-5)


def test_a_response_of_more_than_twice_the_token_budget_is_scored() -> None:
    groups = roll_out(make_model(seed=0))
    (small, *_), (large, *_) = (score(make_model(seed=1), groups, token_budget=n) for n in (2, 10_000))
    np.testing.assert_allclose(small[0].body.teacher_logp, large[0].body.teacher_logp, atol=2e-5)


def test_the_prompt_of_a_group_is_computed_once() -> None:
    """Each group has two responses to one prompt: the scores are those of each response alone (see above)."""
    groups, teacher, computed = roll_out(make_model(seed=0)), make_model(seed=1), list[int]()

    def count(module: torch.nn.Module, args: Any) -> None:
        computed.append(CURRENT_ROWS.get().batch.real)

    async def work() -> None:
        scorer = native_scorer(wrap(teacher))
        with scorer.lm.backbone.register_forward_pre_hook(count):
            await asyncio.gather(*[scorer.score(group) for group in groups])
        scorer.close()

    run(work())
    rollouts = [[handle.body for handle in group] for group in groups]
    real = sum(len(group[0].prompt.tokens) + sum(len(each.tokens) for each in group) for group in rollouts)
    assert sum(computed) == real


@torch.no_grad()
def test_topk_cache_holds_the_teachers_best_and_the_emitted_token() -> None:
    student, teacher = make_model(seed=0), make_model(seed=1)
    for handle in (h for group in score(teacher, roll_out(student), cache="teacher_topk", k=6) for h in group):
        sample: Scored = handle.body
        logq = logits_of(teacher, [sample])[0].log_softmax(-1)
        best = logq.topk(6, -1)
        assert sample.teacher_ids is not None and sample.teacher_topk_logp is not None
        np.testing.assert_array_equal(sample.teacher_ids, best.indices.numpy())
        np.testing.assert_allclose(sample.teacher_topk_logp, best.values.numpy(), atol=2e-5)
        emitted = logq.gather(1, torch.from_numpy(sample.rollout.tokens).long()[:, None])[:, 0]
        np.testing.assert_allclose(sample.teacher_logp, emitted.numpy(), atol=2e-5)


@torch.no_grad()
def test_hidden_cache_gives_back_the_whole_distribution() -> None:
    student, teacher = make_model(seed=0), make_model(seed=1)
    for handle in (h for group in score(teacher, roll_out(student), cache="hidden") for h in group):
        sample: Scored = handle.body
        logits = teacher.get_output_embeddings()(torch.from_numpy(sample.teacher_hidden))
        torch.testing.assert_close(logits, logits_of(teacher, [sample])[0], atol=1e-4, rtol=1e-4)


def test_rewards_of_the_header_enter_the_record() -> None:
    groups = [[Handle(replace(h.header, rewards={"exact": 1.0}), h.body) for h in g] for g in roll_out(make_model())]
    assert score(make_model(), groups)[0][0].body.rollout.rewards == {"exact": 1.0}


def test_a_top_k_larger_than_the_vocabulary_is_refused() -> None:
    with pytest.raises(ModelError, match=f"loss.k = 99 is more than the vocabulary of {VOCAB}"):
        native_scorer(wrap(make_model()), cache="teacher_topk", k=99)


def test_a_failing_forward_reaches_everyone_who_waits() -> None:
    async def work() -> list[object]:
        scorer = native_scorer(wrap(make_model()))

        def fail(*_: object) -> None:
            raise MemoryError("no room")

        scorer.lm.backbone.register_forward_pre_hook(fail)
        return await asyncio.gather(*[scorer.score(g) for g in roll_out_groups], return_exceptions=True)

    roll_out_groups = roll_out(make_model(), count=3)
    assert [type(error) for error in run(work())] == [MemoryError] * 3


# --- learner ----------------------------------------------------------------------------------------------------------


def dense_loss(logits: Tensor, teacher_logits: Tensor, sample: Scored, loss: LossConfig) -> Tensor:
    """Return the loss of every trained token of a sample, from full log-softmaxes of the logits [T, V]."""
    trained = torch.from_numpy(sample.rollout.loss_mask)
    logits, teacher_logits = logits[trained], teacher_logits[trained]
    logp, logq = (logits / loss.temperature).log_softmax(-1), (teacher_logits / loss.temperature).log_softmax(-1)
    match loss:
        case ReverseKLMC():
            ids = torch.from_numpy(sample.rollout.actions).long()
            behavior = torch.from_numpy(sample.rollout.action_logp)
            options = {"advantage": loss.advantage, "clip": loss.clip, "ratio_cap": loss.ratio_cap}
            return mc_reverse_kl(
                logp.gather(1, ids), behavior, logq.gather(1, ids), importance=loss.importance, **options
            )[0]
        case ForwardKL(cache="hidden"):
            return dense(logp, logq, kind="forward")
        case ForwardKL():
            best = logq.topk(loss.k, -1)
            return forward_kl_topk(
                logp.gather(1, best.indices), best.values, tail=loss.tail, renormalise=loss.renormalise
            )


LOSSES: list[LossConfig] = [
    ReverseKLMC(m=3),
    ReverseKLMC(m=3, temperature=0.7),
    ReverseKLMC(m=3, clip=(0.2, 0.3), advantage="behavior"),
    ReverseKLMC(m=3, ratio_cap=1.2),
    ReverseKLMC(m=3, importance=False),
    ForwardKL(k=5),
    ForwardKL(k=5, tail=True, temperature=2.0),
    ForwardKL(k=5, renormalise=True),
    ForwardKL(cache="hidden", temperature=1.5),
]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_gradients_equal_the_dense_ones_however_the_batch_is_cut(loss: LossConfig) -> None:
    """Learn from stale samples: another model has drawn them. Phi's norms do not round gradients to float32."""
    dtype = torch.float64
    behind, student, teacher = (make_model("phi", seed=seed, dtype=dtype) for seed in range(3))
    options: dict[str, Any] = {"temperature": loss.temperature}
    if isinstance(loss, ForwardKL):
        options |= {"cache": loss.cache, "k": loss.k}
    groups = score(teacher, roll_out(behind), **options)
    first: Scored = groups[0][0].body
    places = np.arange(len(first.rollout.tokens))
    sample = masked_sample(first, places >= len(places) // 2)
    groups[0][0] = Handle(header_of(sample.rollout, teacher="main"), sample)

    n_tokens = sum(int(handle.body.rollout.loss_mask.sum()) for group in groups for handle in group)
    batch = Batch(tuple(groups), 1)
    headers = {id(h): h for g in groups for h in g}
    assert len(headers) == 14

    async def work(learner: NativeLearner) -> float:
        counts = replace(total(await learner.prepare(batch)), n_tokens=n_tokens)
        await learner.accumulate(batch, counts)
        return learner.measurements.sums["loss"].item()

    reference = copy.deepcopy(student)
    samples = [handle.body for group in groups for handle in group]
    of_teacher = [logits.detach() for logits in logits_of(teacher, samples)]
    pairs = zip(samples, logits_of(reference, samples), of_teacher, strict=True)
    expected = sum(dense_loss(logits, of_teacher, s, loss).sum() for s, logits, of_teacher in pairs) / n_tokens
    expected.backward()
    for token_budget in (30, 10_000):
        learner = native_learner(
            wrap(student),
            method=Method(loss=loss),
            config=LearnerConfig(token_budget=token_budget, dtype="float64"),
            updates=1,
            teacher_heads={"teacher": TeacherHead(wrap(teacher).head)},
        )
        assert run(work(learner)) == pytest.approx(expected.item(), rel=1e-10)
        for name, parameter in reference.named_parameters():
            found = learner.lm.model.get_parameter(name).grad
            torch.testing.assert_close(found, parameter.grad, rtol=1e-9, atol=1e-12)
        learner.close()


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_values_in_masked_rows_are_neither_scored_nor_learned_from(loss: LossConfig) -> None:
    """Compare the teacher's rows, the loss and gradients to the bit. A micro-batch may be masked as a whole."""
    student, teacher = make_model(seed=1), make_model(seed=2)
    options: dict[str, Any] = {"temperature": loss.temperature}
    if isinstance(loss, ForwardKL):
        options |= {"cache": loss.cache, "k": loss.k}
    rolled = [handle for group in roll_out(make_model(seed=0)) for handle in group]
    kept = []
    for number, handle in enumerate(rolled):
        mask = handle.body.loss_mask.copy()
        mask[number % 2 : (number % 2) + 2] = False
        kept.append(masked(handle.body, mask & (number != 3)))
    found = []
    for litter in (False, True):
        bodies = [littered(Scored(rollout=body), seed=i).rollout if litter else body for i, body in enumerate(kept)]
        ((*scored,),) = score(teacher, [[Handle(header_of(body), body) for body in bodies]], **options)
        if litter:
            scored = [Handle(handle.header, littered(handle.body, seed=i)) for i, handle in enumerate(scored)]
        learner = native_learner(
            wrap(student),
            method=Method(loss=loss),
            config=LearnerConfig(token_budget=20),
            updates=1,
            teacher_heads={"teacher": TeacherHead(wrap(teacher).head)},
        )
        batch = Batch((tuple(scored),), 1)

        async def work(learner: NativeLearner = learner, batch: Batch = batch) -> Any:
            await learner.accumulate(batch, total(await learner.prepare(batch)))
            gradients = [p.grad.clone() for p in learner.lm.model.parameters() if p.grad is not None]
            return (
                gradients,
                learner.measurements.sums["loss"].item(),
                await learner.step(),
                await learner.compare(batch),
            )

        found.append((scored, run(work())))
        learner.close()
    (plain, (gradients, *numbers)), (other, (its_gradients, *its_numbers)) = found
    assert numbers == its_numbers
    assert gradients and all(torch.equal(a, b) for a, b in zip(gradients, its_gradients, strict=True))
    for one, two in zip(plain, other, strict=True):
        for name in TEACHERS:
            a, b = getattr(one.body, name), getattr(two.body, name)
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_array_equal(a, b)
                assert len(a) == one.body.rollout.trained_tokens, "nothing else is scored"


def make_learner(**config: Any) -> NativeLearner:
    loss = ReverseKLMC(m=3)
    return native_learner(
        wrap(make_model(seed=0)), method=Method(loss=loss), config=LearnerConfig(**config), updates=10
    )


def make_batch() -> Batch:
    return Batch(tuple(score(make_model(seed=2), roll_out(make_model(seed=0)))), 1)


async def update(learner: NativeLearner, batch: Batch, number: int = 1) -> dict[str, float]:
    batch = replace(batch, update=number)
    await learner.accumulate(batch, total(await learner.prepare(batch)))
    return await learner.step()


def test_a_comparison_also_tells_what_is_left_without_the_learners_own_rounding() -> None:
    batch, whole, rounded = make_batch(), make_learner(), make_learner(compute_dtype="bfloat16")

    async def work() -> list[dict[str, float]]:
        return [await learner.compare(batch) for learner in (whole, rounded, rounded)]

    exact, first, again = asyncio.run(work())
    assert not {name for name in exact if name.startswith("exact/")}, "it would be the same"
    for found in (first, again):
        assert found["exact/k3_kl"] == pytest.approx(exact["drift/k3_kl"], rel=1e-3, abs=1e-9)
        assert found["exact/ppl_ratio"] == pytest.approx(exact["drift/ppl_ratio"], rel=1e-5)
        assert found["drift/k3_kl"] > 10 * found["exact/k3_kl"]
    assert first == again, "the precision of later passes is that of the config"


def test_scale_multiplies_the_gradient_before_clipping() -> None:
    """Accumulating with unit counts and scaling once is dividing by the counts."""
    batch, whole, scaled = make_batch(), make_learner(), make_learner()

    async def work() -> tuple[dict[str, float], dict[str, float]]:
        counts = total(await whole.prepare(batch))
        await whole.accumulate(batch, counts)
        await scaled.prepare(batch)
        await scaled.accumulate(batch, ONE_COUNT)
        return await whole.step(), await scaled.step(counts)

    one, other = run(work())
    assert one == pytest.approx(other, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("config", [{}, {"token_budget": 40}, {"packing": False}], ids=["", "parts", "padded"])
@pytest.mark.parametrize("as_sums", [False, True])
def test_noise_is_of_the_gradients_of_groups(config: dict[str, Any], as_sums: bool) -> None:
    """Those of the last norm's bias, each made alone; whether they were divided before or at the step."""
    batch = Batch(tuple(score(make_model("phi", seed=2), roll_out(make_model("phi", seed=0)))), 1)
    learner = native_learner(
        wrap(make_model("phi", seed=0)),
        method=Method(loss=ReverseKLMC(m=3)),
        config=LearnerConfig(clip_norm=1e9, **config),
        updates=1,
    )
    bias: Any = learner.lm.model.get_parameter("model.final_layernorm.bias")

    async def alone(group: Sequence[Handle]) -> Tensor:
        counts = total(await learner.prepare(batch))
        await learner.accumulate(Batch((group,), 1), counts)
        gradient = bias.grad.double().clone()
        learner._drop()
        return gradient * len(batch.groups)

    async def work() -> tuple[Tensor, dict[str, float]]:
        gradients = torch.stack([await alone(group) for group in batch.groups])
        counts = total(await learner.prepare(batch))
        for part in batch.parts(len(batch.groups)):
            await learner.accumulate(part, ONE_COUNT if as_sums else counts)
        return gradients, await learner.step(counts if as_sums else ONE_COUNT)

    gradients, found = run(work())
    signal, power = gradients.mean(0).square().sum().item(), gradients.square().sum(1).mean().item()
    assert found["gradient/signal"] == pytest.approx(signal, rel=1e-4)
    assert found["gradient/power"] == pytest.approx(power, rel=1e-4)
    assert found["gradient/noise"] == pytest.approx(gradients.var(0).sum().item() / len(gradients), rel=1e-4)
    learner.close()


def test_one_group_alone_tells_nothing_of_noise() -> None:
    learner, batch = make_learner(), make_batch()
    found = run(update(learner, Batch(batch.groups[:1], 1)))
    assert not any(name.startswith("gradient/") for name in found)


def test_not_finite_losses_and_gradients_stop_before_the_weights_change() -> None:
    learner, batch = make_learner(), make_batch()
    before = fingerprint(learner.lm.model, "float32")

    async def work() -> None:
        bad: Scored = batch.groups[0][0].body
        assert bad.teacher_action_logp is not None
        kept = bad.teacher_action_logp.copy()
        bad.teacher_action_logp[:] = np.nan
        with pytest.raises(NonFiniteError, match="the loss of update 1 is nan"):
            await update(learner, batch)
        bad.teacher_action_logp[:] = kept
        with pytest.raises(NonFiniteError, match="the gradient norm of update 1 is (inf|nan)"):
            await learner.accumulate(batch, total(await learner.prepare(batch)))
            for parameter in learner.lm.model.parameters():
                assert parameter.grad is not None
                parameter.grad *= torch.inf
            await learner.step()
        assert fingerprint(learner.lm.model, "float32") == before
        assert np.isfinite((await update(learner, batch))["loss"]), "nothing bad is left in the gradients"

    run(work())


def test_weights_travel_as_bytes_and_fingerprints_tell_them_apart() -> None:
    source, target = make_model(seed=0), make_model(seed=1)
    assert fingerprint(source, "float32") != fingerprint(target, "float32")
    with torch.no_grad():
        load_weights(target, export_weights(source, "float32"))
    assert fingerprint(source, "float32") == fingerprint(target, "float32")
    for ours, theirs in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("ours", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("travels", ["float32", "bfloat16"])
def test_weights_arrive_in_every_precision_from_memory_that_is_read_only(travels: str, ours: torch.dtype) -> None:
    source, target = make_model("gemma3-window", seed=0), make_model("gemma3-window", seed=1, dtype=ours)
    weights = export_weights(source, travels)
    weights.body.flags.writeable = False  # as it is in Ray's object store
    load_weights(target, weights)
    for exported, loaded in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(loaded, exported.to(getattr(torch, travels)).to(ours))
    lossless = travels == "bfloat16" or ours != torch.bfloat16
    again = export_weights(target, travels)
    assert again.manifest == weights.manifest and np.array_equal(again.body, weights.body) == lossless
    assert (fingerprint(target, travels) == fingerprint(source, travels)) == lossless, "it is of what really runs"


def test_one_wrong_bit_changes_the_fingerprint() -> None:
    model = make_model()
    found = {fingerprint(model, "float32")}
    layers = model.base_model.layers
    for tensor in (layers[0].self_attn.o_proj.weight, layers[1].mlp.down_proj.weight):
        tensor.detach().view(torch.int32)[3, 5] ^= 1
        found.add(fingerprint(model, "float32"))
    with torch.no_grad():  # the same bytes in other places
        one, other = (layer.self_attn.o_proj.weight for layer in layers)
        one[:], other[:] = other.clone(), one.clone()
    assert len(found | {fingerprint(model, "float32")}) == 4


def test_weights_of_another_model_are_refused_and_change_nothing() -> None:
    model = make_model("qwen3")
    before = export_weights(model, "float32").body
    with pytest.raises(
        ModelError, match=r"weights do not fit the model: lm_head.weight \[31, 32\], .* on one side only"
    ):
        load_weights(model, export_weights(make_model("llama"), "float32"))
    wider = export_weights(model, "float32")
    wider = replace(wider, manifest=(replace(wider.manifest[0], shape=(32, 31)), *wider.manifest[1:]))
    with pytest.raises(
        ModelError, match=r"embed_tokens.weight \[31, 32\], model.embed_tokens.weight \[32, 31\] on one"
    ):
        load_weights(model, wider)
    np.testing.assert_array_equal(export_weights(model, "float32").body, before)


def test_a_checkpoint_goes_on_where_it_was_and_is_a_hf_directory(tmp_path: Path) -> None:
    batch, first, second = make_batch(), make_learner(lr=1e-2), make_learner(lr=1e-2)

    async def work() -> None:
        await update(first, batch)
        await first.save(tmp_path)
        await second.restore(tmp_path)
        await update(first, batch)
        await update(second, batch)

    run(work())
    for ours, theirs in zip(first.lm.model.parameters(), second.lm.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert first.made == second.made == 1
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_an_offloaded_learner_learns_the_same_to_the_bit_and_goes_on_after_a_stop(tmp_path: Path) -> None:
    batch, settings = make_batch(), {"lr": 1e-2, "checkpointing": True, "token_budget": 100}
    whole, offloaded, again = (
        make_learner(**settings, offload=offload) for offload in ((), *[("optimizer", "activations")] * 2)
    )

    async def work() -> None:
        for number in (1, 2, 3):
            if number == 3:
                await offloaded.save(tmp_path)
                await again.restore(tmp_path)
                assert await update(again, batch, 3) == pytest.approx(await update(offloaded, batch, 3))
            metrics = await update(whole, batch, number)
            if number < 3:
                assert await update(offloaded, batch, number) == metrics and metrics["step_rms"] > 0

    run(work())
    for models in zip(*(each.lm.model.parameters() for each in (whole, offloaded, again)), strict=True):
        assert torch.equal(models[0], models[1]) and torch.equal(models[0], models[2])


def test_learning_rate_warms_up_and_decays() -> None:
    def plan(**config: Any) -> LearnerSettings:
        return LearnerSettings(settings=LearnerConfig(**config), method=Method(loss=ReverseKLMC()), updates=12)

    cosine = plan(lr=1.0, warmup=4, decay="cosine")
    rates = [learning_rate(cosine, 1 + step, 0) for step in range(12)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0 and rates[8] == pytest.approx(0.5) and 0 < rates[11] < 0.05
    assert learning_rate(cosine, 100, 0) == pytest.approx(0.0)
    assert learning_rate(plan(lr=0.5), 51, 0) == 0.5


@given(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(50, 400))
def test_micro_batches_hold_everything_once_within_both_bounds(lengths: list[int], budget: int) -> None:
    batches = list(micro_batches(lengths, budget))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = len(batch) * max(lengths[i] for i in batch)
        assert padded <= budget or len(batch) == 1
        assert padded <= MOST_PADDED * sum(lengths[i] for i in batch)


def test_a_teacher_whose_scores_are_not_numbers_is_named() -> None:
    teacher, groups = make_model(seed=1), roll_out(make_model(seed=0))
    scorer = native_scorer(wrap(teacher), name="main")
    with torch.no_grad():
        scorer.lm.head.weight[EOS] = torch.nan

    failed = run(scorer.score(groups[0]))
    assert {handle.header.finish for handle in failed} == {"error"}
    assert all(re.match(r"teacher main gives token \d+ at .* a log-prob of nan", h.header.cause) for h in failed)


def test_what_is_exported_in_another_precision_is_what_the_sampler_then_runs() -> None:
    """A float32 learner and a bfloat16 sampler agree on the fingerprint, update after update."""
    learner = native_learner(
        wrap(make_model(seed=0)),
        method=Method(loss=ReverseKLMC(m=3)),
        config=LearnerConfig(lr=1e-2),
        updates=2,
        export_dtype="bfloat16",
    )
    batch = make_batch()

    async def work() -> None:
        sampler = native_sampler(wrap(make_model(seed=0, dtype=torch.bfloat16)), slots=2, stop_ids={EOS})
        for version in range(3):
            weights, expected = await learner.export()
            assert (await sampler.publish(weights, "keep")).fingerprint == expected
            assert sampler.version == version
            await update(learner, batch, version + 1)
        sampler.close()

    run(work())


def test_a_model_whose_weights_are_missing_is_refused(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    kept = load_file(tmp_path / "model.safetensors")
    kept.pop("model.layers.1.mlp.down_proj.weight")
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing or have another shape, first .*\.1.mlp.down_proj"):
        load_model(str(tmp_path), dtype="float32", device="cpu")


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_a_teacher_that_caps_its_logits_is_whole_in_the_hidden_cache(kind: str) -> None:
    """Student and teacher scale and cap what their heads say: the exact divergence is that of their distributions."""

    def capped(seed: int) -> LanguageModel:
        torch.manual_seed(seed)
        config = Gemma2Config(**SHAPE, final_logit_softcapping=1.5, attn_logit_softcapping=2.0)
        return split("capped", AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())

    student, teacher = capped(0), capped(1)
    groups = roll_out(student.model)

    async def work() -> tuple[float, list[Scored]]:
        scorer = native_scorer(copy.deepcopy(teacher), cache="hidden")
        scored = [await scorer.score(group) for group in groups]
        loss = ReverseKL() if kind == "reverse" else ForwardKL(cache="hidden")
        learner = native_learner(
            copy.deepcopy(student),
            method=Method(loss=loss),
            config=LearnerConfig(),
            updates=1,
            teacher_heads={"teacher": TeacherHead(teacher.head)},
        )
        batch = Batch(tuple(scored), 1)
        await learner.accumulate(batch, total(await learner.prepare(batch)))
        return (await learner.step())["loss"], [handle.body for group in scored for handle in group]

    found, samples = run(work())
    kl = []
    with torch.no_grad():
        for sample in samples:
            ids = np.concatenate([sample.rollout.prompt.tokens, sample.rollout.tokens]).astype(np.int64)
            first = len(sample.rollout.prompt.tokens) - 1
            p, q = (
                lm.model(torch.from_numpy(ids)[None]).logits[0, first:-1].log_softmax(-1) for lm in (student, teacher)
            )
            one, other = (p, q) if kind == "reverse" else (q, p)
            kl.append((one.exp() * (one - other)).sum(-1))
    assert found == pytest.approx(float(torch.cat(kl).mean()), rel=1e-4)


def test_dropout_is_drawn_again_as_it_was_after_a_restore(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, attention_dropout=0.5)).eval()
    batch = score(make_model(seed=2), roll_out(model))

    def learner() -> NativeLearner:
        config = LearnerConfig(lr=1e-2, dropout=True)
        return native_learner(wrap(model), method=Method(loss=ReverseKLMC(m=3)), config=config, updates=2)

    async def update(one: NativeLearner, number: int) -> None:
        groups = Batch(tuple(batch), number)
        await one.accumulate(groups, total(await one.prepare(groups)))
        await one.step()

    async def work() -> tuple[NativeLearner, NativeLearner]:
        first, second = learner(), learner()
        await update(first, 1)
        await first.save(tmp_path)
        await second.restore(tmp_path)
        await update(first, 2)
        torch.rand(7)  # whatever else drew in between
        await update(second, 2)
        return first, second

    for ours, theirs in zip(*(one.lm.model.parameters() for one in run(work())), strict=True):
        assert torch.equal(ours, theirs)


def test_the_check_of_training_never_holds_the_gradients_of_all_weights() -> None:
    lm = wrap(make_model("llama"))
    use_rows(lm)
    held = list[int]()
    for weight in lm.model.parameters():
        weight.register_post_accumulate_grad_hook(
            lambda _: held.append(sum(each.grad is not None for each in lm.model.parameters()))
        )
    prepare_training(lm, dropout=False, checkpointing=False, packed=True)
    assert len(held) == len(list(lm.backbone.parameters())) and max(held) <= 1
    assert all(each.grad is None for each in lm.model.parameters())

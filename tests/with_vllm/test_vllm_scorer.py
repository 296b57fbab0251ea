"""vLLM as a teacher, on the real engine, against the native scorer."""

import asyncio
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from slipstream.config.file import parse
from slipstream.config.schedule import Sync
from slipstream.config.schema import Config
from slipstream.engines.native.config import load_config
from slipstream.engines.native.model import load_model
from slipstream.engines.native.scorer import NativeScorer
from slipstream.engines.vllm.core import Settings
from slipstream.engines.vllm.scorer import VllmScorer
from slipstream.errors import ConfigError, ModelError
from slipstream.plan.completion import completed
from slipstream.plan.facts import Facts
from slipstream.plan.rules.vllm import check_vllm_teachers
from slipstream.protocols import Sampling
from slipstream.records import Handle, Prompt, Rollout, header_of
from slipstream.run_dir.writing import read_lines
from slipstream.runs.start import train
from support.engines import native_sampler, native_scorer, vllm_scorer
from support.tiny_models import make_prompts, masked

K = 6
TEACHER = "builtin:teacher"


@pytest.fixture(scope="module")
def scorer() -> Iterator[VllmScorer]:
    settings = Settings(TEACHER, "float32", 8, where="teachers.main.engine_args")
    vocabulary = load_config(TEACHER).vocab_size
    scorer = vllm_scorer(settings, k=K, vocabulary=vocabulary)
    try:
        yield scorer
    finally:
        scorer.close()


@pytest.fixture(scope="module")
def groups() -> list[list[Handle]]:
    async def work() -> list[list[Handle]]:
        sampler = native_sampler(load_model("builtin:student", dtype="float32", device="cpu"), slots=24, stop_ids={1})
        try:
            calls = [sampler.generate(prompt, Sampling(max_tokens=60, group=2)) for prompt in make_prompts(12)]
            groups = list(await asyncio.gather(*calls))
            for group in groups[:4]:  # some tokens were observed: nothing is said of them
                seen = [masked(h.body, np.arange(len(h.body.tokens)) % 3 != 1) for h in group]
                group[:] = [Handle(header_of(rollout), rollout) for rollout in seen]
            return groups
        finally:
            sampler.close()

    return asyncio.run(work())


async def scored_by(scorer: VllmScorer | NativeScorer, groups: list[list[Handle]]) -> list[Handle]:
    return [handle for group in await asyncio.gather(*map(scorer.score, groups)) for handle in group]


@pytest.mark.parametrize("k", [K, 0])
def test_it_scores_as_the_native_scorer_does(scorer: VllmScorer, groups: list[list[Handle]], k: int) -> None:
    native = native_scorer(
        load_model(TEACHER, dtype="float32", device="cpu"),
        name="main",
        cache="teacher_topk" if k else "sampled",
        k=K,
    )
    scorer.k = k
    expected, found = (asyncio.run(scored_by(each, groups)) for each in (native, scorer))
    native.close()
    for ours, theirs in zip(found, expected, strict=True):
        assert replace(ours.header, gap=0.0) == replace(theirs.header, gap=0.0)
        assert ours.header.gap == pytest.approx(theirs.header.gap, abs=1e-3)
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours.body.teacher_logp) == ours.body.rollout.trained_tokens
        np.testing.assert_allclose(ours.body.teacher_logp, theirs.body.teacher_logp, rtol=0, atol=1e-4)
        if k:
            np.testing.assert_allclose(ours.body.teacher_topk_logp, theirs.body.teacher_topk_logp, rtol=0, atol=1e-4)
            assert (ours.body.teacher_ids == theirs.body.teacher_ids).mean() > 0.99, "but for ties"


def test_what_does_not_fit_is_told(scorer: VllmScorer, groups: list[list[Handle]]) -> None:
    ((handle, *_), *_) = groups
    rollout: Rollout = handle.body
    long = Prompt(id="long", number=0, tokens=np.full(scorer.core.context - len(rollout.tokens), 3, np.int32))
    with pytest.raises(ModelError, match="teacher main: prompt long .* vLLM scores at most"):
        asyncio.run(scorer.score([Handle(handle.header, replace(rollout, prompt=long))]))


def config_of(engine: str = "vllm", **loss: object) -> Config:
    return parse(
        {
            "student": "builtin:student",
            "updates": 2,
            "teachers": {"main": {"model": TEACHER, "engine": engine}},
            "sampler": {"max_tokens": 40},
            "learner": {"batch_size": 16},
            "loss": loss,
            "runtime": {"kind": "inline"},
        }
    )


def test_what_it_does_not_give_is_refused_unless_the_engine_is_auto() -> None:
    said: list[str] = []
    kept = completed(c := config_of(kind="forward_kl", cache="teacher_topk", k=4), Facts(c), said.append)
    assert kept.teachers["main"].engine == "vllm" and not said
    for loss, why in [
        ({"kind": "reverse_kl_mc", "m": 4}, "several draws"),
        ({"kind": "reverse_kl"}, "hidden states"),
        ({"kind": "forward_kl", "cache": "teacher_topk", "temperature": 0.5}, "temperature 1"),
    ]:
        config = config_of(**loss)
        with pytest.raises(ConfigError, match=f'teachers.main.engine = "vllm": .*{why}.*: write engine = "native"'):
            check_vllm_teachers(config, Facts(config))
        auto = config_of("auto", **loss)
        assert completed(auto, Facts(auto), said.append).teachers["main"].engine == "native"
        assert why in said.pop() and not said


def test_a_run_with_a_teacher_in_vllm(tmp_path: Path) -> None:
    config = config_of(kind="forward_kl", cache="teacher_topk", k=4)
    config = config.model_copy(update={"output": str(tmp_path / "run")})
    path = train(config, Console(file=io.StringIO()), name="vllm")
    assert [line["update"] for line in read_lines(path / "metrics.jsonl") if line["kind"] == "train"] == [1, 2]


@pytest.mark.parametrize(
    "loss",
    [{"kind": "k1", "use": "advantage"}, {"kind": "common_topk", "cache": "teacher_topk", "k": 8}],
    ids=lambda loss: loss["kind"],
)
def test_a_teacher_with_another_tokenizer_scores_as_the_native_engine_does(
    loss: dict[str, Any], tmp_path: Path
) -> None:
    """The first update has the same responses with both engines, so that its scores are comparable."""
    first = dict[str, dict[str, float]]()
    for engine in ("native", "vllm"):
        config = config_of(**loss)
        teacher = config.teachers["main"].model_copy(
            update={"model": "builtin:pair_teacher", "spelling": "own", "engine": engine}
        )
        run = {"teachers": {"main": teacher}, "output": str(tmp_path / engine), "schedule": Sync(kind="sync")}
        path = train(config.model_copy(update=run), Console(file=io.StringIO()), name=engine)
        first[engine] = next(line for line in read_lines(path / "metrics.jsonl") if line["kind"] == "train")
    native, vllm = first["native"], first["vllm"]
    for name in ("tokens", "spelling/open", "spelling/span_tokens"):
        assert native[name] == vllm[name], name
    for name in ("loss", "teacher/kl", "grad_norm"):
        assert vllm[name] == pytest.approx(native[name], rel=1e-3), name


def test_arguments_of_a_teacher_do_not_come_to_nothing() -> None:
    config = config_of(kind="reverse_kl")
    teacher = config.teachers["main"].model_copy(update={"engine_args": {"block_size": 64}})
    with pytest.raises(ConfigError, match='vLLM gives no hidden states: write engine = "native" without engine_args'):
        check_vllm_teachers(config.model_copy(update={"teachers": {"main": teacher}}), Facts(config))

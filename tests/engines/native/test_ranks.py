"""One to four learner ranks: the same weights, the same files, and no rank left waiting for another."""

import asyncio
import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast

from slipstream.config.freshness import FreshnessConfig
from slipstream.config.learner import LearnerConfig, LoraConfig
from slipstream.config.losses import ReverseKL, ReverseKLMC
from slipstream.config.objective import CriticConfig, PolicyConfig, ReferenceConfig
from slipstream.config.sampler import SamplerConfig
from slipstream.config.schedule import Sync
from slipstream.config.schema import Config
from slipstream.config.teacher import TeacherConfig
from slipstream.data.prompts import Prompts, Row
from slipstream.engines import weights as bytes_of_weights
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.engines.native.model import with_adapters
from slipstream.engines.native.ranks import LOOPBACK, Meeting, Ranks, join, open_store
from slipstream.engines.native.rows import Rows
from slipstream.engines.weights import fingerprint, load_weights
from slipstream.errors import ModelError, NonFiniteError, RunDirError, WorkerDied
from slipstream.estimators.tables.correction import PRESETS
from slipstream.objective.method import Method, method_of
from slipstream.pipeline.learning import optimizer_steps
from slipstream.pipeline.run import Run
from slipstream.plan.engines import engines_of
from slipstream.protocols import Fingerprint, Follower, Learner, Metrics, SampleFreshness, Sampling, WeightsRef
from slipstream.records import ONE_COUNT, Batch, Counts, Group, Handle, header_of, total
from slipstream.run_dir.writing import RunLog, read_lines
from slipstream.runtimes.ranked import RankedLearner, group_cost, number_of, shared_out
from slipstream.runtimes.workers import cpu_seconds
from support.engines import native_learner, native_sampler, native_scorer
from support.runtime_cases import RUNTIMES
from support.tiny_experts import MIXTURES, any_experts, make_mixture
from support.tiny_models import EOS, make_model, make_prompts, wrap

pytestmark = pytest.mark.processes
M = 3
OPD = Method(loss=ReverseKLMC(m=M))
BY_ROW = Method(
    loss=ReverseKLMC(weight=0.0),
    policy=PolicyConfig(loss="gspo", aggregation="seq-mean-token-mean"),
    correction=PRESETS["decoupled_geo_rs"],
    rewards={"right": 1.0},
)
OPOB = replace(BY_ROW, policy=PolicyConfig(advantage="opob"), correction=PRESETS["decoupled_seq_is"])
STEERED = Method(
    loss=ReverseKLMC(m=M),
    reference=ReferenceConfig(weight=0.3, control="adaptive", target=1e-3, horizon=40),
)
CHARGED = replace(
    BY_ROW,
    policy=PolicyConfig(advantage="optimal_token_baseline"),
    correction=PRESETS["decoupled_token_is"],
    reference=ReferenceConfig(weight=0.3, into="reward", control="adaptive", target=1e-3, horizon=40),
)
VARIED = replace(
    BY_ROW,
    policy=PolicyConfig(loss="r2vpo", options={"variance_coef": 0.5}, variance_target=1e-4, variance_step=400.0),
    correction=PRESETS["disabled"],
)
FRESH = Method(loss=ReverseKLMC(m=M), freshness=FreshnessConfig(anchor=1.0, normalise_by="samples"))
REPLAYED = Method(loss=ReverseKLMC(m=M), freshness=FreshnessConfig(anchor=1.0, drift="snapshots"))
ROUTED = {"router": "replay_rollout", "router_aux": 0.5, "checkpointing": True}
CRITIC = Method(
    loss=ReverseKLMC(weight=0.0),
    policy=PolicyConfig(advantage="gae"),
    critic=CriticConfig(weight=1.0),
    rewards={"right": 1.0},
)
OWN_CRITIC = replace(CRITIC, critic=CriticConfig(model="phi", lr=0.05, backbone_lr=0.01))
BY_BATCH = Method(loss=ReverseKLMC(m=M), policy=PolicyConfig(loss="m2po"), rewards={"right": 1.0})


class WrongThere(Ranks):
    """Ranks with a device on which a sequence sees the others of its row."""

    def shard(self, root: nn.Module, layers: list[nn.Module]) -> None:
        super().shard(root, layers)
        PATCH.setattr(Rows, "sees", lambda rows, reach: lambda row, head, query, key: (row >= 0) & (key <= query))


PATCH = pytest.MonkeyPatch()


class Watched(NativeLearner):
    async def gradients(self) -> list[torch.Tensor]:
        """Whole gradients of this update so far."""
        found = [parameter.grad for parameter in self.lm.model.parameters() if parameter.grad is not None]
        return [each.full_tensor() if isinstance(each, DTensor) else each.clone() for each in found]


@dataclass(frozen=True)
class Spec:
    """Parts of a learner, in whichever process it is made."""

    model: str = "phi"
    method: Method = OPD
    options: dict[str, Any] = field(default_factory=dict)
    follow: dict[str, Follower] = field(default_factory=dict)
    cosine_every: int = 0
    cosine_limit: float | None = None
    device: type[Ranks] = Ranks

    def make(self, ranks: Ranks | None = None) -> Watched:
        if ranks is not None:
            ranks = self.device(ranks.index, ranks.size, ranks.mesh)
        config = LearnerConfig(**({"lr": 1e-3, "dtype": "float64", "token_budget": 120} | self.options))
        make = make_mixture if self.model in MIXTURES else make_model
        lm = wrap(make(self.model, dtype=getattr(torch, config.dtype)))
        if config.lora is not None:
            lm = with_adapters(lm, config.lora, seed=0)
        own = self.method.critic is not None and self.method.critic.model
        critic = wrap(make_model(own, dtype=getattr(torch, config.dtype), seed=1)) if own else None
        given: Any = {"snapshots": 2, "follow": self.follow, "ranks": ranks, "critic": critic}
        given |= {"cosine_every": self.cosine_every, "cosine_limit": self.cosine_limit}
        return native_learner(lm, method=self.method, config=config, updates=20, kind=Watched, **given)


# --- ranks in processes of their own ----------------------------------------------------------------------------------


def serve(pipe: Connection, meeting: Meeting, index: int, size: int) -> None:
    gc.freeze()  # what was imported stays: no collection need look through it again
    torch.set_num_threads(1)
    bytes_of_weights.BUCKET = 4000  # so that buckets hold several tensors, and parts of tensors
    ranks = join(meeting, index, size, device=torch.device("cpu"), patience=30)
    learner = None
    while True:
        method, args, options = pipe.recv()
        try:
            if method == "make":
                PATCH.undo()
                learner = args[0].make(ranks)
                pipe.send((None, None))
            else:
                pipe.send((asyncio.run(getattr(learner, method)(*args, **options)), None))
        except Exception as error:
            pipe.send((None, error))


class Rank:
    """A learner at the other end of a pipe."""

    def __init__(self, meeting: Meeting, index: int, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, meeting, index, size), daemon=True)
        self.process.start()
        theirs.close()

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, lambda: self.exchange(method, *args, **options))

    def exchange(self, method: str, *args: Any, **options: Any) -> Any:
        try:
            self.pipe.send((method, args, options))
            value, error = self.pipe.recv()
        except (EOFError, OSError):
            raise WorkerDied(f"process {self.process.pid} is gone") from None
        if error is not None:
            raise error
        return value

    async def prepare(self, batch: Batch) -> list[Counts]:
        counts: list[Counts] = await self.call("prepare", batch)
        return counts

    async def accumulate(self, batch: Batch, counts: Counts) -> list[SampleFreshness]:
        weighed: list[SampleFreshness] = await self.call("accumulate", batch, counts)
        return weighed

    async def step(self, counts: Counts = ONE_COUNT, lr: float = 1.0) -> Metrics:
        metrics: Metrics = await self.call("step", counts, lr)
        return metrics

    async def export(self, teacher: str = "") -> tuple[WeightsRef, Fingerprint]:
        weights, print_ = await self.call("export", teacher)
        return weights, print_

    async def save(self, path: Path, groups: Sequence[Group] = (), *, optimizer: bool = True) -> None:
        await self.call("save", path, groups, optimizer=optimizer)

    async def restore(self, path: Path) -> Sequence[Group]:
        groups: Sequence[Group] = await self.call("restore", path)
        return groups


def open_ranks(size: int, stack: ExitStack) -> list[Rank]:
    store, meeting = open_store(LOOPBACK)
    ranks = [Rank(meeting, index, size) for index in range(size)]
    for rank in ranks:
        stack.callback(rank.process.kill)
    stack.callback(lambda: store)  # it lives as long as they do
    return ranks


def make_together(ranks: Sequence[Rank], spec: Spec) -> None:
    with ThreadPoolExecutor(len(ranks)) as threads:
        errors = [each.exception() for each in [threads.submit(rank.exchange, "make", spec) for rank in ranks]]
    assert len({str(error) for error in errors}) == 1
    if errors[0] is not None:
        raise errors[0]


@pytest.fixture(scope="module")
def make() -> Iterator[Callable[[Spec, int], Learner]]:
    """Makes a learner of so many ranks; one is of this process. Processes are made once, and learners in them anew."""
    with pytest.MonkeyPatch.context() as patch:  # torch is imported once for all of them
        here = Path(__file__)
        patch.setenv("PYTHONPATH", f"{here.parent}{os.pathsep}{here.parents[2]}", prepend=os.pathsep)
        multiprocessing.get_context("forkserver").set_forkserver_preload(["test_ranks"])
        forkserver.ensure_running()
    with ExitStack() as stack:
        opened = cache(lambda size: open_ranks(size, stack))

        def make(spec: Spec, size: int) -> Learner:
            if size == 1:
                return spec.make()
            make_together(opened(size), spec)
            return RankedLearner(opened(size), hidden=32, minibatches=spec.options.get("minibatches", 1))

        yield make


def test_rows_are_checked_on_the_device_that_trains(make: Any) -> None:
    make(Spec(), 2)
    expected = (
        "tiny: packed rows on cpu, over ranks: a sequence among others differs by .*: write learner.packing = false"
    )
    with pytest.raises(ModelError, match=expected):
        make(Spec(device=WrongThere), 2)
    make(Spec(), 2)


# --- what they learn from ---------------------------------------------------------------------------------------------


@cache
def pool() -> list[list[Handle]]:
    """Scored groups of two, of many lengths."""

    async def work() -> list[list[Handle]]:
        student, teacher = (wrap(make_model("phi", seed=seed, dtype=torch.float64)) for seed in (0, 1))
        sampler, scorer = native_sampler(student, slots=16, stop_ids={EOS}), native_scorer(teacher)
        sampling = Sampling(max_tokens=20, group=2, draws=M)
        groups = await asyncio.gather(*[sampler.generate(prompt, sampling) for prompt in make_prompts(20)])
        scored = await asyncio.gather(*[scorer.score(group) for group in groups])
        sampler.close()
        scorer.close()
        return scored

    return asyncio.run(work())


def renewed(handle: Handle, rng: np.random.Generator, update: int) -> Handle:
    """With a reward, a gap between policies, and versions that change in the middle."""
    rollout, tokens = handle.body.rollout, len(handle.body.rollout.tokens)
    versions = np.sort(rng.integers(max(0, update - 4), update, tokens))
    logp = rollout.logp + rng.normal(0, 0.02, tokens)
    action_logp = rollout.action_logp.copy()
    action_logp[:, 0] = logp
    rewards = {"right": float(rng.integers(2))}
    rollout = replace(rollout, versions=versions, logp=logp, action_logp=action_logp, rewards=rewards)
    return Handle(header_of(rollout, teacher="main"), replace(handle.body, rollout=rollout))


def batches(count: int, first: int = 1) -> list[Batch]:
    """Some close short: fewer groups than there are ranks."""
    found = []
    for update in range(first, first + count):
        rng = np.random.default_rng(update)
        chosen = rng.choice(len(pool()), [6, 5, 1, 6, 2][update % 5], replace=False)
        found.append(Batch(tuple([renewed(h, rng, update) for h in pool()[i]] for i in chosen), update))
    return found


def routed(work: Sequence[Batch]) -> list[Batch]:
    """The same with records of the two routers of a tiny mixture."""

    def with_record(handle: Handle) -> Handle:
        return Handle(handle.header, replace(handle.body, rollout=any_experts(handle.body.rollout, 2)))

    return [replace(batch, groups=tuple([with_record(h) for h in group] for group in batch.groups)) for batch in work]


async def learn(learner: Learner, batch: Batch, minibatches: int = 1) -> list[Metrics]:
    counts = await learner.prepare(batch)
    steps = []
    for part, of_part in optimizer_steps(batch, counts, minibatches, 1):
        await learner.accumulate(part, of_part)
        steps.append(await learner.step())
    return steps


async def learn_in_parts(learner: Learner, batch: Batch) -> list[Metrics]:
    counts = []
    for part in batch.parts(2):
        counts += await learner.prepare(part)
        await learner.accumulate(part, ONE_COUNT)
    return [await learner.step(total(counts))]


def trained(
    learner: Learner, work: Sequence[Batch], *, parts: bool = False, minibatches: int = 1
) -> tuple[np.ndarray[Any, Any], Fingerprint, list[Metrics]]:
    """Weights and metrics after these updates."""

    async def main() -> tuple[np.ndarray[Any, Any], Fingerprint, list[Metrics]]:
        metrics = []
        weights, print_ = await learner.export()
        for batch in work:
            metrics += await (learn_in_parts(learner, batch) if parts else learn(learner, batch, minibatches))
            weights, print_ = await learner.export()
        return weights.body.view(weights.manifest[0].dtype).copy(), print_, metrics

    return asyncio.run(main())


# --- laws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec, updates, parts, sizes",
    [
        (Spec(), 3, False, (2, 3, 4)),
        (Spec(options={"packing": False}), 3, True, (3,)),
        (Spec(method=BY_ROW), 4, False, (3,)),
        (Spec(method=BY_ROW, options={"checkpointing": True, "offload": ("optimizer", "activations")}), 4, True, (3,)),
        (Spec(method=BY_BATCH, options={"minibatches": 2}), 3, False, (2, 3)),
        (Spec(options={"lora": LoraConfig(rank=2), "optimizer_dtype": "float32"}), 3, False, (3,)),
        (Spec(method=STEERED), 3, True, (3,)),
        (Spec(method=OPOB), 3, False, (3,)),
        (Spec(method=FRESH, options={"minibatches": 2}), 3, False, (3,)),
        (Spec(method=REPLAYED), 3, True, (3,)),
        (Spec(method=CRITIC, options={"minibatches": 2}), 3, False, (2, 3)),
        (Spec(model="qwen3", method=OWN_CRITIC, options={"minibatches": 2}), 3, True, (2, 3)),
        (Spec(cosine_every=1), 3, False, (3,)),
        (Spec(model="mixtral", options=ROUTED), 3, False, (3,)),
    ],
    ids=[
        *(
            "opd",
            "opd in parts, padded",
            "by row",
            "by row in parts, offloaded",
            "by batch, twice",
            "lora",
            "steered",
            "energy",
        ),
        *(
            "by freshness, twice",
            "by freshness, replayed, in parts",
            "by values, twice",
            "by values of a model, twice, in parts",
        ),
        *("ages", "experts"),
    ],
)
def test_any_number_of_ranks_learns_the_same(
    make: Any, spec: Spec, updates: int, parts: bool, sizes: Sequence[int]
) -> None:
    """Thirty-two rows of a weight are no multiple of three, and the second of the batches is a single group."""
    minibatches = spec.options.get("minibatches", 1)
    tolerance = 1e-6 if "optimizer_dtype" in spec.options else 1e-5 if spec.model in MIXTURES else 1e-8
    work = routed(batches(updates)) if spec.model in MIXTURES else batches(updates)
    expected, _, metrics = trained(make(spec, 1), work, parts=parts, minibatches=minibatches)
    before, _, _ = trained(make(spec, 1), [])
    assert np.abs(expected - before).max() > 1e-3, "the weights moved"
    for size in sizes:
        found, _, its_metrics = trained(make(spec, size), work, parts=parts, minibatches=minibatches)
        np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0)
        for ours, theirs in zip(metrics, its_metrics, strict=True):
            assert 0.5 < theirs.pop("rows/filled") <= 1, "how rows are filled depends on who has what"
            known = {name: value for name, value in ours.items() if name != "rows/filled"}
            assert theirs == pytest.approx(known, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("model", ["phi", "qwen3"])
def test_any_number_of_ranks_has_the_same_gradients(make: Any, model: str) -> None:
    spec, (batch,) = Spec(model=model, options={"dtype": "float32"}), batches(1)

    async def gradients(size: int) -> list[torch.Tensor]:
        learner = make(spec, size)
        await learner.accumulate(batch, total(await learner.prepare(batch)))
        if size == 1:
            return list(await learner.gradients())
        first, *others = await asyncio.gather(*[rank.call("gradients") for rank in learner.ranks])
        assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))
        return list(first)

    expected = asyncio.run(gradients(1))
    largest = max(gradient.abs().max().item() for gradient in expected)
    assert largest > 0.01
    for size in (2, 4):
        for ours, theirs in zip(asyncio.run(gradients(size)), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6 * largest, rtol=1e-6)


@pytest.mark.parametrize("half, mean", [("bfloat16", 1e-5), ("float16", 2e-6)])
def test_tied_weights_in_single_precision_under_autocast(make: Any, half: str, mean: float) -> None:
    spec = Spec(model="qwen3", options={"dtype": "float32", "compute_dtype": half, "lr": 1e-4})
    expected, _, metrics = trained(make(spec, 1), batches(3))
    for size in (2, 3):
        found, _, its_metrics = trained(make(spec, size), batches(3))
        assert np.abs(found - expected).mean() < mean and np.abs(found - expected).max() < 7e-4
        for name in ("loss_scale", "steps_skipped"):
            assert [each.get(name) for each in its_metrics] == [each.get(name) for each in metrics]
    assert ("loss_scale" in metrics[0]) == (half == "float16")


def test_every_rank_gets_the_same_metrics_and_the_sampler_the_same_weights(make: Any) -> None:
    learner, (batch,) = make(Spec(model="qwen3"), 2), batches(1)

    async def main() -> None:
        sampler = native_sampler(wrap(make_model("qwen3", dtype=torch.float64)), slots=2, stop_ids={EOS})
        for at in (batch, replace(batch, update=2)):
            await learner.accumulate(at, total(await learner.prepare(at)))
            one, other = await asyncio.gather(*[rank.step() for rank in learner.ranks])
            assert one == other and one["loss"] != 0
            weights, expected = await learner.export()
            assert (await sampler.publish(weights, "keep")).fingerprint == expected
            assert weights.version == sampler.version == at.update
        here = make_model("qwen3", seed=1, dtype=torch.float64)
        with torch.no_grad():
            load_weights(here, weights)
        assert fingerprint(here, "float64") == expected
        sampler.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "spec",
    [
        Spec(),
        Spec(model="qwen3", options={"optimizer_dtype": "float32", "offload": ("optimizer",)}),
        Spec(model="qwen3", options={"lora": LoraConfig(rank=2)}),
        Spec(method=CRITIC),
        Spec(model="qwen3", method=OWN_CRITIC, options={"offload": ("optimizer",)}),
    ],
    ids=["plain", "tied, mixed, offloaded", "lora", "with values", "with values of a model"],
)
def test_what_some_ranks_saved_others_go_on_from(make: Any, tmp_path: Path, spec: Spec) -> None:
    work, more = batches(2), batches(1, first=3)
    first = make(spec, 2)
    trained(first, work)
    asyncio.run(first.save(tmp_path))
    expected, _, _ = trained(first, more)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    for ranks in (1, 3):
        learner = make(spec, ranks)
        asyncio.run(learner.restore(tmp_path))
        found, _, _ = trained(learner, more)
        np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)
        asyncio.run(learner.save(tmp_path / str(ranks)))
        assert sum(path.stat().st_size for path in (tmp_path / str(ranks)).glob("*.safetensors")) == size


FOLLOW = {"slow": Follower(0.9, 2, "float64", keep=1), "copy": Follower(0.0, 3, "float64")}


@pytest.mark.parametrize("options", [{}, {"lora": LoraConfig(rank=2)}], ids=["plain", "lora"])
def test_teachers_that_follow_are_spread_over_the_ranks_saved_and_gone_on_with(
    make: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    def moved(learner: Learner, work: Sequence[Batch]) -> list[tuple[int, Fingerprint, np.ndarray[Any, Any]]]:
        found = []

        async def main() -> None:
            for batch in work:
                await learn(learner, batch)
                for name in FOLLOW:
                    weights, expected = await learner.export(name)
                    found.append((weights.version, expected, weights.body.view("float64").copy()))

        asyncio.run(main())
        return found

    spec, work = Spec(options=options, follow=FOLLOW), batches(5)
    alone = moved(make(spec, 1), work)
    assert [version for version, *_ in alone] == [0, 0, 2, 0, 2, 3, 4, 3, 4, 3]
    for size in (1, 2):
        learner = make(spec, size)
        before = moved(learner, work[:3])
        asyncio.run(learner.save(tmp_path / str(size), work[0].groups))  # scored by version 0 of the teacher
        whole = before + moved(learner, work[3:])
        for (version, _, body), (expected, _, theirs) in zip(whole, alone, strict=True):
            assert version == expected
            np.testing.assert_allclose(body, theirs, atol=1e-8, rtol=0)
        again = make(spec, size)
        asyncio.run(again.restore(tmp_path / str(size)))
        weights, expected = asyncio.run(again.export("slow"))
        assert (weights.version, expected) == alone[0][:2], "the earlier version, which scored what is in flight"
        assert asyncio.run(again.export("slow"))[0].version == 2
        assert [each[:2] for each in moved(again, work[3:])] == [each[:2] for each in whole[6:]], "to the bit"


def test_ranks_gather_the_heads_of_all_versions_of_a_teacher_that_follows(make: Any) -> None:
    """Hidden states of the two newest versions are on different ranks, and the head is split over the ranks."""
    spec = Spec(method=Method(loss=ReverseKL()), follow={"me": Follower(0.5, 1, "float64", keep=1)})

    def with_hidden(handle: Handle, version: int) -> Handle:
        tokens, rng = handle.body.rollout.trained_tokens, np.random.default_rng(handle.header.number)
        scores = {"teacher_hidden": rng.normal(size=(tokens, 32)), "teacher_action_logp": None}
        return Handle(handle.header, replace(handle.body, teacher="me", teacher_version=version, **scores))

    def ends(learner: Learner) -> np.ndarray[Any, Any]:
        async def main() -> WeightsRef:
            for batch in batches(3):
                versions = [max(0, batch.update - 1 - i % 2) for i in range(len(batch.groups))]
                groups = tuple(
                    [with_hidden(handle, version) for handle in group]
                    for group, version in zip(batch.groups, versions, strict=True)
                )
                await learn(learner, replace(batch, groups=groups))
                await learner.export("me")
            return (await learner.export())[0]

        return asyncio.run(main()).body.view("float64").copy()

    alone = ends(make(spec, 1))
    np.testing.assert_allclose(ends(make(spec, 2)), alone, atol=1e-8, rtol=0)


NEAR = Method(loss=ReverseKLMC(m=M), reference=ReferenceConfig(weight=0.3))
AGAINST_BEFORE = Method(
    loss=ReverseKLMC(weight=0.0),
    policy=PolicyConfig(loss="dro", old="previous", options={"dro_beta": 5.0}),
    rewards={"right": 1.0},
)
AVERAGED = replace(
    AGAINST_BEFORE,
    policy=PolicyConfig(old="average", old_decay=0.6),
    correction=PRESETS["decoupled_token_is"],
)
DECOUPLED = replace(AGAINST_BEFORE, policy=PolicyConfig(), correction=PRESETS["decoupled_token_is"])


def rolled_again(batch: Batch, *, since: int) -> Batch:
    """Return the batch of a run that continues from this version: responses in flight are drawn anew."""

    def again(handle: Handle) -> Handle:
        rollout = replace(handle.body.rollout, versions=np.maximum(handle.body.rollout.versions, since))
        return Handle(header_of(rollout, teacher="main"), replace(handle.body, rollout=rollout))

    return replace(batch, groups=tuple([again(handle) for handle in group] for group in batch.groups))


STOPPED = {
    "opd": Spec(),
    "reference": Spec(method=NEAR),
    "previous": Spec(method=AGAINST_BEFORE),
    "previous, lora": Spec(method=AGAINST_BEFORE, options={"lora": LoraConfig(rank=2)}),
    "previous, two steps": Spec(method=AGAINST_BEFORE, options={"minibatches": 2}),
    "average, two steps": Spec(method=AVERAGED, options={"minibatches": 2}),
    "projected": Spec(cosine_limit=0.0),
    "decoupled": Spec(method=DECOUPLED, options={"exact_drift": True}),
    "steered, two steps": Spec(method=STEERED, options={"minibatches": 2}),
    "steered in the reward": Spec(method=CHARGED),
}
TOGETHER = [name for name in STOPPED if name not in ("opd", "reference", "previous")]
"""Methods that run on two ranks; the others are parts of these."""


@pytest.mark.parametrize("name, size", [*((name, 1) for name in STOPPED), *((name, 2) for name in TOGETHER)])
def test_who_was_stopped_and_goes_on_learns_the_same_to_the_bit(
    make: Any, tmp_path: Path, name: str, size: int
) -> None:
    """Groups in flight come back from the checkpoint, with the weights that drew them."""
    spec = STOPPED[name]
    minibatches = spec.options.get("minibatches", 1)
    work, more = batches(2), batches(2, first=3)
    expected, _, metrics = trained(make(spec, size), [*work, *more], minibatches=minibatches)
    stopped = make(spec, size)
    trained(stopped, work, minibatches=minibatches)
    asyncio.run(stopped.save(tmp_path, [group for batch in more for group in batch.groups]))
    learner = make(spec, size)
    groups = iter(asyncio.run(learner.restore(tmp_path)))
    again = [Batch(tuple(islice(groups, len(batch.groups))), batch.update) for batch in more]
    assert [batch.headers for batch in again] == [batch.headers for batch in more]
    found, _, its_metrics = trained(learner, again, minibatches=minibatches)
    assert np.array_equal(found, expected)
    assert its_metrics == metrics[-len(its_metrics) :]


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["whole", "lora"])
def test_the_weights_before_the_last_update_go_to_any_number_of_ranks(
    make: Any, tmp_path: Path, lora: LoraConfig | None
) -> None:
    spec = Spec(model="qwen3", method=AGAINST_BEFORE, options={"lora": lora})
    first = make(spec, 2)
    trained(first, batches(2))
    asyncio.run(first.save(tmp_path))
    expected, _, _ = trained(first, batches(1, first=3))
    for size in (1, 3):
        learner = make(spec, size)
        asyncio.run(learner.restore(tmp_path))
        found, _, _ = trained(learner, batches(1, first=3))
        np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)


def test_a_steered_run_that_is_stopped_in_an_update_begins_it_as_it_did(make: Any, tmp_path: Path) -> None:
    """Prepared, and no step made: its KL is not yet one that anything follows from."""
    for name, method in (("steered", STEERED), ("charged", CHARGED), ("varied", VARIED)):
        work, more = batches(3), [rolled_again(batch, since=3) for batch in batches(2, first=4)]
        expected, _, _ = trained(make(Spec(method=method), 1), [*work, *more])
        stopped, learner = make(Spec(method=method), 1), make(Spec(method=method), 1)
        trained(stopped, work)
        asyncio.run(stopped.prepare(more[0]))
        (tmp_path / name).mkdir()
        asyncio.run(stopped.save(tmp_path / name))
        asyncio.run(learner.restore(tmp_path / name))
        found, _, _ = trained(learner, more)
        assert np.array_equal(found, expected)


def test_a_checkpoint_without_what_the_kl_counts_cannot_be_steered_on(make: Any, tmp_path: Path) -> None:
    first = make(Spec(method=NEAR), 1)
    trained(first, batches(1))
    asyncio.run(first.save(tmp_path))
    with pytest.raises(RunDirError, match="does not hold the coefficient that reference.control changes: write the"):
        asyncio.run(make(Spec(method=STEERED), 1).restore(tmp_path))


def test_beta_follows_the_kl_update_by_update(make: Any) -> None:
    """β·(1 + clip(KL/target − 1, ±0.2)·samples/horizon), of the update before, whatever its number of steps."""
    for method in (STEERED, CHARGED):
        _, _, metrics = trained(make(Spec(method=method), 1), batches(5), minibatches=2)
        work, steps, beta, seen = batches(5), iter(metrics), 0.3, []
        for batch in work:
            here = [next(steps) for _ in range(min(2, len(batch.groups)))]
            assert [step["reference/beta"] for step in here] == pytest.approx([beta] * len(here), rel=1e-12)
            seen.append(beta)
            kl = sum(step["reference/kl"] for step in here) / len(here)
            beta *= 1 + min(max(kl / 1e-3 - 1, -0.2), 0.2) * len(batch.handles) / 40
        assert len(set(seen)) == 5


def test_the_coefficient_of_the_variance_follows_it_update_by_update(make: Any) -> None:
    """max(0, λ + 400·(min(variance, 2e-4) − 1e-4)), of the update before."""
    _, _, metrics = trained(make(Spec(method=VARIED), 1), batches(5), minibatches=2)
    work, steps, coefficient, seen = batches(5), iter(metrics), 0.5, []
    for batch in work:
        here = [next(steps) for _ in range(min(2, len(batch.groups)))]
        assert [step["policy/variance_coef"] for step in here] == pytest.approx([coefficient] * len(here), rel=1e-12)
        seen.append(coefficient)
        variance = sum(step["policy/ratio_variance"] for step in here) / len(here)
        coefficient = max(0.0, coefficient + 400 * (min(variance, 2e-4) - 1e-4))
    assert len(set(seen)) == 5


def test_a_checkpoint_without_the_weights_before_cannot_be_compared_with_them(make: Any, tmp_path: Path) -> None:
    first = make(Spec(), 1)
    trained(first, batches(1))
    asyncio.run(first.save(tmp_path))
    with pytest.raises(RunDirError, match='does not hold the weights that policy.old = "previous" compares with'):
        asyncio.run(make(Spec(method=AGAINST_BEFORE), 1).restore(tmp_path))


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_a_number_is_an_error_of_all_ranks_and_they_go_on(make: Any) -> None:
    learner, (batch,) = make(Spec(), 2), batches(1)
    bad = [list(group) for group in batch.groups]
    scores = bad[2][0].body.teacher_action_logp + np.nan
    bad[2][0] = replace(bad[2][0], body=replace(bad[2][0].body, teacher_action_logp=scores, teacher_logp=scores[:, 0]))

    async def main() -> None:
        _, before = await learner.export()
        poisoned = replace(batch, groups=tuple(bad))
        counts = total(await learner.prepare(poisoned))
        parts = learner._split(poisoned)
        errors = await asyncio.gather(
            *[rank.accumulate(part, counts) for rank, part in zip(learner.ranks, parts, strict=True)],
            return_exceptions=True,
        )
        assert [str(error) for error in errors] == ["the loss of update 1 is nan"] * 2
        with pytest.raises(NonFiniteError, match="the loss of update 1 is nan"):
            await learner.accumulate(poisoned, counts)
        assert (await learner.export())[1] == before
        (metrics,) = await learn(learner, replace(batch, update=2))
        assert np.isfinite(metrics["loss"]) and (await learner.export())[1] != before

    asyncio.run(main())


def test_a_rank_that_is_killed_is_an_error_at_once_and_stays_one() -> None:
    (batch,) = batches(1)

    async def main(learner: RankedLearner, victim: Rank) -> None:
        counts = total(await learner.prepare(batch))
        os.kill(victim.process.pid or 0, signal.SIGSTOP)
        going = asyncio.create_task(learner.accumulate(batch, counts))
        await asyncio.wait([going], timeout=0.5)
        assert not going.done(), "the others wait for it"
        began = time.monotonic()
        os.kill(victim.process.pid or 0, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=f"process {victim.process.pid} is gone"):
            await going
        with pytest.raises(WorkerDied, match="is gone"):
            await learner.save(Path("nowhere"))
        assert time.monotonic() - began < 10

    with ExitStack() as stack:
        ranks = open_ranks(2, stack)
        make_together(ranks, Spec())
        asyncio.run(main(RankedLearner(ranks, hidden=32), ranks[1]))


class Slow:
    """A rank in this process, whose calls end when they are told to."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.answer: asyncio.Future[Metrics] = asyncio.get_running_loop().create_future()

    async def step(self, counts: Counts = ONE_COUNT, lr: float = 1.0) -> Metrics:
        self.heard.append("step")
        return await self.answer

    async def restore(self, path: Path) -> None:
        self.heard.append("restore")


def test_a_call_that_nobody_waits_for_any_more_still_comes_first() -> None:
    async def main() -> None:
        ranks: list[Any] = [Slow(), Slow()]
        learner = RankedLearner(ranks, hidden=32)
        step = asyncio.create_task(learner.step())
        await asyncio.wait([step], timeout=0.01)
        step.cancel()
        restore = asyncio.create_task(learner.restore(Path()))
        await asyncio.wait([restore], timeout=0.01)
        assert [rank.heard for rank in ranks] == [["step"]] * 2 and step.cancelled() and not restore.done()
        for rank in ranks:
            rank.answer.set_result({})
        await restore
        assert [rank.heard for rank in ranks] == [["step", "restore"]] * 2

    asyncio.run(main())


@pytest.mark.parametrize("type_", [WorkerDied, RuntimeError])
def test_a_rank_that_fails_alone_stops_all(monkeypatch: pytest.MonkeyPatch, type_: type[Exception]) -> None:
    monkeypatch.setattr("slipstream.runtimes.ranked.RANK_ERRORS", 0.05)

    async def main() -> None:
        ranks: list[Any] = [Slow(), Slow()]
        learner = RankedLearner(ranks, hidden=32)
        ranks[1].answer.set_exception(type_("of its own"))
        for _ in range(2):
            with pytest.raises(type_, match="of its own"):
                await learner.step()
        assert ranks[0].heard == ["step"]

    asyncio.run(main())


# --- who gets what ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8))
def test_work_is_shared_out_evenly(costs: list[int], ranks: int) -> None:
    chosen = shared_out(costs, [0.0] * ranks)
    loads = [sum(cost for cost, rank in zip(costs, chosen, strict=True) if rank == r) for r in range(ranks)]
    assert max(loads) - min(loads) <= max(costs, default=0)
    assert min(ranks, len(costs)) == len(set(chosen)), "nobody is idle while another has two"


def test_a_group_costs_what_is_computed_of_it() -> None:
    group = [Handle(replace(pool()[0][0].header, prompt_tokens=100, tokens=tokens), None) for tokens in (10, 20)]
    assert [group_cost(group, 10**9, shared) for shared in (False, True)] == pytest.approx([230, 130])
    attention = [group_cost(group, 1, shared) - group_cost(group, 10**9, shared) for shared in (False, True)]
    assert attention == pytest.approx([(110**2 + 120**2) / 6, (110**2 + 120**2 - 100**2) / 6], rel=1e-6)


def test_every_step_is_balanced_and_gradients_are_made_where_the_groups_are() -> None:
    class Listed:
        def __init__(self) -> None:
            self.prepared: list[int] = []
            self.accumulated: list[list[int]] = []

        async def prepare(self, batch: Batch) -> list[Counts]:
            self.prepared += map(number_of, batch.groups)
            return [Counts(number_of(group)) for group in batch.groups]

        async def accumulate(self, batch: Batch, counts: Counts) -> list[SampleFreshness]:
            self.accumulated.append([number_of(group) for group in batch.groups])
            return []

    def group(number: int, tokens: int) -> Group:
        return [Handle(replace(pool()[0][0].header, number=number, prompt_tokens=1, tokens=tokens), None)]

    async def main() -> None:
        ranks: list[Any] = [Listed(), Listed()]
        learner = RankedLearner(ranks, hidden=32, minibatches=2)
        batch = Batch(tuple(group(i, tokens) for i, tokens in enumerate([10, 90, 80, 20, 400, 30, 30, 340])), 1)
        assert [count.n_tokens for count in await learner.prepare(batch)] == list(range(8))
        for part in batch.parts(2):
            await learner.accumulate(part, ONE_COUNT)
        assert [rank.accumulated for rank in ranks] == [[[0, 1], [5, 6, 7]], [[2, 3], [4]]]
        assert [rank.prepared for rank in ranks] == [[0, 1, 5, 6, 7], [2, 3, 4]]
        await learner.prepare(Batch((group(9, 10),), 2))
        await learner.prepare(Batch((group(8, 10),), 2))
        assert [rank.prepared[-1] for rank in ranks] == [9, 8], "what comes alone takes turns"

    asyncio.run(main())


# --- in processes of their own ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_run_with_two_ranks(
    runtime: Any, models_dir: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    config = Config(
        student=str(models_dir / "student"),
        teachers={"main": TeacherConfig(model=str(models_dir / "teacher"))},
        sampler=SamplerConfig(max_tokens=8),
        loss=ReverseKLMC(m=2),
        learner=LearnerConfig(batch_size=4, ranks=2),
        schedule=Sync(),
        updates=2,
    )
    tokens = [np.array([2, 10 + i, 20, 5], np.int32)[: 2 + i % 3] for i in range(6)]
    prompts = Prompts([Row(id=str(i), prompt="x") for i in range(6)], tokens, seed=0, shuffle=True)
    engines = runtime.open_engines(engines_of(config, method_of(config)), tokenizer, say=lambda _: None)
    try:
        with RunLog.create(config, tmp_path / "run") as log:
            asyncio.run(Run(config, engines, prompts, log, say=lambda _: None).train())
        lines = read_lines(tmp_path / "run" / "metrics.jsonl")
        assert len(lines) == 2 and all(np.isfinite(line["loss"]) for line in lines)
        assert (tmp_path / "run" / "final" / "model.safetensors").exists()
        used = asyncio.run(cpu_seconds(engines))
        assert used.keys() == {"learner-0", "learner-1", "sampler", "scorer"}
        learner: Any = engines.learner
        os.kill(learner.ranks[1].pid, signal.SIGKILL)
        began = time.monotonic()
        for call in (partial(learner.export), partial(learner.save, tmp_path)):
            with pytest.raises(WorkerDied, match=r"learner-1 \(pid \d+\) is gone"):
                asyncio.run(call())
        assert time.monotonic() - began < 15
    finally:
        engines.close()

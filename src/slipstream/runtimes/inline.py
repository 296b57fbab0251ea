"""Run all engines in this process: for notebooks, tests, debugging and a single GPU.

Each engine has its own thread. If stages never overlap and operations are parallel, all engines share one thread.
"""

from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from typing import Any

import torch

from slipstream.data.tokenizers import Tokenizer
from slipstream.engines.native.learning.learner import NativeLearner
from slipstream.engines.native.resources import Offloading, one_thread
from slipstream.engines.native.sampling.sampler import NativeSampler
from slipstream.engines.native.scorer import NativeScorer
from slipstream.plan.engine_plans import EnginesPlan
from slipstream.protocols import Engines, GradingSampler, Unscored
from slipstream.runtimes.build import (
    NATIVE_KINDS,
    AnyScorer,
    NativeKinds,
    OwnTeacherSampler,
    build_grader,
    build_learner,
    build_sampler,
    build_scorer,
)
from slipstream.runtimes.modelled import on_modelled_time
from slipstream.runtimes.time_share import TimeShare


def open_engines(plan: EnginesPlan, tokenizer: Tokenizer, *, say: Callable[[str], None] = print) -> Engines:
    kinds = NATIVE_KINDS if plan.costs is None else on_modelled_time(plan.costs)
    if plan.runtime.time_share:
        kinds = sharing_time()
    threads = plan.runtime.threads
    together = plan.serial and threads == plan.learner.threads > 1
    torch.set_num_threads(1 if together else threads)  # for this thread only; engines set the number for theirs
    with ExitStack() as stack, one_thread(threads) if together else nullcontext():
        grader = stack.enter_context(closing(build_grader(plan.grader, tokenizer)))
        say(f"loading student {plan.learner.student.name}")
        learner = stack.enter_context(closing(build_learner(plan.learner, tokenizer, kind=kinds.learner)))
        kinds.built()
        samplers = [
            stack.enter_context(closing(build_sampler(plan.sampler, tokenizer, kinds.sampler)))
            for _ in range(plan.sampler.replicas)
        ]
        kinds.built()
        scorers: dict[str, tuple[AnyScorer, ...]] = {}
        for name, teacher in plan.scorers.items():
            if teacher.here:
                say(f"loading teacher {teacher.here}")
            scorers[name] = tuple(
                stack.enter_context(closing(build_scorer(teacher, tokenizer, kinds.scorer)))
                for _ in range(teacher.replicas)
            )
            kinds.built()
        teacher_samplers: dict[str, tuple[OwnTeacherSampler, ...]] = {}
        for name, own in plan.teacher_samplers.items():
            replicas = (
                stack.enter_context(closing(OwnTeacherSampler(own, tokenizer, kinds.sampler)))
                for _ in range(own.replicas)
            )
            teacher_samplers[name] = tuple(replicas)
            kinds.built()
        opened = stack.pop_all()
    return Engines(
        samplers=tuple(GradingSampler(sampler, grader) for sampler in samplers),
        scorers=scorers or {"": (Unscored(),)},
        learner=learner,
        teacher_samplers=teacher_samplers,
        close=opened.close,
    )


def sharing_time() -> NativeKinds:
    share, engines = TimeShare(), list[Offloading]()
    share.holders = engines  # type: ignore[assignment]  # every engine is a holder

    def offload_all() -> None:
        for engine in engines:
            engine.thread.submit(engine.move_to_host).result()

    def in_turn(kind: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that builds an engine, which shares its device with the others."""

        def build(*args: Any, **given: Any) -> Any:
            engine = kind(*args, **given)
            engine.turn = partial(share.turn, engine)
            engines.append(engine)
            return engine

        return build

    return NativeKinds(in_turn(NativeSampler), in_turn(NativeScorer), in_turn(NativeLearner), offload_all)

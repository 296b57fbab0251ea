"""Run all engines in this process: for notebooks, tests, debugging and a single GPU.

Each engine has its own thread. If stages never overlap and operations are parallel, all engines share one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from itertools import chain

import torch

from slipstream.data.tokenizers import Tokenizer
from slipstream.engines.native.threads import one_thread
from slipstream.plan.engines import EnginesPlan
from slipstream.protocols import Engines, Graded, Unscored
from slipstream.runtimes.build import (
    REAL,
    AnyScorer,
    OwnTeacherSampler,
    build_grader,
    build_learner,
    build_sampler,
    build_scorer,
)
from slipstream.runtimes.modelled import modelled
from slipstream.runtimes.turns import in_turns


def open_engines(plan: EnginesPlan, tokenizer: Tokenizer, *, say: Callable[[str], None] = print) -> Engines:
    kinds = in_turns() if plan.runtime.turns else REAL if plan.costs is None else modelled(plan.costs)
    threads = plan.runtime.threads
    together = plan.serial and threads == plan.learner.threads > 1
    torch.set_num_threads(1 if together else threads)  # for this thread only; engines set the number for theirs
    with ExitStack() as stack, one_thread(threads) if together else nullcontext():
        grader = build_grader(plan.grader, tokenizer)
        stack.callback(grader.close)
        say(f"loading student {plan.learner.student.name}")
        learner = build_learner(plan.learner, tokenizer, kind=kinds.learner)
        stack.callback(learner.close)
        kinds.built()
        samplers = [build_sampler(plan.sampler, tokenizer, kinds.sampler) for _ in range(plan.sampler.replicas)]
        kinds.built()
        scorers: dict[str, tuple[AnyScorer, ...]] = {}
        for name, teacher in plan.scorers.items():
            if teacher.here:
                say(f"loading teacher {teacher.here}")
            scorers[name] = tuple(build_scorer(teacher, tokenizer, kinds.scorer) for _ in range(teacher.replicas))
            kinds.built()
        teacher_samplers: dict[str, tuple[OwnTeacherSampler, ...]] = {}
        for name, own in plan.teacher_samplers.items():
            replicas = (OwnTeacherSampler(own, tokenizer, kinds.sampler) for _ in range(own.replicas))
            teacher_samplers[name] = tuple(replicas)
            kinds.built()
        for sampler in (*samplers, *chain.from_iterable(teacher_samplers.values())):
            stack.callback(sampler.close)
        for scorer in chain.from_iterable(scorers.values()):
            stack.callback(scorer.close)
        opened = stack.pop_all()
    return Engines(
        samplers=tuple(Graded(sampler, grader) for sampler in samplers),
        scorers=scorers or {"": (Unscored(),)},
        learner=learner,
        teacher_samplers=teacher_samplers,
        close=opened.close,
    )

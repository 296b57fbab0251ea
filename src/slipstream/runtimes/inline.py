"""All engines in this process, each on a thread of its own: notebooks, tests, debugging, one GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from slipstream.config import Config
from slipstream.engines.base import Engines, Graded, Unscored
from slipstream.engines.native.scorer import NativeScorer
from slipstream.runtimes.build import build_grader, build_learner, build_sampler, build_scorer, set_threads
from slipstream.tasks.chat import Tokenizer


def open_engines(config: Config, tokenizer: Tokenizer, *, say: Callable[[str], None] = print) -> Engines:
    set_threads(config)
    with ExitStack() as stack:
        grader = build_grader(config, tokenizer)
        stack.callback(grader.close)
        say(f"loading student {config.student}")
        learner = build_learner(config, tokenizer)
        stack.callback(learner.close)
        samplers = [build_sampler(config, tokenizer) for _ in range(config.sampler.replicas)]
        scorers: list[NativeScorer] = []
        for teacher in config.teachers.values():
            say(f"loading teacher {teacher.model}")
            scorers += [build_scorer(config) for _ in range(teacher.replicas)]
        for sampler in samplers:
            stack.callback(sampler.close)
        for scorer in scorers:
            stack.callback(scorer.close)
        opened = stack.pop_all()
    return Engines(
        samplers=tuple(Graded(sampler, grader) for sampler in samplers),
        scorers=tuple(scorers) or (Unscored(),),
        learner=learner,
        close=opened.close,
    )

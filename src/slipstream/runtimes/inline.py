"""All engines in this process, each on a thread of its own: notebooks, tests, debugging, one GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain

from slipstream.config.schema import Config
from slipstream.engines.base import Engines, Graded, Unscored
from slipstream.runtimes.build import (
    Scoring,
    build_grader,
    build_learner,
    build_sampler,
    build_scorer,
    endpoint_of,
    set_threads,
)
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
        scorers: dict[str, tuple[Scoring, ...]] = {}
        for name, teacher in config.teachers.items():
            endpoint = endpoint_of(config, name)
            if endpoint is None:
                say(f"loading teacher {config.model_of(teacher)}")
            scorers[name] = tuple(build_scorer(config, tokenizer, name, endpoint) for _ in range(teacher.replicas))
        for sampler in samplers:
            stack.callback(sampler.close)
        for scorer in chain.from_iterable(scorers.values()):
            stack.callback(scorer.close)
        opened = stack.pop_all()
    return Engines(
        samplers=tuple(Graded(sampler, grader) for sampler in samplers),
        scorers=scorers or {"": (Unscored(),)},
        learner=learner,
        close=opened.close,
    )

"""Teachers: scored tokens per second for draws, top-k and hidden states, with a 4B teacher."""

import asyncio
import gc

from on_gpu.report import SHAPES, Report, Setting, peak_memory, samples, seconds_of
from slipstream.config.losses import LossSpec
from slipstream.engines.native.scorer import NativeScorer
from slipstream.engines.settings import ScorerSettings
from slipstream.records import Handle, graded, header_of


def stage(setting: Setting, report: Report) -> None:
    lm = setting.model(SHAPES[1])
    count, prompt, response = setting.of((32, 128, 896), (4, 4, 8))
    rollouts = [graded(handle) for handle in samples(count, prompt, response, lm.vocab_size)]
    groups = [[Handle(header_of(rollout), rollout)] for rollout in rollouts]
    for cache, k in (("sampled", 0), ("teacher_topk", 32), ("hidden", 0)):
        scorer = NativeScorer(
            lm,
            ScorerSettings(
                spec=LossSpec(cache=cache, k=k, formula=""),  # type: ignore[arg-type]
                vocabulary=lm.vocab_size,
                token_budget=setting.of(16_384, 128),
            ),
        )

        async def work(scorer: NativeScorer = scorer) -> list[list[Handle]]:
            return await asyncio.gather(*[scorer.score(group) for group in groups])

        with peak_memory(setting) as peak:
            took = seconds_of(lambda work=work: asyncio.run(work()), setting, repeats=3, warm_up=1)  # type: ignore[misc]
        failed = sum(handle.header.finish == "error" for group in asyncio.run(work()) for handle in group)
        report.check(f"{cache}: responses whose scores cannot be used", failed, 0)
        speed, extra = count * response / took, peak[0] / 2**30
        report.number(f"{cache}: scored tokens", speed, "tokens/s", note=f"{extra:.1f} GiB beside the weights")
        scorer.close()
        gc.collect()

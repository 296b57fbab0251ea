"""Packed rows by FlexAttention: exactness against one sequence at a time, speed against padded SDPA, shared prompts."""

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from on_gpu.report import Report, Setting, peak_memory, relative, samples, seconds_of
from slipstream.engines.native.attention import Reach
from slipstream.engines.native.model import LanguageModel
from slipstream.engines.native.packing import pack
from slipstream.engines.native.rows import Rows, by_flex, use_rows
from slipstream.estimators.logprobs import logprobs_at
from slipstream.estimators.numerics import joined
from slipstream.records import Prompt, Rollout, graded, one_turn


def stage(setting: Setting, report: Report) -> None:
    exactness(setting, report)
    ragged(setting, report)
    shared(setting, report)
    kernels(setting, report)
    modes(setting, report)


def rollouts_of(lengths: Sequence[tuple[int, int]], vocabulary: int) -> list[Rollout]:
    """Make responses of random tokens: (prompt tokens, response tokens) each."""
    rng = np.random.default_rng(0)
    return [
        one_turn(
            Prompt(id=str(i), number=i, tokens=rng.integers(2, vocabulary, prompt)),
            0,
            actions=rng.integers(2, vocabulary, (response, 1)),
            action_logp=np.zeros((response, 1)),
            versions=np.zeros(response, np.int64),
            finish="length",
        )
        for i, (prompt, response) in enumerate(lengths)
    ]


def hidden_of(lm: LanguageModel, rollouts: Sequence[Rollout], budget: int, *, shared: bool = False) -> list[Tensor]:
    """Return the hidden states that predict each response, from packed rows."""
    found: dict[int, Tensor] = {}
    for batch in pack(rollouts, budget=budget, hidden=lm.head.weight.shape[1], shared_prompt=shared):
        hidden_NH = Rows(rollouts, batch, lm.device).hidden(lm.backbone)
        found |= zip(batch.members, hidden_NH.split([len(rollouts[i].tokens) for i in batch.members]), strict=True)
    return [found[i] for i in range(len(rollouts))]


def exactness(setting: Setting, report: Report) -> None:
    """Hidden states of ragged responses in packed rows, and with shared prompts, against plain passes in float32."""
    lm = setting.model("qwen3_0.6b", torch.float32)
    size = setting.of(1, 8)
    ragged = rollouts_of(
        [(p // size, r // size) for p, r in ((120, 900), (40, 300), (8, 16), (64, 500))], lm.vocab_size
    )
    group = [graded(handle) for handle in samples(4, setting.of(200, 9), setting.of(150, 7), lm.vocab_size, group=4)]
    lm.model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = [[plain(lm, rollout) for rollout in rollouts] for rollouts in (ragged, group)]
        use_rows(lm)
        found = [hidden_of(lm, ragged, 2048), hidden_of(lm, group, 2048, shared=True)]
    for name, ours, theirs in zip(("packed rows", "shared prompts"), found, expected, strict=True):
        worst = max(relative(a, b) for a, b in zip(ours, theirs, strict=True))
        report.check(f"{name} against one sequence at a time, float32", worst, 2e-3)


def plain(lm: LanguageModel, rollout: Rollout) -> Tensor:
    ids = torch.from_numpy(np.concatenate([rollout.prompt.tokens, rollout.tokens]).astype(np.int64)).to(lm.device)
    hidden_TH: Tensor = lm.backbone(ids[None], use_cache=False).last_hidden_state[0]
    return hidden_TH[len(rollout.prompt.tokens) - 1 : -1]


def ragged(setting: Setting, report: Report) -> None:
    """Forward and backward over log-normal lengths: packed rows against a padded batch with SDPA."""
    lm = setting.model("qwen3_0.6b")
    rng, count, longest = np.random.default_rng(1), setting.of(32, 4), setting.of(2048, 40)
    lengths = np.exp(rng.normal(np.log(longest / 5), 0.8, count)).clip(4, longest).astype(int)
    rollouts = rollouts_of([(longest // 16, int(length)) for length in lengths], lm.vocab_size)
    tokens = sum(len(r.tokens) + len(r.prompt.tokens) for r in rollouts)
    micro = setting.of(8, 2)

    def padded() -> None:
        lm.model.zero_grad()
        for start in range(0, count, micro):
            part = rollouts[start : start + micro]
            ids = [torch.from_numpy(np.concatenate([r.prompt.tokens, r.tokens]).astype(np.int64)) for r in part]
            batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(setting.device)
            seen = torch.nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)
            hidden = lm.backbone(batch, attention_mask=seen.to(setting.device), use_cache=False).last_hidden_state
            at = [len(r.prompt.tokens) - 1 for r in part]
            rows = [h[a : a + len(r.tokens)] for h, a, r in zip(hidden, at, part, strict=True)]
            loss(lm, torch.cat(rows), part).backward()

    def packed(shared: bool = False) -> None:
        lm.model.zero_grad()
        budget = setting.of(16_384, 128)
        for batch in pack(rollouts, budget=budget, hidden=lm.head.weight.shape[1], shared_prompt=shared):
            hidden_NH = Rows(rollouts, batch, lm.device).hidden(lm.backbone)
            loss(lm, hidden_NH, [rollouts[i] for i in batch.members]).backward()

    lm.model.set_attn_implementation("sdpa")
    took = seconds_of(padded, setting, repeats=3)
    use_rows(lm)
    setting.synchronize()
    began = time.perf_counter()
    packed()
    setting.synchronize()
    report.number("first packed pass, compiling FlexAttention", time.perf_counter() - began, "s")
    ours = seconds_of(packed, setting, repeats=3)
    report.number("padded SDPA, forward and backward, ragged lengths", tokens / took, "tokens/s")
    report.number("packed FlexAttention, the same", tokens / ours, "tokens/s", note=f"{took / ours:.2f}× padded SDPA")


def loss(lm: LanguageModel, hidden_NH: Tensor, rollouts: Sequence[Rollout]) -> Tensor:
    ids_N = joined([r.tokens for r in rollouts], lm.device, torch.int64)
    return -logprobs_at(hidden_NH, lm.head.weight, ids_N[:, None]).mean()


def shared(setting: Setting, report: Report) -> None:
    """Sixteen answers to one long prompt: the prompt computed once against sixteen times."""
    lm = setting.model("qwen3_0.6b")
    use_rows(lm)
    prompt, response = setting.of((2048, 256), (24, 4))
    rollouts = [graded(handle) for handle in samples(16, prompt, response, lm.vocab_size, draws=1, group=16)]
    took = {}
    for name in ("apart", "shared"):
        batches = pack(
            rollouts,
            budget=setting.of(16_384, 512),
            hidden=lm.head.weight.shape[1],
            shared_prompt=name == "shared",
        )

        def work(batches: Sequence[object] = batches) -> None:
            lm.model.zero_grad()
            for batch in batches:
                hidden_NH = Rows(rollouts, batch, lm.device).hidden(lm.backbone)  # type: ignore[arg-type]
                loss(lm, hidden_NH, [rollouts[i] for i in batch.members]).backward()  # type: ignore[attr-defined]

        took[name] = seconds_of(work, setting, repeats=3)
    note = f"{prompt:,} prompt tokens, 16 answers of {response}"
    report.number(
        "shared prompt, speed over the prompt computed per answer", took["apart"] / took["shared"], "×", note=note
    )


KINDS = {
    "plain": (Reach(), None, False, 64),
    "window of 50": (Reach(50), None, False, 64),
    "chunks of 32": (Reach(None, 32), None, False, 64),
    "soft cap": (Reach(), 5.0, False, 64),
    "sinks": (Reach(), None, True, 64),
    "narrow values": (Reach(), None, False, 32),
}
"""Kinds of attention: reach, soft cap, whether it has sinks, size of the values of a head."""


def kernels(setting: Setting, report: Report) -> None:
    """Attention of each kind over packed rows, and on a GPU its gradients, in float32 against the definition."""
    rollouts = rollouts_of([(40, 200), (7, 90), (3, 30)], 1000)
    (batch,) = pack(rollouts, budget=1 << 10, hidden=256)
    rows = Rows(rollouts, batch, setting.device)
    number, length = rows.ids_RL.shape
    for name, (reach, softcap, has_sinks, size) in KINDS.items():
        torch.manual_seed(0)
        inputs = [
            torch.randn(number, count, length, width, device=setting.device).requires_grad_(not setting.small)
            for count, width in ((4, 64), (2, 64), (2, size))
        ]
        sinks_H = torch.randn(4, device=setting.device) if has_sinks else None
        found = by_flex(*inputs, rows, reach, None, softcap, sinks_H)
        wide = [each.detach().double().requires_grad_(not setting.small) for each in inputs]
        expected = by_definition(*wide, rows, reach, softcap, sinks_H)
        pairs = [(found.detach(), expected.detach())]
        if not setting.small:
            target = torch.randn_like(found)
            ours, theirs = (
                torch.autograd.grad(found, inputs, target),
                torch.autograd.grad(expected, wide, target.double()),
            )
            pairs += zip(ours, theirs, strict=True)
        report.check(f"FlexAttention, {name}, float32, against float64", max(relative(*pair) for pair in pairs), 2e-3)


def by_definition(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows, reach: Reach, softcap: float | None, sinks_H: Tensor | None
) -> Tensor:
    """Return the attention output [R, L, H, D] from all scores."""
    at, row = torch.arange(query.shape[2], device=query.device), torch.arange(len(query), device=query.device)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    score = query @ key.mT * query.shape[-1] ** -0.5
    if softcap is not None:
        score = softcap * (score / softcap).tanh()
    seen = rows.sees(reach)(row[:, None, None, None], None, at[:, None], at)  # type: ignore[arg-type]
    score = score.masked_fill(~seen, -torch.inf)
    if sinks_H is not None:
        score = torch.cat([score, sinks_H.double()[None, :, None, None].expand(*score.shape[:3], 1)], -1)
    return (score.softmax(-1)[..., : value.shape[2]] @ value).transpose(1, 2)


def modes(setting: Setting, report: Report) -> None:
    """Attention alone in two modes over many shapes: compiled graphs, and memory of a long row against its scores."""
    shapes = setting.of(((16_384,), (16_385,), (900, 700), (5_000, 3_000), (90,), (60, 50)), ((30,), (20, 10)))
    heads, kv_heads, size = 32, 8, 128
    modes = [(Reach(1024), torch.float32, False), (Reach(), torch.bfloat16, True)]
    before, began = graphs_so_far(), time.perf_counter()
    peak = 0
    for reach, dtype, learns in modes if not setting.small else modes[:1]:
        for lengths in shapes:
            rollouts = rollouts_of([(1, length - 1) for length in lengths], 1000)
            (batch,) = pack(rollouts, budget=1 << 16, hidden=heads * size)
            rows = Rows(rollouts, batch, setting.device)
            number, length = rows.ids_RL.shape
            query, key, value = (
                torch.randn(number, count, length, size, device=setting.device, dtype=dtype)
                for count in (heads, kv_heads, kv_heads)
            )
            with peak_memory(setting) as memory, torch.set_grad_enabled(learns):
                out = by_flex(query.requires_grad_(learns), key, value, rows, reach, None, None, None)
                if learns:
                    out.sum().backward()
            peak = max(peak, memory[0])
    setting.synchronize()
    report.number("attention in two modes, six shapes each", time.perf_counter() - began, "s", note="with compilation")
    report.check("compiled graphs of attention, per mode", (graphs_so_far() - before) / len(modes), 1)
    scores = heads * 16_384**2 * 2
    report.check("peak memory of attention over 16 k tokens, as a share of its scores", peak / scores, 0.25)


def graphs_so_far() -> int:
    """Return the number of graphs that dynamo has compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

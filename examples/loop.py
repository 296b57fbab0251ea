"""On-policy distillation in one file, strictly in sequence: rollout, scoring, learning.

Nothing is batched, cached or overlapped. Every token needs a full forward pass, and every loss the log-softmax over the
whole vocabulary. This is slow but readable, and serves as an oracle: with the same seeds the real pipeline must give
the same losses and weights (tests/runs/test_oracle.py). Slipstream provides only the built-in models, the prompts, the
counter-based random numbers and the estimator.

    python examples/loop.py --updates 10

Shapes: T response tokens, M draws (tokens sampled at the same position), V vocabulary.
"""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.config.data import DataConfig
from slipstream.data.prompts import Prompts, load_rows
from slipstream.data.tokenizers import encode_rows
from slipstream.engines.draws import uniforms
from slipstream.estimators.surrogate import mc_reverse_kl
from slipstream.models.resolve import model_path
from slipstream.records import Prompt, derive_seed


@dataclass
class Sample:
    ids: Tensor
    """Token ids of prompt and response."""
    start: int
    """Index of the first response token."""
    actions_TM: Tensor
    behavior_TM: Tensor


@torch.no_grad()
def roll_out(model: torch.nn.Module, prompt: Prompt, *, max_tokens: int, m: int, eos: int) -> Sample:
    """Sample M tokens from the student at every position; the first one is emitted."""
    ids = torch.tensor(prompt.tokens, dtype=torch.int64)
    seed, start = torch.tensor([derive_seed(prompt.seed, 0)]), len(ids)
    actions, behavior = [], []
    for t in range(max_tokens):
        logp_V = model(ids[None]).logits[0, -1].log_softmax(-1)
        cdf_V = logp_V.double().exp().cumsum(-1)
        uniform_M = uniforms(seed, torch.tensor([t]), m)[0]
        drawn_M = torch.searchsorted(cdf_V, uniform_M * cdf_V[-1], right=True)
        actions.append(drawn_M)
        behavior.append(logp_V[drawn_M])
        ids = torch.cat([ids, drawn_M[:1]])
        if ids[-1] == eos:
            break
    return Sample(ids, start, torch.stack(actions), torch.stack(behavior))


def logp_of_actions(model: torch.nn.Module, sample: Sample) -> Tensor:
    """Return a model's log-probs [T, M] of the draws; row t is the prediction of response token t."""
    logp_TV = model(sample.ids[None]).logits[0, sample.start - 1 : -1].log_softmax(-1)
    return logp_TV.gather(1, sample.actions_TM)


def update(
    student: torch.nn.Module, teacher: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: list[Sample]
) -> float:
    """Make one optimizer step on the mean loss over all response tokens of the batch, and return this loss."""
    n_tokens = sum(len(sample.actions_TM) for sample in samples)
    total = 0.0
    for sample in samples:
        with torch.no_grad():
            logq_TM = logp_of_actions(teacher, sample)
        loss_T, _ = mc_reverse_kl(logp_of_actions(student, sample), sample.behavior_TM, logq_TM)
        loss = loss_T.sum() / n_tokens
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def train(
    student: torch.nn.Module,
    teacher: torch.nn.Module,
    prompts: Prompts,
    *,
    updates: int,
    batch_size: int,
    max_tokens: int,
    m: int,
    lr: float,
    eos: int,
) -> list[float]:
    """Run synchronous on-policy distillation, and return the loss of every update."""
    optimizer = torch.optim.AdamW(student.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(updates):
        batch = [prompts.at(step * batch_size + i) for i in range(batch_size)]
        samples = [roll_out(student, prompt, max_tokens=max_tokens, m=m, eos=eos) for prompt in batch]
        losses.append(update(student, teacher, optimizer, samples))
        print(f"update {step + 1}: loss {losses[-1]:.4f}")
    return losses


def main() -> None:
    args = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    args.add_argument("--updates", type=int, default=10)
    args.add_argument("--batch-size", type=int, default=16)
    args.add_argument("--lr", type=float, default=1e-3)
    options = args.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_path("builtin:student"))
    student = AutoModelForCausalLM.from_pretrained(model_path("builtin:student"))
    teacher = AutoModelForCausalLM.from_pretrained(model_path("builtin:teacher"))
    rows = load_rows("builtin:arithmetic", limit=1000)
    prompts = Prompts(rows, encode_rows(rows, tokenizer, DataConfig()), seed=0, shuffle=True)
    eos = tokenizer.eos_token_id
    shape = {"updates": options.updates, "batch_size": options.batch_size, "max_tokens": 80, "m": 16}
    train(student, teacher, prompts, **shape, lr=options.lr, eos=eos)


if __name__ == "__main__":
    main()

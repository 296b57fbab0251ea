"""Which wrong temperatures of a sampler do canaries find? The KL to the learner on answers of a real model.

    make build/real/teacher.gguf build/real/train.jsonl
    python benchmarks/wrong_temperature.py

A sampler draws with another temperature than it says, and records the log-probs of what it did. KL and perplexity
ratio are exact at each position, and means over 40 answers of 8 tokens. docs/trust.md has the limits of canaries.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

REAL = Path(__file__).parents[1] / "build/real"
ANSWERS, TOKENS = 40, 8
FACTORS = 0.9, 0.95, 1.05, 1.1, 1.2, 1.3, 1.5


def distance(logits: Tensor, temperature: float, factor: float) -> float:
    """Return the KL from a sampler at `temperature * factor` to the learner, which is also the log of their ratio."""
    learner = torch.log_softmax(logits / temperature, -1)
    sampler = torch.log_softmax(logits / (temperature * factor), -1)
    return (sampler.exp() * (sampler - learner)).sum(-1).mean().item()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(REAL, gguf_file="teacher.gguf", dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(REAL, gguf_file="teacher.gguf")
    with (REAL / "train.jsonl").open() as file:
        prompts = [json.loads(line)["prompt"] for line, _ in zip(file, range(ANSWERS), strict=False)]
    for temperature in (0.7, 1.0):
        found: dict[float, list[float]] = {factor: [] for factor in FACTORS}
        for prompt in prompts:
            logits = answer(model, tokenizer, prompt, temperature)
            for factor, values in found.items():
                values.append(distance(logits, temperature, factor))
        for factor, values in found.items():
            kl = sum(values) / len(values)
            print(f"temperature {temperature} · {factor}: KL {kl:.4f}, perplexity ratio {math.exp(kl):.3f}")


@torch.no_grad()
def answer(model: Any, tokenizer: Any, prompt: str, temperature: float) -> Tensor:
    """Return the logits of the positions of an answer that is drawn at this temperature."""
    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "pad_token_id": 2}
    text = model.generate(ids, max_new_tokens=TOKENS, **options)
    logits: Tensor = model(text).logits[0, ids.shape[1] - 1 : -1].float()
    return logits


if __name__ == "__main__":
    main()

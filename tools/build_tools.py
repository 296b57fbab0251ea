"""Build the bundled models of tools and their tokenizer from nothing: `python tools/build_tools.py`.

Both are fine-tuned on scripted episodes of the tasks `table` and `lookup`. The teacher calls the tools as it should,
and mends a call that went wrong. The student learns from careless episodes: it knows what a call looks like and what it
is good for, but leaves out braces, takes the wrong tool or key, and answers too soon. The reader is the student that
has also learned the task `doors`, where a wrong key costs the episode. It is careless there, unless the answer stands
before the question, and so it can teach itself. On one machine the same command gives the same bytes.
"""

import argparse
import random
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

import build_arithmetic as build
from build_arithmetic import GROUP, IGNORE, Example, Recipe
from slipstream.data.builtin import tool_problem
from slipstream.models.resolve import model_path
from tool_episodes import act, episode, opened

PAD, UNKNOWN, END = "<pad>", "<unk>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
PIECES = (
    "<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"key": "', '", "arguments": {"a": ', ', "b": ',
    '"}}', "}}", "get", "add", "subtract", "look", "What is ", "Start at ", " and follow ", " hops.", "no key ",
    "error: ", "there is no tool ", "; there are ", "a call is no JSON: ", "Expecting ',' delimiter at ",
)  # fmt: skip
"""Texts that are one token each, beside single characters."""
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message.role + '|>' + (message.content or '') -}}
{%- for each in message.tool_calls or [] -%}
{%- set call = each.function or each -%}
{{- '<tool_call>' + {'name': call.name, 'arguments': call.arguments} | tojson + '</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
POSITIONS = 512
LONGEST = 256
"""Tokens of an episode; longer ones are left out."""
TURNS = 14


@dataclass(frozen=True)
class ToolRecipe(Recipe):
    """`slips` are a share of turns here."""

    heeds: bool = False
    """True: mistakes are seen only to be mended."""
    hurry: float = 0.0
    """The share of episodes that are ended before the last call, which is the one that finds the answer."""
    sharpness: float = 1.0
    """By which its logits are multiplied in the end: what it finds unlikely it then hardly ever says."""
    careful: int = 0
    """So many episodes of either task come first that have no slips."""
    tasks: tuple[str, ...] = ("table", "lookup")
    positions: int = POSITIONS
    dtype: torch.dtype = torch.bfloat16


RECIPES = {
    "tool_teacher": ToolRecipe(
        layers=3, width=64, heads=4, head_width=32, mlp_width=128, rope_theta=50.0,
        steps=1200, learning_rate=4e-3, slips=0.15, seed=11, careful=8_000, heeds=True,
        sharpness=2.0,
    ),
    "tool_student": ToolRecipe(
        layers=2, width=64, heads=4, head_width=32, mlp_width=96, rope_theta=50.0,
        steps=800, learning_rate=4e-3, slips=0.2, hurry=0.6, seed=12, careful=10_000,
    ),
    "tool_reader": ToolRecipe(
        layers=2, width=64, heads=4, head_width=32, mlp_width=96, rope_theta=50.0,
        steps=700, learning_rate=3e-3, slips=0.2, seed=13,
        begins="tool_student", hints=0.5, tasks=("doors",),
    ),
}  # fmt: skip


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for every piece, and for every other character of ASCII."""
    marks = [PAD, UNKNOWN, END, *(f"<|{role}|>" for role in ROLES)]
    characters = string.digits + string.ascii_letters + string.punctuation + " \n"
    tokens = [*marks, *PIECES, *characters]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNKNOWN))
    either = "|".join(re.escape(piece) for piece in sorted(PIECES, key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{either}|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        padding_side="left",  # what generation needs; training pads for itself
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )


def example(task: str, index: int, recipe: ToolRecipe, tokenizer: PreTrainedTokenizerFast) -> Example:
    """Only what the assistant says is learned, and that it ends."""
    rng = random.Random(f"{recipe.seed}/{task}/{index}")
    habits = (recipe.slips, recipe.hurry) if index >= recipe.careful else (0.0, 0.0)
    problem = tool_problem(task, "train", index)
    told = rng.random() < recipe.hints if recipe.hints else False
    tokens = tokenizer(problem[1])["input_ids"] if told else []
    labels = [IGNORE] * len(tokens)
    for role, text, learned in episode(task, problem, rng, *habits, heeds=recipe.heeds or told):
        (opening,), said = tokenizer([f"<|{role}|>", f"{text}{END}"])["input_ids"]
        tokens += [opening, *said]
        labels += [IGNORE, *(said if learned else [IGNORE] * len(said))]
    return tokens, labels


def batches(recipe: ToolRecipe, tokenizer: PreTrainedTokenizerFast) -> Iterator[dict[str, torch.Tensor]]:
    """Training batches of similar lengths, with equal shares of the recipe's tasks."""
    examples = (example(task, index, recipe, tokenizer) for index in count() for task in recipe.tasks)
    short = (each for each in examples if len(each[0]) <= LONGEST)
    while group := sorted(islice(short, GROUP), key=lambda each: len(each[0])):
        yield from build.packed(group, tokenizer.pad_token_id)


@torch.no_grad()
def plays(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: str,
    number: int = 300,
    *,
    sampled: bool = True,
    told: bool = False,
) -> dict[str, float]:
    """Shares of held-out episodes with the right answer and with at least one call that was none.

    `told`: the answer stands before the question.
    """
    model.eval()
    problems = [tool_problem(task, "eval", index) for index in range(number)]
    environments = [opened(task, table) for _, _, table in problems]
    texts = [f"{answer if told else ''}<|user|>{question}{END}<|assistant|>" for question, answer, _ in problems]
    live, right, invalid = set(range(number)), set(), set()
    for _ in range(TURNS):
        turn = sorted(live)
        said = generated(model, tokenizer, [texts[index] for index in turn], sampled)
        for index, text in zip(turn, said, strict=True):
            if "<tool_call>" not in text:
                live.remove(index)
                right |= {index} if text.strip() == problems[index][1] else set()
                continue
            back, worked = act(environments[index], text)
            invalid |= set() if worked else {index}
            texts[index] += f"{text}{END}<|tool|>{back}{END}<|assistant|>"
            if len(texts[index]) > 4 * LONGEST:
                live.remove(index)
        if not live:
            break
    return {"success": len(right) / number, "invalid": len(invalid) / number}


def generated(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], sampled: bool
) -> list[str]:
    batch = tokenizer(prompts, padding=True, return_tensors="pt", return_token_type_ids=False)
    how = {"do_sample": True, "top_k": 0} if sampled else {"do_sample": False}
    output = model.generate(**batch, **how, max_new_tokens=32)
    return [str(text) for text in tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path(model_path("builtin:student")).parent, help="default: the package's own"
    )
    parser.add_argument("--model", choices=RECIPES, nargs="*", default=list(RECIPES), help="default: all")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the fastest for models this small, and the same sums in the same order
    tokenizer = build_tokenizer()
    for name in args.model:
        recipe = RECIPES[name]
        model = build.build_model(recipe, tokenizer)
        if recipe.begins:
            model.load_state_dict(Qwen3ForCausalLM.from_pretrained(args.out / recipe.begins).state_dict())
        print(f"{name}: {model.num_parameters():,} parameters")
        build.train(model, recipe, batches(recipe, tokenizer))
        model.model.norm.weight.data.mul_(recipe.sharpness)
        model.to(recipe.dtype)
        build.save(model, tokenizer, args.out / name)
        model.to(torch.float32)
        for task in recipe.tasks:
            for told in (False, True) if recipe.hints else (False,):
                for sampled in (False, True):
                    shares = plays(model, tokenizer, task, sampled=sampled, told=told)
                    said = ", ".join(f"{what} {share:.1%}" for what, share in shares.items())
                    print(f"  {task}{', told' if told else ''}, {'drawn' if sampled else 'greedy'}: {said}")


if __name__ == "__main__":
    main()

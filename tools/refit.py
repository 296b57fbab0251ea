"""Bring a student that lacks layers of its teacher nearer to it by least squares, before any training.

    python tools/refit.py TEACHER STUDENT TARGET [--answers 128] [--strength 0.5]

Each layer of the student gets a new last matrix (`mlp.down_proj`). With it, the output of the layer is as near as
possible to what the next layer of the student got in the teacher: squared distances, relative to the size of that
input, summed over the tokens of the teacher's answers. So a layer makes up for the missing layers behind it, and for
errors of the layers before it, which are refitted first. TARGET is an ordinary directory, like STUDENT.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastest_format import fastest_format
from leave_out_layers import Answer, answers, questions, write
from real import TEMPERATURE
from slipstream.data.tokenizers import load_tokenizer
from slipstream.engines.native.model import LanguageModel, load_model

TOKENS = 96
"""Maximum length of an answer in tokens, as in configs/real.toml."""
ROWS = 16
"""Number of answers in one forward pass."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("teacher")
    parser.add_argument("student")
    parser.add_argument("target", type=Path)
    parser.add_argument("--prompts", type=Path, default=Path("build/real/train.jsonl"))
    parser.add_argument("--answers", type=int, default=128)
    parser.add_argument("--strength", type=float, default=0.5, help="how much a matrix is held at its old value")
    args = parser.parse_args()
    torch.set_num_threads(2)
    tokenizer, asked = load_tokenizer(args.teacher), questions(args.prompts, args.answers)
    quick = load_model(args.teacher, dtype=fastest_format(), device="cpu")
    drawn = answers(quick, tokenizer, asked, TOKENS, TEMPERATURE)
    teacher, student = (load_model(name, dtype="float32", device="cpu") for name in (args.teacher, args.student))
    errors = refit(teacher, student, drawn, args.strength)
    write(student.model, tokenizer, args.target)
    before, after = (sum(each) / len(errors) for each in zip(*errors, strict=True))
    print(f"{args.target}: {args.student} refitted; mean relative error {before:.3f} before, {after:.3f} after")


@torch.no_grad()
def refit(
    teacher: LanguageModel, student: LanguageModel, drawn: Sequence[Answer], strength: float
) -> list[tuple[float, float]]:
    """Refit all layers of the student, and return the relative squared error of each before and after.

    `strength` holds a matrix at its old value, relative to the mean square of its inputs.
    """
    rows = [drawn[start : start + ROWS] for start in range(0, len(drawn), ROWS)]
    ids = [nn.utils.rnn.pad_sequence([each.ids for each in some], batch_first=True) for some in rows]
    real = [
        nn.utils.rnn.pad_sequence([torch.ones(len(each.ids)).bool() for each in some], batch_first=True)
        for some in rows
    ]
    for each in real:
        each[:, 0] = False  # the first token of a text has states that are hundreds of times as large as all others
    kept, inputs = kept_layers(teacher, student), [inputs_of_layers(teacher, each) for each in ids]
    calls, errors = [call_of_first_layer(student, each) for each in ids], list[tuple[float, float]]()
    states = [call.pop("hidden_states") for call in calls]
    for layer, following in zip(student.backbone.layers, [*kept[1:], -1], strict=True):  # type: ignore[arg-type]
        targets = [each[following] for each in inputs]
        states, before, after = refit_layer(layer, states, calls, targets, real, strength)
        errors.append((before, after))
    return errors


def refit_layer(
    layer: nn.Module,
    states: Sequence[Tensor],
    calls: Sequence[Mapping[str, Any]],
    targets: Sequence[Tensor],
    real: Sequence[Tensor],
    strength: float,
) -> tuple[list[Tensor], float, float]:
    """Change the last matrix of a layer; return its new outputs, and its relative error before and after."""
    matrix: nn.Linear = layer.mlp.down_proj  # type: ignore[union-attr, assignment]
    features = list[Tensor]()
    hook = matrix.register_forward_pre_hook(lambda _, args: features.append(args[0]))
    outputs = [layer(each, **call) for each, call in zip(states, calls, strict=True)]
    hook.remove()
    gram = torch.zeros(matrix.in_features, matrix.in_features, dtype=torch.float64)
    cross = torch.zeros(matrix.in_features, matrix.out_features, dtype=torch.float64)
    squares = count = 0.0
    for x, y, target, chosen in zip(features, outputs, targets, real, strict=True):
        size = target[chosen].square().mean(-1, keepdim=True).sqrt()
        x, missing = x[chosen] / size, (target - y)[chosen] / size
        gram += (x.T @ x).double()
        cross += (x.T @ missing).double()
        squares, count = squares + float(missing.square().sum()), count + missing.numel()
    change = torch.linalg.solve(gram + strength * gram.diagonal().mean() * torch.eye(len(gram)), cross)
    left = squares - float((change * (2 * cross - gram @ change)).sum())
    matrix.weight += change.T.float()
    moved = [y + x @ change.float() for x, y in zip(features, outputs, strict=True)]
    return moved, squares / count, left / count


def kept_layers(teacher: LanguageModel, student: LanguageModel) -> list[int]:
    """Return the number that each layer of the student has in the teacher; they have the same attention."""
    whole = [layer.self_attn.q_proj.weight for layer in teacher.backbone.layers]  # type: ignore[union-attr]
    own = [layer.self_attn.q_proj.weight for layer in student.backbone.layers]  # type: ignore[union-attr]
    kept = [next((number for number, each in enumerate(whole) if torch.equal(each, one)), None) for one in own]
    if None in kept:
        raise SystemExit(f"layer {kept.index(None)} of the student is no layer of the teacher: give its own teacher")
    return [number for number in kept if number is not None]


def inputs_of_layers(lm: LanguageModel, ids: Tensor) -> list[Tensor]:
    """Return the inputs of all layers, and of the norm behind the last one."""
    found = list[Tensor]()
    modules = [*lm.backbone.layers, lm.backbone.norm]  # type: ignore[misc]
    hooks = [each.register_forward_pre_hook(lambda _, args: found.append(args[0])) for each in modules]
    lm.backbone(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


class FoundError(Exception):
    """Ends a forward pass, because the rest of it is not needed."""


def call_of_first_layer(lm: LanguageModel, ids: Tensor) -> dict[str, Any]:
    """Return all arguments of the first layer by name; those besides the hidden states are the same for all layers."""
    found = dict[str, Any]()

    def end(_: nn.Module, args: tuple[Tensor], options: dict[str, Any]) -> None:
        found.update(options, hidden_states=args[0])
        raise FoundError

    hook = lm.backbone.layers[0].register_forward_pre_hook(end, with_kwargs=True)  # type: ignore[index, union-attr]
    try:
        lm.backbone(input_ids=ids, use_cache=False)
    except FoundError:
        return found
    finally:
        hook.remove()
    raise AssertionError("the first layer was not called")


if __name__ == "__main__":
    main()

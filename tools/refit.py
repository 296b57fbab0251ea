"""Bring a student that lacks layers of its teacher nearer to it by least squares, before any training.

    python tools/refit.py TEACHER STUDENT TARGET [--answers 128] [--strength 0.5]

Each layer of the student gets a new last matrix (`mlp.down_proj`). With it, the output of the layer is as near as
possible to what the next layer of the student got in the teacher: squared distances, relative to the size of that
input, summed over the tokens of the teacher's answers. So a layer makes up for the missing layers behind it, and for
errors of the layers before it, which are refitted first. TARGET is an ordinary directory, like STUDENT.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastest_format import fastest_format
from real_models import TEMPERATURE, Answer, answers, padded, questions, write
from slipstream.data.tokenizers import load_tokenizer
from slipstream.engines.native.model import LanguageModel, load_model

TOKENS = 96
"""Maximum length of an answer in tokens, as in configs/real.toml."""
ROWS = 16
"""Number of answers in one forward pass."""
STRENGTH = 0.5
"""Weight that holds a matrix at its old value, relative to the mean square of its inputs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("teacher")
    parser.add_argument("student")
    parser.add_argument("target", type=Path)
    parser.add_argument("--prompts", type=Path, default=Path("build/real/train.jsonl"))
    parser.add_argument("--answers", type=int, default=128)
    parser.add_argument("--strength", type=float, default=STRENGTH, help="how much a matrix is held at its old value")
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


class Texts:
    """A few answers in one batch, and what the layers of the teacher get for them."""

    def __init__(self, teacher: LanguageModel, drawn: Sequence[Answer]) -> None:
        self.real = nn.utils.rnn.pad_sequence([torch.ones(len(each.ids)).bool() for each in drawn], batch_first=True)
        self.real[:, 0] = False  # states of a first token are hundreds of times as large as all others
        self.inputs = list[Tensor]()
        """Inputs of all layers, and of the norm behind the last one."""
        self.call = dict[str, Any]()
        """Arguments of a layer besides the hidden states; they are the same for all layers of teacher and student."""

        def note(_: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any]) -> None:
            self.call = self.call or {name: each for name, each in options.items() if name != "hidden_states"}
            self.inputs.append(args[0] if args else options["hidden_states"])

        modules = [*teacher.backbone.layers, teacher.backbone.norm]  # type: ignore[misc]
        hooks = [each.register_forward_pre_hook(note, with_kwargs=True) for each in modules]
        teacher.backbone(input_ids=padded(drawn), use_cache=False)
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def refit(
    teacher: LanguageModel, student: LanguageModel, drawn: Sequence[Answer], strength: float
) -> list[tuple[float, float]]:
    """Refit all layers of the student, and return the relative squared error of each before and after."""
    texts = [Texts(teacher, drawn[start : start + ROWS]) for start in range(0, len(drawn), ROWS)]
    states, errors = [each.inputs[0] for each in texts], list[tuple[float, float]]()
    following = [*kept_layers(teacher, student)[1:], len(teacher.backbone.layers)]  # type: ignore[arg-type]
    for layer, target in zip(student.backbone.layers, following, strict=True):  # type: ignore[arg-type]
        states, before, after = refit_layer(layer, states, texts, target, strength)
        errors.append((before, after))
    return errors


def refit_layer(
    layer: nn.Module, states: Sequence[Tensor], texts: Sequence[Texts], target: int, strength: float = STRENGTH
) -> tuple[list[Tensor], float, float]:
    """Change the last matrix of a layer so that its output is near to the input `target` of the teacher.

    `states` are the inputs of the layer. Return its new outputs, and its relative error before and after.
    """
    matrix: nn.Linear = layer.mlp.down_proj  # type: ignore[union-attr, assignment]
    features = list[Tensor]()
    hook = matrix.register_forward_pre_hook(lambda _, args: features.append(args[0]))
    outputs = [layer(each, **some.call) for each, some in zip(states, texts, strict=True)]
    hook.remove()
    gram = torch.zeros(matrix.in_features, matrix.in_features, dtype=torch.float64)
    cross = torch.zeros(matrix.in_features, matrix.out_features, dtype=torch.float64)
    squares = count = 0.0
    for x, y, some in zip(features, outputs, texts, strict=True):
        wanted = some.inputs[target][some.real]
        size = wanted.square().mean(-1, keepdim=True).sqrt()
        x, missing = x[some.real] / size, (wanted - y[some.real]) / size
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


if __name__ == "__main__":
    main()

"""Adapter directories: written as PEFT reads them, read as PEFT writes them, trained on, and refused by name."""

import asyncio
import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from slipstream.cli import main
from slipstream.config.learner import LearnerConfig, LoraConfig
from slipstream.config.losses import ReverseKLMC
from slipstream.data.tokenizers import load_tokenizer
from slipstream.engines.native.model import load_model, with_adapters
from slipstream.errors import ModelError
from slipstream.models.adapters import adapter_of
from slipstream.models.model_card import accuracies, head, loading, metadata_of
from slipstream.models.resolve import model_path
from slipstream.objective.method import Method
from slipstream.plan.engine_plans import ModelPlan
from slipstream.run_dir.writing import read_lines
from slipstream.runtimes.build import build_model
from support.engines import native_learner
from support.tiny_models import make_model

IDS = torch.arange(2, 20)[None]
EXACT = {"atol": 1e-10, "rtol": 1e-10}


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture
def base(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    make_model(getattr(request, "param", "qwen3"), dtype=torch.float64).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def exported(base: Path, to: Path, lora: LoraConfig) -> Path:
    """Save adapters that differ from their initial values, as a learner does at the end."""
    lm = with_adapters(load_model(str(base), dtype="float64", device="cpu"), lora, seed=7)
    with torch.no_grad():
        for parameter in lm.model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    settings = LearnerConfig(dtype="float64", lora=lora)
    learner = native_learner(lm, method=Method(loss=ReverseKLMC(m=3)), config=settings, updates=9)
    to.mkdir()
    asyncio.run(learner.save(to, optimizer=False))
    learner.close()
    return to / "adapter"


def plain(path: Path) -> torch.Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager"))


LORAS = {"some": LoraConfig(rank=2, alpha=3.0, targets=("q_proj",)), "all": LoraConfig(rank=3)}


@pytest.mark.parametrize("base", ["qwen3", "llama", "phi", "gemma3-window"], indirect=True)
@pytest.mark.parametrize("lora", LORAS.values(), ids=LORAS)
def test_peft_finds_in_it_what_is_merged_beside_it(base: Path, lora: LoraConfig, tmp_path: Path) -> None:
    adapter = exported(base, tmp_path / "final", lora)
    merged = plain(tmp_path / "final")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, attn_implementation="eager")
    theirs = PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False)
    torch.testing.assert_close(logits(theirs), merged, **EXACT)
    assert not torch.allclose(plain(base), merged, atol=1e-3)
    said = json.loads((adapter / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["base_model_name_or_path"]) == (lora.rank, lora.alpha, str(base))
    assert lora is LORAS["all"] or said["target_modules"] == ["q_proj"]


@pytest.mark.parametrize("lora", LORAS.values(), ids=LORAS)
def test_we_find_in_it_what_is_merged_beside_it(base: Path, lora: LoraConfig, tmp_path: Path) -> None:
    adapter = exported(base, tmp_path / "final", lora)
    merged = plain(tmp_path / "final")
    assert model_path(str(adapter)) == str(base)
    torch.testing.assert_close(logits(load_model(str(adapter), dtype="float64", device="cpu").model), merged, **EXACT)
    found = adapter_of(str(adapter))
    assert found is not None and (found.rank, found.alpha) == (lora.rank, lora.alpha)
    own = LoraConfig(rank=found.rank, alpha=found.alpha, targets=found.targets)
    begun = build_model(ModelPlan(name=str(adapter), dtype="float64", device="cpu", lora=own))
    torch.testing.assert_close(logits(begun.model), merged, **EXACT)
    trained = [name for name, parameter in begun.model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * len(found.layers) and all(".lora_" in name for name in trained)


def made_by_peft(base: Path, to: Path, **options: Any) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, attn_implementation="eager")
    torch.manual_seed(0)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, "target_modules": "all-linear"}
    model = get_peft_model(model, PeftConfig(**settings | options), autocast_adapter_dtype=False)
    model.save_pretrained(to)
    torch.save(logits(model), to / "logits.pt")
    return to


@pytest.mark.parametrize(
    "options",
    [{}, {"target_modules": r".*self_attn\.(q|v)_proj"}, {"layers_to_transform": [1], "target_modules": ["up_proj"]}],
    ids=["all-linear", "by a pattern", "of one layer"],
)
def test_what_peft_writes_is_a_teacher(base: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    adapter = made_by_peft(base, tmp_path / "theirs", **options)
    found = load_model(str(adapter), dtype="float64", device="cpu").model
    torch.testing.assert_close(logits(found), torch.load(adapter / "logits.pt"), **EXACT)


UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "another scale": ({"use_rslora": True}, "has use_rslora = true, which is not supported"),
    "magnitudes": ({"use_dora": True}, "has use_dora = true"),
    "biases": ({"bias": "all"}, 'has bias = "all"'),
    "whole layers": ({"modules_to_save": ["norm"]}, 'has modules_to_save = ["norm"]'),
    "several ranks": ({"rank_pattern": {"q_proj": 2}}, "has rank_pattern = "),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_does_more_is_refused_by_name(base: Path, tmp_path: Path, kind: str) -> None:
    options, message = UNKNOWN[kind]
    adapter = made_by_peft(base, tmp_path / "theirs", **options)
    with pytest.raises(ModelError, match=r"adapter_config.json .*: merge this adapter into its base") as caught:
        load_model(str(adapter), dtype="float64", device="cpu")
    assert message in str(caught.value)


def edited(**changes: Any) -> Callable[[Path], None]:
    def edit(adapter: Path) -> None:
        file = adapter / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def reshaped(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def edit(adapter: Path) -> None:
        file = adapter / "adapter_model.safetensors"
        held = load_file(file)
        full = next(each for each in held if name in each)
        save_file({**held, full: change(held[full]).contiguous()}, file)

    return edit


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "another type": (edited(peft_type="IA3"), "is an adapter of type 'IA3'; only LORA is supported"),
    "no rank": (edited(r=0), "has r = 0 and lora_alpha = 6"),
    "no base": (edited(base_model_name_or_path=None), "names no base"),
    "a base that is gone": (edited(base_model_name_or_path="/no/where"), "base model: /no/where: no such directory"),
    "not JSON": (lambda a: (a / "adapter_config.json").write_text("{"), "adapter_config.json: cannot be read"),
    "no object": (lambda a: (a / "adapter_config.json").write_text("[]"), "adapter_config.json: is not a JSON object"),
    "no weights": (lambda a: (a / "adapter_model.safetensors").unlink(), "adapter_model.safetensors: no such file"),
    "cut weights": (
        lambda a: (a / "adapter_model.safetensors").write_bytes((a / "adapter_model.safetensors").read_bytes()[:99]),
        "adapter_model.safetensors: cannot be read: Error while deserializing header",
    ),
    "another rank": (reshaped("q_proj.lora_A", lambda t: t[:3]), "which does not fit an adapter of rank 4"),
    "no numbers": (
        reshaped("q_proj.lora_A", lambda t: t * torch.nan),
        "its weights are damaged: 1 of them contain values",
    ),
    "other inputs": (reshaped("q_proj.lora_A", lambda t: t[:, :9]), "has 9 inputs and 32 outputs, but that layer of"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_broken_is_one_line(base: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage, message = BROKEN[kind]
    adapter = made_by_peft(base, tmp_path / "theirs")
    damage(adapter)
    with pytest.raises(ModelError) as caught:
        load_model(str(adapter), dtype="float64", device="cpu")
    said = str(caught.value)
    assert message in said and "\n" not in said and str(adapter) in said


def test_layers_that_the_base_does_not_have_are_named(base: Path, tmp_path: Path) -> None:
    adapter = made_by_peft(base, tmp_path / "theirs")
    make_model("phi").save_pretrained(tmp_path / "other")
    edited(base_model_name_or_path=str(tmp_path / "other"))(adapter)
    with pytest.raises(ModelError, match=r"has an adapter for model.layers.*, but .*/other has no such linear layer"):
        load_model(str(adapter), dtype="float64", device="cpu")


def test_an_adapter_of_an_adapter_is_refused(base: Path, tmp_path: Path) -> None:
    first, second = made_by_peft(base, tmp_path / "first"), made_by_peft(base, tmp_path / "second")
    edited(base_model_name_or_path=str(first))(second)
    with pytest.raises(ModelError, match="is an adapter of .*/first, which is itself an adapter"):
        load_model(str(second), dtype="float64", device="cpu")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_head_that_is_also_the_embedding_has_none(base: Path, tmp_path: Path) -> None:
    adapter = made_by_peft(base, tmp_path / "theirs", target_modules=["lm_head"])
    with pytest.raises(ModelError, match="holds .*base_layer.weight', which is neither matrix A nor B"):
        load_model(str(adapter), dtype="float64", device="cpu")
    file = adapter / "adapter_model.safetensors"
    save_file({name: held for name, held in load_file(file).items() if ".lora_" in name}, file)
    with pytest.raises(ModelError, match="has an adapter for lm_head, but .* has no such linear layer"):
        load_model(str(adapter), dtype="float64", device="cpu")


# --- from run to run --------------------------------------------------------------------------------------------------

CONFIG = """
student = "models/student"
updates = 2
[data]
train = "rows.jsonl"
eval = "rows.jsonl"
[teachers.main]
model = "models/teacher"
[sampler]
max_tokens = 6
slots = 8
[loss]
m = 2
[learner]
batch_size = 4
lr = 1e-2
[task]
reward = "exact"
[eval]
every = 2
[runtime]
kind = "inline"
device = "cpu"
"""
LORA = "[learner.lora]\nrank = 2\nalpha = 8.0\n"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Path:
    """A run that trained adapters."""
    home = tmp_path_factory.mktemp("runs")
    shutil.copytree(models_dir, home / "models")
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(6)]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "plain.toml").write_text(CONFIG)
    (home / "lora.toml").write_text(CONFIG + LORA)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert main(["train", "lora.toml", "--output", "first"]) == 0
    return home


@pytest.fixture
def home(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(first, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


def scores(capsys: pytest.CaptureFixture[str], model: str) -> list[float]:
    capsys.readouterr()
    assert main(["eval", model, "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    return [line["avg@1"], line["greedy"], line["length"]]


def test_a_run_goes_on_with_the_adapter_of_another(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = scores(capsys, "first")
    assert scores(capsys, "first/final/adapter") == before
    adapter = "first/final/adapter"
    assert main(["train", "plain.toml", "--student", adapter, "--output", "second", "--updates", "4"]) == 0
    said = capsys.readouterr().out
    assert "learner.lora: rank 2, alpha 8, at down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, as" in said
    lora = tomllib.loads((home / "second/config.toml").read_text())["learner"]["lora"]
    assert (lora["rank"], lora["alpha"], len(lora["targets"])) == (2, 8.0, 7)
    lines = [line for line in read_lines(home / "second/metrics.jsonl") if line["kind"] == "eval"]
    assert [lines[0]["accuracy"], lines[0]["length/mean"]] == [before[0], before[2]], "it begins where that ended"
    one, other = (load_file(home / run / "final/adapter/adapter_model.safetensors") for run in ("first", "second"))
    assert one.keys() == other.keys() and all(not torch.equal(one[name], other[name]) for name in one)
    base = json.loads((home / "second/final/adapter/adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(first_base(home))
    assert main(["resume", "second", "--updates", "5"]) == 0, "the adapter is still what was asked for"
    assert (
        main(["train", "lora.toml", "--teachers.main.model", adapter, "--output", "third", "--student", adapter]) == 0
    )


def first_base(home: Path) -> str:
    return json.loads((home / "first/final/adapter/adapter_config.json").read_text())["base_model_name_or_path"]


def test_a_tokenizer_that_lies_beside_an_adapter_is_its_own(home: Path) -> None:
    adapter = home / "first/final/adapter"
    assert load_tokenizer(str(adapter)).chat_template == load_tokenizer("models/student").chat_template
    own = load_tokenizer("models/student")
    own.chat_template = "{{ messages[0].content }}"
    own.save_pretrained(adapter)
    assert load_tokenizer(str(adapter)).chat_template == "{{ messages[0].content }}"


CONTRADICTIONS = {
    "rank": (("--learner.lora.rank", "3"), "learner.lora.rank = 3, and first/final/adapter is an adapter with 2"),
    "alpha": (
        ("--learner.lora.alpha", "1.5"),
        "learner.lora.alpha = 1.5, and first/final/adapter is an adapter with 8",
    ),
    "targets": (
        ("--learner.lora.targets", '["q_proj"]'),
        'learner.lora.targets = ["q_proj"], and first/final/adapter is an adapter with ["down_proj", "gate_proj",',
    ),
    "vLLM": (
        ("--teachers.main.model", "first/final/adapter", "--teachers.main.engine", "vllm"),
        "first/final/adapter is an adapter, and vLLM takes only whole models here",
    ),
    "eight bits": (
        ("--sampler.quantisation", "int8"),
        "sampler.quantisation quantises published weights, and first/final/adapter is an adapter, which is published "
        "alone: drop it",
    ),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
@pytest.mark.parametrize("command", [["train"], ["config", "--check"]], ids=" ".join)
def test_a_config_that_contradicts_an_adapter_is_refused(
    home: Path, command: list[str], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words, message = CONTRADICTIONS[kind]
    assert main([command[0], "plain.toml", *command[1:], "--student", "first/final/adapter", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and message in said


def test_the_same_settings_in_other_words_are_no_contradiction(home: Path) -> None:
    both = ["--student", "first/final/adapter", "--learner.lora.targets", "all-linear", "--learner.lora.rank", "2"]
    assert main(["config", "plain.toml", "--check", *both]) == 0


def test_an_adapter_that_holds_no_numbers_is_found_out_by_a_check(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reshaped("q_proj.lora_B", lambda t: t * torch.nan)(home / "first/final/adapter")
    for words in (["--student", "first/final/adapter"], ["--teachers.main.model", "first/final/adapter"]):
        capsys.readouterr()
        assert main(["config", "plain.toml", "--check", *words]) == 2
        assert "first/final/adapter: its weights are damaged: 1 of them contain values" in capsys.readouterr().err
        assert main(["train", "plain.toml", *words, "--output", "new"]) == 2
        assert "first/final/adapter: its weights are damaged: 1 of them contain values" in capsys.readouterr().err


def test_of_layers_of_one_name_all_must_have_an_adapter_to_be_trained(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A teacher may have fewer."""
    model = AutoModelForCausalLM.from_pretrained("models/teacher")
    settings = PeftConfig(r=2, target_modules=["q_proj"], layers_to_transform=[1], init_lora_weights=False)
    get_peft_model(model, settings).save_pretrained("some")
    capsys.readouterr()
    assert main(["config", "plain.toml", "--check", "--student", "some"]) == 2
    assert "has an adapter for some of the layers named q_proj, but none" in capsys.readouterr().err
    assert main(["config", "plain.toml", "--check", "--teachers.main.model", "some"]) == 0
    edited(base_model_name_or_path="models/student")(Path("some"))
    assert main(["config", "plain.toml", "--check", "--teachers.main.model", "some"]) == 2
    assert "but models/student has no such linear layer" in capsys.readouterr().err


# --- what is told of it -----------------------------------------------------------------------------------------------


def test_the_card_says_what_was_trained_on_what_and_what_came_of_it(home: Path) -> None:
    text = (home / "first/final/README.md").read_text()
    front, title, *rest = text.split("\n\n")
    assert front == "---\nlibrary_name: transformers\ntags:\n- on-policy-distillation\n---" and title == "# first"
    lines = read_lines(home / "first/metrics.jsonl")
    trained = [line for line in lines if line["kind"] == "train"]
    held_out = [line for line in lines if line["kind"] == "eval"]
    tokens = sum(line["tokens"] for line in trained)
    for told in (
        "| student | `models/student` |",
        "| teacher main | `models/teacher` |",
        "| prompts | `rows.jsonl` |",
        "| graded by | `exact` |",
        "| schedule | async (tau = 4.0",
        "| adapters | rank 2, alpha 8, merged into this model, and kept separately in `adapter` |",
        f"| updates | 2, on 8 responses with {tokens:,.0f} tokens in total |",
        f"| loss | {trained[0]['loss']:.4g} | {trained[-1]['loss']:.4g} |",
        f"| `rows.jsonl` | 0 | 6 | {held_out[0]['accuracy']:.4g} |",
        f"| `rows.jsonl` | 2 | 6 | {held_out[-1]['accuracy']:.4g} |",
        'AutoPeftModelForCausalLM.from_pretrained("first/final/adapter")',
    ):
        assert told in text, told
    assert "None" not in text and "policy" not in text.replace("on-policy", "")
    sections = [part for part in rest if part.startswith("##")]
    assert sections == ["## From the first update to the last", "## Held-out prompts", "## How to load it"]
    assert "README.md" in json.loads((home / "first/final/manifest.json").read_text())


@pytest.mark.parametrize(
    ("config", "targets", "shown"),
    [
        ({"num_hidden_layers": 2}, "all-linear", True),
        ({"n_routed_experts": 8}, "all-linear", False),
        ({"n_routed_experts": 8}, ["q_proj", "up_proj"], False),
        ({"text_config": {"num_experts": 8}}, ["q_proj", "v_proj"], True),
    ],
)
def test_the_card_shows_no_way_that_peft_would_misread(
    tmp_path: Path, config: dict[str, Any], targets: Any, shown: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = {"student": str(tmp_path), "learner": {"lora": {"targets": targets}}}
    assert ("AutoPeftModel" in loading(run, tmp_path / "final")) is shown


@pytest.mark.parametrize("now", ["own.jsonl", None, {"code": "code.jsonl"}, {"math": "new.jsonl"}])
def test_a_card_shows_evaluations_of_sets_that_have_left_the_config(now: Any) -> None:
    lines = [{"set": name, "update": 3, "samples": 8.0, "accuracy": 0.5} for name in ("math", "")]
    found = [row[0] for row in accuracies({"data": {"eval": now}}, lines)]
    assert found[0] == ("`new.jsonl`" if now == {"math": "new.jsonl"} else "`math`")


def test_a_card_reads_the_license_of_a_students_card_in_any_encoding(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(b"---\nlicense: mit\n---\nf\xfcr")
    assert metadata_of(str(tmp_path)) == {"license": "mit"}


def test_a_card_repeats_base_and_license_of_the_students_own_card_and_says_how_to_serve_it(tmp_path: Path) -> None:
    student = tmp_path / "student"
    student.mkdir()
    assert metadata_of(str(student)) == {}
    (student / "README.md").write_text(
        "---\nlicense: apache-2.0\nbase_model: some/Base-1B\ntags:\n- x\n---\nlicense: no\n"
    )
    assert metadata_of(str(student)) == {"base_model": "some/Base-1B", "license": "apache-2.0"}
    front = head({"student": str(student)}).splitlines()
    assert front[:4] == ["---", "base_model: some/Base-1B", "license: apache-2.0", "library_name: transformers"]
    text = loading({"student": "", "learner": {}}, Path("final"))
    assert "\nvllm serve final --dtype bfloat16\n" in text
    assert "\npython -m sglang.launch_server --model-path final --dtype bfloat16\n" in text
    assert "\nLLAMA_CPP=llama.cpp slipstream export . --gguf student.gguf\nllama-server --model student.gguf\n" in text

"""`config --check --shapes`: a config is checked by the config.json of its models alone."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.cli import main
from slipstream.commands.config import UNSEEN
from slipstream.config.file import load, parse
from slipstream.config.learner import LoraConfig
from slipstream.engines.native.config import fully_attended, load_config
from slipstream.errors import ConfigError, ModelError
from slipstream.models.resolve import HERE, model_path, shipped_shapes, without_weights
from slipstream.plan.gpus import Gpus
from slipstream.plan.placement import GIB, adapted, needs, shape_of
from slipstream.plan.plan import check_shapes, plan
from slipstream.studies.study import Study
from zoo import families

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"^# slipstream (config \S+ --check --shapes --gpus [\dx ]+)$", re.MULTILINE)
RECIPES = sorted(path for path in ROOT.glob("configs/**/*.toml") if COMMAND.search(path.read_text("utf-8")))
STUDIES = sorted(ROOT.glob("configs/recipes/lr/*.toml"))
ASYNC_OPD = "configs/recipes/asyncopd_4b.toml"
PUBLISHED = {
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-Math-72B-Instruct": 72_706_203_648,
    "Qwen/Qwen2.5-Math-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-0.6B-Base": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30_532_122_624,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-4B-Base": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-8B-Base": 8_190_735_360,
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": 30_532_122_624,
}
"""Numbers of parameters that the models' pages on the hub show."""


def shapes_of(config: str, *words: str) -> list[str]:
    return ["config", config, "--check", "--shapes", *words]


# --- shapes that ship -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_shape_has_the_published_number_of_parameters(name: str) -> None:
    assert shape_of(f"shapes:{name}").parameters == PUBLISHED[name]


def test_every_shipped_shape_is_compared_and_has_no_weights() -> None:
    assert shipped_shapes() == sorted(PUBLISHED)
    assert [path.name for path in Path(model_path("shapes:Qwen/Qwen3-8B")).iterdir()] == ["config.json"]


def test_names_without_a_shipped_shape_stay(tmp_path: Path) -> None:
    assert without_weights("Qwen/Qwen3-8B") == "shapes:Qwen/Qwen3-8B"
    assert without_weights("builtin:student") == "builtin:student"
    assert without_weights("some/model") == "some/model"
    (tmp_path / "config.json").touch()
    assert without_weights(str(tmp_path)) == str(tmp_path)
    with pytest.raises(ModelError, match=r"no shapes of 'Qwen/Qwen3-9B' are shipped; did you mean 'Qwen/Qwen3-8B'"):
        load_config("shapes:Qwen/Qwen3-9B")


@pytest.mark.parametrize(("max_tokens", "refused"), [(15, False), (16, True)])
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_a_sparse_attention_is_refused_where_ties_of_its_index_decide(
    family: str, max_tokens: int, refused: bool, tmp_path: Path
) -> None:
    """It selects 16 keys. Most scores of an index with one head are 0, and padding decides among these: see below."""
    families.config_of(family).save_pretrained(tmp_path)
    sampler = {"max_tokens": max_tokens, "engine": "vllm"}  # with one token of a prompt
    config = parse({"student": str(tmp_path), "teachers": {"main": {"model": str(tmp_path)}}, "sampler": sampler})
    if not refused:
        check_shapes(config)
        return
    with pytest.raises(ConfigError, match=r"^learner: sequences have up to 17 tokens, and .* attends to 16 selected"):
        check_shapes(config)


@torch.no_grad()
@pytest.mark.parametrize(("selected", "changes"), [(20, False), (19, True)])
def test_padding_changes_a_long_sequence_and_none_within_the_selection(selected: int, changes: bool) -> None:
    config = families.config_of("deepseek_v32")
    config.index_n_heads, config.index_topk = 1, selected
    assert fully_attended(config) == selected
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(2, 31, (2, 40), generator=torch.Generator().manual_seed(0))
    alone = model(ids[:1, :20], use_cache=False).logits[0]
    padded = model(ids.where(torch.tensor([[True] * 20 + [False] * 20, [True] * 40]), 0), use_cache=False).logits[
        0, :20
    ]
    assert bool((alone - padded).abs().max() > 1e-3) == changes


# --- recipes ----------------------------------------------------------------------------------------------------------


def test_the_recipes_name_their_check() -> None:
    unnamed = set(ROOT.glob("configs/recipes/*.toml")) - set(RECIPES)
    assert unnamed == set() and len(RECIPES) >= 11 and len(STUDIES) == 4


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_its_gpus(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    found = COMMAND.search(path.read_text("utf-8"))
    assert found is not None
    words = shlex.split(found[1])
    assert words[1] == str(path.relative_to(ROOT))
    assert main(words) == 0
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.startswith("# warning")] == []
    assert all(f"# not looked at: {each}" in said for each in UNSEEN)
    if "# all engines share one GPU" not in said:
        number = sum(Gpus.parse(words[words.index("--gpus") + 1 :]).machines)
        assert f"# {number} GPUs are needed (" in said and f"), of {number}\n" in said  # every GPU has something to do


PAGE = (ROOT / "docs" / "recipes.md").read_text("utf-8").replace("\\\n", " ")


@pytest.mark.parametrize("command", re.findall(r"^slipstream (config .*--shapes.*)$", PAGE, re.MULTILINE))
def test_a_check_on_the_page_of_recipes_passes(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)) == 0
    assert "# warning" not in capsys.readouterr().out


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_cell_of_a_study_of_learning_rates_fits_its_gpus(path: Path) -> None:
    gpus = re.search(r"^# GPUs: (\S+)$", path.read_text("utf-8"), re.MULTILINE)
    assert gpus is not None
    points = Study.load(path).points
    assert [point.config.learner.lr for point in points] == [1e-6, 3e-6, 1e-5, 2e-5, 5e-5]
    assert check_shapes(points[0].config, Gpus.parse([gpus[1]])).warnings == ()


def test_the_memory_of_a_recipe_is_what_its_shapes_amount_to() -> None:
    found = check_shapes(load(ROOT / ASYNC_OPD), Gpus.parse(["8x167"]))
    parts = {need.name: need.parts for need in needs(found.engines)}
    assert sorted(parts) == [
        *("learner-0", "learner-1", "learner-2", "sampler-0", "sampler-1", "sampler-2", "sampler-3", "teacher main"),
    ]
    student, teacher = PUBLISHED["Qwen/Qwen3-4B-Base"], PUBLISHED["Qwen/Qwen3-30B-A3B-Instruct-2507"]
    learner = parts["learner-1"]
    assert learner["weights"] == learner["gradients"] == pytest.approx(student * 4 / 3)
    assert learner["moments"] == pytest.approx(student * 8 / 3)
    assert parts["sampler-0"]["weights"] == 2 * student
    assert parts["teacher main"] == {
        "weights": 2 * teacher,
        "~keys and values of one sequence": 18_433 * 48 * 2 * 4 * 128 * 2,  # positions, layers, k and v, heads, width
    }


def test_a_learner_with_threads_of_its_own_is_listed_with_them() -> None:
    tree = {"student": "builtin:student", "data": {"train": "builtin:arithmetic"}, "learner": {"threads": 2}}
    tree |= {"teachers": {"main": {"model": "builtin:teacher"}}, "sampler": {"max_tokens": 80}}
    places = {need.name: need.where for need in needs(plan(parse(tree)).engines, gpu=False)}
    assert places == {"learner": "2 CPU threads", "sampler": "1 CPU thread", "teacher main": "1 CPU thread"}


# --- refusals and warnings --------------------------------------------------------------------------------------------

REFUSED = {
    "too few GPUs": (
        ["--gpus", "7x167"],
        "runtime.device = 'cuda': 8 GPUs are needed (learner 3, sampler 4, teacher main 1), there are 7; lower the",
    ),
    "too little memory": (["--gpus", "8x40"], "teacher main: a GPU, 58.6 GiB (weights 56.9 GiB, "),
    "a long answer": (
        ["--sampler.max_length", "40000", "--sampler.max_tokens", "36000"],
        "sampler.max_length = 40000 exceeds the context of 32768 of shapes:Qwen/Qwen3-4B-Base: lower it",
    ),
    "vLLM's own limit": (
        ["--sampler.engine_args.max_model_len", "8192"],
        "sampler.max_length = 18432 exceeds the context of 8192",
    ),
    "more devices than layers": (
        ["--teachers.main.engine", "native", "--teachers.main.devices", "49"],
        "teachers.main.devices = 49: shapes:Qwen/Qwen3-30B-A3B-Instruct-2507 has 48 layers to split: write 48 or less",
    ),
    "a teacher's heads": (
        ["--teachers.main.engine_args.tensor_parallel_size", "3"],
        "teachers.main.engine_args.tensor_parallel_size = 3 does not divide the 32 heads",
    ),
    "the learner's budget": (
        ["--learner.token_budget", "9000"],
        "learner.token_budget = 9000 is less than the longest sequence of 18432 tokens",
    ),
    "a native teacher's budget": (
        ["--teachers.main.engine", "native", "--teachers.main.token_budget", "9000"],
        "teachers.main.token_budget = 9000 is less than the longest sequence of 18432 tokens",
    ),
    "a small vocabulary": (
        ["--student", "Qwen/Qwen2.5-Math-7B-Instruct", "--sampler.max_length", "4096", "--sampler.max_tokens", "2048"],
        "teachers.main: shapes:Qwen/Qwen3-30B-A3B-Instruct-2507 has 151936 embeddings, "
        "shapes:Qwen/Qwen2.5-Math-7B-Instruct has 152064: the teacher could not score all tokens",
    ),
    "half a head": (
        ["--sampler.engine_args.tensor_parallel_size", "3"],
        "sampler.engine_args.tensor_parallel_size = 3 does not divide the 32 heads of shapes:Qwen/Qwen3-4B-Base: write "
        "one of 1, 2, 4, 8, 16, 32",
    ),
    "an adapter that vLLM has no room for": (
        ["--learner.lora.rank", "600"],
        "learner.lora.rank = 600: vLLM has no room for more than 512; write less, or sampler.engine = 'native'",
    ),
    "an argument of adapters": (
        ["--sampler.engine_args.max_lora_rank", "8"],
        "sampler.engine_args.max_lora_rank cannot be set: learner.lora sets it",
    ),
    "an argument that is taken": (["--sampler.engine_args.dtype", "half"], "sampler.engine_args.dtype cannot be set"),
    "a split of a file": (
        ["--data.split", "test"],
        "data.split = 'test' does nothing: deepmath_difficulty6.parquet has",
    ),
    "no number of GPUs": (
        ["--gpus", "x80"],
        "--gpus x80: write the number of GPUs of each machine (1 to 999), for example 8 8",
    ),
    "unequal GPUs": (["--gpus", "8x80", "8"], "equal on all machines"),
    "no GPU": (["--gpus", "8x80", "--runtime.device", "cpu"], '--gpus: runtime.device = "cpu" uses no GPU'),
}


@pytest.mark.parametrize(("words", "line"), REFUSED.values(), ids=REFUSED)
def test_what_shapes_can_tell_is_refused(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shapes_of(str(ROOT / ASYNC_OPD), *words)) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ") and line in said


def test_a_publish_of_an_adapter_of_a_4b_student_has_66_megabytes() -> None:
    """Rank times inputs plus outputs, 2 bytes each; 36 layers of q, k, v, o, gate, up and down. All weights: 8.0 GB."""
    hidden, inner, heads, groups = 2560, 9728, 32 * 128, 8 * 128
    layer = (hidden + heads) + 2 * (hidden + groups) + (heads + hidden) + 3 * (hidden + inner)
    assert 36 * layer * 16 * 2 == 66_060_288
    found = adapted("shapes:Qwen/Qwen3-4B-Base", LoraConfig(rank=16)).values()
    assert sum(part.in_features + part.out_features for part in found) == 36 * layer
    assert 2 * PUBLISHED["Qwen/Qwen3-4B-Base"] == 8_044_936_192


def test_estimated_memory_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shapes_of(str(ROOT / ASYNC_OPD), "--gpus", "8x57")) == 0
    assert "# warning: teacher main: a GPU, 58.6 GiB" in capsys.readouterr().out


def test_engines_in_turns_fit_a_gpu_that_is_too_small_for_all_together(capsys: pytest.CaptureFixture[str]) -> None:
    words = shapes_of(str(ROOT / "configs" / "qwen3_0.6b_1gpu.toml"), "--schedule.kind", "sync")
    assert main([*words, "--gpus", "1x40"]) == 2
    assert "there are 40.0 GiB: " in (refused := capsys.readouterr().err) and ", or runtime.time_share" in refused
    assert main([*words, "--gpus", "1x80"]) == 0
    together = "all engines together: 77.5 GiB on the device; with runtime.time_share = true at most 39.7 GiB"
    assert together in capsys.readouterr().out
    assert main([*words, "--gpus", "1x40", "--runtime.time_share", "true"]) == 0
    assert "# turn of sampler: 29.7 GiB on the device, 14.2 GiB in host memory" in capsys.readouterr().out
    assert main([*words, "--gpus", "1x20", "--runtime.time_share", "true"]) == 2
    assert "sampler: the one GPU, 29.7 GiB" in capsys.readouterr().err


def test_flags_that_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--shapes"], ["--gpus", "8x80"]):
        assert main(["config", str(ROOT / ASYNC_OPD), *words]) == 2
        assert "write --check beside them" in capsys.readouterr().err
    assert main(["config", "--shapes"]) == 2


RUN = """
student = "{student}"

[teachers.main]
model = "builtin:teacher"

[sampler]
max_tokens = 20

[runtime]
kind = "inline"
device = "cpu"
"""
SAME = (
    ["--loss.kind", "forward_kl", "--loss.k", "9999"],
    ["--learner.dropout", "true"],
    ["--learner.lora.rank", "9999"],
    ["--learner.lora.targets", '["nothing"]'],
    ["--data.split", "test", "--data.train", "rows.jsonl"],
    ["--data.where.level", "3"],
    ["--data.prompt", "question"],
)


@pytest.mark.parametrize("words", SAME, ids=" ".join)
def test_the_line_of_a_refusal_is_that_of_a_whole_check(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN.format(student="builtin:student"))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    assert main(["config", "run.toml", "--check", *words]) == 2
    whole = capsys.readouterr().err
    assert main(shapes_of("run.toml", *words)) == 2
    assert capsys.readouterr().err == whole


def test_a_directory_with_a_config_alone_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alone").mkdir()
    shutil.copy(HERE / "student" / "config.json", tmp_path / "alone")
    (tmp_path / "run.toml").write_text(RUN.format(student="./alone"))
    assert main(["config", "run.toml", "--check"]) == 2
    capsys.readouterr()
    assert main(shapes_of("run.toml")) == 0
    said = capsys.readouterr().out
    assert "# ./alone: " in said and "# not looked at: memory of the GPUs" in said
    assert "sequences count as 21 tokens" in said and "placement" not in said


def test_heads_that_cannot_be_shared_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((HERE / "student" / "config.json").read_text())
    config |= {"num_attention_heads": 4, "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "run.toml").write_text(RUN.format(student=tmp_path))
    assert main(shapes_of(str(tmp_path / "run.toml"))) == 2
    assert "4 attention heads cannot share 3 heads of keys and values evenly" in capsys.readouterr().err


def test_gpus_are_read_as_a_number_and_gib() -> None:
    assert Gpus.parse(["8x80", "4x80"]) == Gpus((8, 4), 80 * GIB) and Gpus.parse(["8"]) == Gpus((8,), None)


def test_a_study_is_checked_by_shapes_without_weights(capsys: pytest.CaptureFixture[str]) -> None:
    study = str(ROOT / "configs/recipes/lr/4b.toml")
    assert main(["sweep", study, "--check", "--shapes", "--gpus", "4x80"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "all, learner.lr = 1e-06:"
    assert lines.count("  4 GPUs are needed (learner 2, sampler 1, teacher main 1), of 4") == sum(
        not line.startswith(" ") for line in lines
    )
    assert main(["sweep", study, "--check", "--shapes", "--gpus", "2x80"]) == 2
    assert main(["sweep", study, "--shapes"]) == 2
    assert main(["sweep", study, "--check", "--gpus", "4x80"]) == 2
    assert "error: --gpus of a study goes with --shapes" in capsys.readouterr().err

"""``model = "transformers"`` in a job file."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator

from asyncpipe.cli import main
from asyncpipe.errors import JobFileError, OptionError
from asyncpipe.train.entry import find_entry
from asyncpipe.train.job_file import load_job
from asyncpipe.train.progress import TrainingSummary
from asyncpipe.train.training_run import TrainingRun
from asyncpipe.train.transformers_entry import build

transformers = pytest.importorskip("transformers")

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
JOB = """
name = "small"
[job]
model = "transformers"
[job.parameters]
{data}
length = 12
held_out = 0.4
save = "{save}"
[job.parameters.config]
{config}
[pipeline]
devices = ["cpu:0", "cpu:1"]
microbatches = 3
{pipeline}
[training]
steps = {steps}
batch_size = 5
learning_rate = 1e-2
overlap = true
[snapshots]
folder = "{save}-snapshots"
every = 2
resume = true
[faults]
step_retries = 0
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text and lines, in the working directory."""
    monkeypatch.chdir(tmp_path)
    text = "The devices wait for each other. " * 30
    Path("text.txt").write_text(text, encoding="utf-8")
    lines = [text[: 3 + 2 * number] for number in reversed(range(20))]
    rows = [{"body": f"{number} {text[: 60 * (number % 3)]}"} for number in range(20)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    Path("lines.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines), encoding="utf-8")


def job_file(save: str, *, data: str = "text.txt", steps: int = 4, pipeline: str = "", parameters: str = "") -> Path:
    config = "\n".join(f"{key} = {json.dumps(value)}" for key, value in CONFIG.items())
    path = Path(f"{save}.toml")
    data = f'data = "{data}"' * bool(data) + f"\n{parameters}"
    path.write_text(JOB.format(save=save, data=data, steps=steps, pipeline=pipeline, config=config), encoding="utf-8")
    return path


def weights(folder: str) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForCausalLM"
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


async def run(path: Path) -> TrainingSummary:
    job = load_job(path)
    return await TrainingRun(job, find_entry(job)).run()


@pytest.mark.promise(
    "Bit-identical results",
    "Interrupted or not, on threads or in a worker: a job with a model of transformers has bit-identical weights.",
)
async def test_a_job_trains_and_writes_what_from_pretrained_reads():
    summary = await run(job_file("alone"))
    assert (summary.steps, summary.finished) == (4, Path("alone"))
    # Resumed in the middle, and in a worker process: the same bits.
    await run(job_file("again"))
    shutil.rmtree("again-snapshots/step-4")
    shutil.rmtree("again")
    assert (await run(job_file("again"))).steps == 4
    await run(job_file("workers", pipeline='workers = {"cpu:0" = "both", "cpu:1" = "both"}'))
    for name, value in weights("alone").items():
        assert torch.equal(value, weights("again")[name]), name
        assert torch.equal(value, weights("workers")[name]), name


@pytest.mark.promise("Right results", "The held-out loss of padded lines is the mean over all their real tokens.")
@pytest.mark.parametrize("parameters", ["", "pack = true"], ids=["padded", "packed"])
async def test_the_held_out_loss_of_lines_is_that_of_all_their_tokens(parameters):
    summary = await run(job_file("lines", data="lines.jsonl", parameters=parameters))
    model = transformers.AutoModelForCausalLM.from_pretrained("lines")
    # The last eight lines, of 12 to 3 bytes, were in two batches; a byte is the label of the one before.
    rows = [torch.tensor(list(b"The devices "[: 3 + 2 * number])) for number in reversed(range(8))]
    losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in rows]
    total = sum(loss * (len(row) - 1) for loss, row in zip(losses, rows, strict=True))
    assert summary.evaluation == pytest.approx(total / sum(len(row) - 1 for row in rows), rel=1e-5)


def test_lines_are_packed_only_where_they_do_not_see_each_other():
    with pytest.raises(OptionError, match="one text"):
        build(CONFIG, "text.txt", length=12, pack=True)
    bloom = {"model_type": "bloom", "hidden_size": 8, "n_layer": 2, "n_head": 2}
    with pytest.raises(OptionError, match="see each other"):
        build(bloom, "lines.jsonl", length=12, pack=True)


async def test_a_streamed_data_set_goes_on_where_a_resumed_run_left_it():
    pytest.importorskip("datasets")
    dataset = {"path": "json", "data_files": "rows.jsonl"}
    keys = "field = \"body\"\ndataset = {path = 'json', data_files = 'rows.jsonl'}"
    # 14 steps take more than an epoch.
    await run(job_file("alone", data="", steps=14, parameters=keys))
    await run(job_file("again", data="", steps=14, parameters=keys))
    shutil.rmtree("again-snapshots/step-14")
    shutil.rmtree("again")
    assert (await run(job_file("again", data="", steps=14, parameters=keys))).steps == 14
    for name, value in weights("alone").items():
        assert torch.equal(value, weights("again")[name]), name
    for given, said in [
        ({"field": "text", "dataset": dataset}, "no text in 'text'"),
        ({"field": "body", "dataset": dataset | {"split": "other"}}, "cannot be read"),
        ({"field": "body", "dataset": dataset, "data": "text.txt"}, "give data, a file, or dataset"),
    ]:
        with pytest.raises(OptionError, match=said):
            build(CONFIG, length=12, **given)
    with pytest.raises(OptionError, match="all needed for the evaluation"):
        build(CONFIG | {"max_position_embeddings": 512}, length=512, field="body", dataset=dataset)


def test_a_plan_of_the_job_is_what_it_trains_with(capsys):
    path = job_file("planned", steps=1)
    options = ["--microbatches", "3", "--steps", "1", "--schedules", "1f1b,gpipe", "--checkpoint", "never"]
    assert main(["plan", str(path), *options]) == 0
    Path("plan.toml").write_text(capsys.readouterr().out, encoding="utf-8")
    table = tomllib.loads(Path("plan.toml").read_text())["pipeline"]
    assert sum(table["balance"]) == 4, "embeddings, two layers and the head"
    assert main(["train", str(path), "--plan", "plan.toml", "--no-progress"]) == 0
    assert "model: planned" in capsys.readouterr().out


def test_lines_are_padded_and_each_is_drawn_once_an_epoch():
    workload = build(CONFIG, "lines.jsonl", length=12, held_out=0.2)
    batches = workload.batches(6, Generator().manual_seed(0))
    epoch = [next(batches) for _ in range(3)]
    assert [len(x["input_ids"]) for x, _ in epoch] == [6, 6, 4]
    for x, labels in epoch:
        mask = x["attention_mask"].bool()
        assert torch.equal(x["input_ids"][mask], labels[mask])
        assert (labels[~mask] == -100).all()
        assert mask.sum(1).max() == mask.shape[1]
    lengths = sorted(int(size) for x, _ in epoch for size in x["attention_mask"].sum(1))
    assert lengths == sorted(min(12, 3 + 2 * number) for number in range(4, 20))


async def test_a_model_goes_on_from_a_folder_and_shows_what_it_says(tmp_path):
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **CONFIG))
    made.save_pretrained("before")
    workload = build("before", "text.txt", length=12, sample=3)
    for name, value in workload.model.module.state_dict().items():
        assert torch.equal(value, made.state_dict()[name]), name

    async def forward(x: dict[str, Any]) -> Any:
        return made(**x)

    said = await workload.sample(forward)
    prompt = ("The devices wait for each other. " * 30)[-99:][:6]
    assert said.startswith(prompt)
    assert len(said.encode()) >= 9


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"data": "no.txt"}, r"data: no.txt cannot be read: No such file"),
    ({"length": 400}, r"max_position_embeddings\), got 400"),
    (
        {"data": "short.txt"},
        r"short.txt is too short: it has 20 tokens, and training and evaluation need a sample of 12",
    ),
    ({"data": "broken.jsonl"}, r"broken.jsonl, line 2 is not JSON"),
    ({"data": "lines.jsonl", "field": "body"}, r"lines.jsonl, line 1 has no text in 'body'"),
    ({"config": {"hidden_size": 8}}, "config.model_type: missing; .*give one of transformers"),
    ({"config": {"model_type": "lama"}}, "config.model_type: unknown: 'lama'; did you mean 'llama'?"),
    (
        {"config": CONFIG | {"hiden_size": 8}},
        "config.hiden_size: a config of llama has no such key; did you mean 'hidden_si",
    ),
    (
        {"config": CONFIG | {"vocab_size": 100}},
        "config.vocab_size: must be at least 256, the tokens that there are, got 100",
    ),
    ({"config": CONFIG | {"hidden_size": "wide"}}, "config: not one of llama: "),
    ({"config": {"model_type": "vit"}}, "transformers has no causal language model of type 'vit'"),
    ({"config": "nowhere"}, "config: nowhere is no folder with a config.json"),
    ({"tokenizer": "nowhere"}, "tokenizer: there is no folder nowhere; leave it out to train on bytes"),
    ({"held_out": 1.0}, "held_out must be a part of the data"),
    ({"save": "text.txt"}, "save: text.txt is a file; give a folder"),
]


@pytest.mark.parametrize(("parameters", "message"), WRONG, ids=[message[:24] for _, message in WRONG])
def test_what_is_wrong_is_said_in_a_sentence(parameters, message):
    Path("short.txt").write_text("twenty characters ..", encoding="utf-8")
    Path("broken.jsonl").write_text('{"text": "a"}\n{"text', encoding="utf-8")
    given: dict[str, Any] = {"config": CONFIG, "data": "text.txt", "length": 12} | parameters
    with pytest.raises(OptionError, match=message):
        build(**given)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"transformers"', '"transformer"', 'job.model: must be one of transformers, got "transformer"'),
        ('"transformers"', '"transformers"\nentry = "a:b"', "job: give either model, which is built in, or entry"),
        ("length = 12", "lenght = 12", "job.parameters.lenght: unknown parameter; the entry takes: config, data"),
        ("text.txt", "nothing.txt", "job.parameters: data: nothing.txt cannot be read"),
    ],
)
def test_a_job_file_says_which_key_is_wrong(old, new, message):
    path = job_file("wrong")
    path.write_text(path.read_text().replace(old, new), encoding="utf-8")
    with pytest.raises(JobFileError) as caught:
        find_entry(load_job(path))()
    assert message in str(caught.value)

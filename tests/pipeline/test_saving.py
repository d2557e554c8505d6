"""``pipe.save`` and ``pipe.load``: training goes on bit by bit, elsewhere, and nothing is half saved or half loaded."""

from __future__ import annotations

import asyncio
import copy
import errno
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from preloaded import run_script
from samples import each_value
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers_models import make_batch
from transformers_models import make_model as make_transformer

from asyncpipe import LearningRates, Pipeline, from_transformers, whole_folder
from asyncpipe.errors import OptionError, OverlapError, PipelineClosedError, StateDictError
from asyncpipe.ops.model import state_files
from asyncpipe.pipeline import saving
from asyncpipe.whole_folder import file_sum, manifest_checksum, newest_of

# torchdata calls what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

STEPS, SAVED = 6, 3


class Head(nn.Module):
    """The first layer's weight once more, and a buffer that counts."""

    def __init__(self, first):
        super().__init__()
        self.weight = first.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x @ self.weight


def make_model(seed, dropout=0.0, tied=True):
    torch.manual_seed(seed)
    first = nn.Linear(6, 8)
    layers = [first, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    return nn.Sequential(*layers, Head(first) if tied else nn.Linear(8, 6)).double()


def make_loader():
    torch.manual_seed(11)
    x = torch.randn(4 * STEPS, 6).double()
    return StatefulDataLoader(TensorDataset(x, x.roll(1, 0)), batch_size=8, shuffle=True)


def opened(model, split=(3, 4), **options):
    options = {
        "microbatches": 4,
        "schedule": "1f1b",
        "loss_fn": nn.functional.mse_loss,
        "optimizer": partial(torch.optim.AdamW, lr=0.05),
        "lr_schedule": LearningRates(lambda step: 1 / (1 + step)),
    } | options
    devices = [f"cpu:{i}" for i in range(len(split) * options.get("replicas", 1))]
    return Pipeline(model, devices, balance=list(split), **options)


def batches(loader):
    while True:
        yield from loader


async def trained(pipe, loader, steps):
    source = batches(loader)
    return [(await pipe.step(*next(source))).loss for _ in range(steps)]


async def values_of(pipe):
    states = pipe.optimizer_states()
    remembered = [states[name][key] for name in sorted(states) for key in sorted(states[name])]
    return [*copy.deepcopy(pipe.state_dict()).values(), *copy.deepcopy(remembered)]


REPLICAS = {"replicas": 2, "microbatches": 2}
SHARDED = REPLICAS | {"shard_optimizer": True}
CASES = {
    "another split": ({}, {"split": (2, 1, 2, 2)}, {}),
    "dropout": ({}, {"checkpoint": "never"}, {"dropout": 0.3}),
    "to workers": ({}, {"workers": True}, {"dropout": 0.3}),
    "from workers": ({"workers": True}, {"split": (1, 2, 4)}, {}),
    "shards": (SHARDED | {"workers": True}, REPLICAS, {"dropout": 0.3, "tied": False}),
    "shards here": (SHARDED, SHARDED | {"split": (2, 5)}, {"tied": False}),
    "to shards": (REPLICAS, SHARDED | {"workers": True, "split": (2, 3, 2)}, {"tied": False}),
}


@pytest.mark.promise(
    "Killed and resumed",
    "After `pipe.save` and `pipe.load`, training continues bit-identically, on threads and in workers.",
)
@each_value(("layout", ["safetensors", "dcp"]), ("case", [*CASES]))
async def test_training_goes_on_elsewhere_bit_by_bit(case, layout, pool, tmp_path):
    before, after, model = CASES[case]
    found = []
    for runs in ([({**before, "workers": False}, STEPS)], [(before, SAVED), (after, STEPS - SAVED)]):
        losses = []
        for number, (options, steps) in enumerate(runs):
            options = dict(options)
            if options.pop("workers", False):
                options["pool"] = pool
            loader = make_loader()
            torch.manual_seed(99)
            async with opened(make_model(number, **model), generator=torch.Generator(), **options) as pipe:
                if number:
                    assert await pipe.load(tmp_path / "save", state={"loader": loader}) == {"best": 0.5}
                losses += await trained(pipe, loader, steps)
                assert pipe.steps_done == len(losses)
                if len(runs) > 1 and not number:
                    await pipe.save(tmp_path / "save", state={"loader": loader}, extra={"best": 0.5}, format=layout)
                    await trained(pipe, loader, 1)
                found.append([*losses, *await values_of(pipe)])
    whole, _, resumed = found
    assert all(map(torch.equal, whole, resumed)), case


# A process that is killed


def events(then):
    """Call ``then(number)`` before each time that a save has something on disk or renames a folder."""
    count = itertools.count()
    for owner, name in ((os, "fsync"), (Path, "rename")):
        real = getattr(owner, name)

        def made(*arguments, real=real):
            then(next(count))
            return real(*arguments)

        setattr(owner, name, made)


def sync_run(folder, steps, number=0, *, save_at=(), split=(3, 4), kill_at=None, layout="safetensors"):
    """The losses of a run that saves in the background, and its values; killed at an event of its last save."""
    loader, losses, saved = make_loader(), [], None
    torch.manual_seed(99)
    with opened(make_model(number), split).sync() as pipe:
        if number:
            losses = pipe.load(folder, state={"loader": loader})
        for x, target in itertools.islice(batches(loader), steps - len(losses)):
            losses.append(pipe.step(x, target).loss.item())
            if len(losses) in save_at:
                if kill_at is not None and len(losses) == save_at[-1]:
                    saved.result()
                    events(lambda number: number == kill_at and os.kill(os.getpid(), signal.SIGKILL))
                saved = pipe.save(folder, state={"loader": loader}, extra=losses, format=layout, background=True)
        return losses, pipe.state_dict()


KILLED = """
import sys
sys.path.insert(0, {tests!r})
import warnings
warnings.simplefilter("ignore")
from test_saving import sync_run
sync_run({folder!r}, {steps}, save_at={save_at}, kill_at={kill_at}, layout={layout!r})
"""


@pytest.mark.promise(
    "Killed and resumed", "If a process is killed while it saves, the previous save or the new one is complete."
)
@pytest.mark.parametrize(
    ("save_at", "steps", "kill_at"),
    [
        *[((2, 4), 6, kill_at) for kill_at in (0, 7)],
        *[pytest.param((2, 4), 6, kill_at, marks=pytest.mark.long) for kill_at in (1, 2, 3, 4, 5, 6, 8, 9)],
        pytest.param((50, 60), 80, 3, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("layout", ["safetensors", "dcp"])
def test_a_kill_while_saving_leaves_the_former_save_whole(save_at, steps, kill_at, layout, tmp_path):
    """The rest, on another split, is bit-equal to a run that nobody disturbed."""
    folder = tmp_path / "save"
    code = KILLED.format(
        tests=str(Path(__file__).parent),
        folder=str(folder),
        steps=steps,
        save_at=save_at,
        kill_at=kill_at,
        layout=layout,
    )
    status, _, err = run_script(code, tmp_path)
    assert status == -signal.SIGKILL, err
    assert len(torch.load(newest_of(folder) / "pipeline.pt")["extra"]) in save_at
    wanted, weights = sync_run(None, steps)
    found, resumed = sync_run(folder, steps, 1, split=(2, 1, 2, 2), save_at=[steps])
    assert found == wanted
    assert all(map(torch.equal, weights.values(), resumed.values()))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["save"]
    assert len(torch.load(folder / "pipeline.pt")["extra"]) == steps


# What is refused


def rewritten(folder, name, content):
    """A file with other content, and the sum that belongs to it."""
    (folder / name).write_bytes(content)
    about = json.loads((folder / "snapshot.json").read_text())
    del about["checksum"]
    about["sha256"][name] = file_sum(folder / name)
    (folder / "snapshot.json").write_text(json.dumps({**about, "checksum": manifest_checksum(about)}))


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, made):
        self.made = made

    def __reduce__(self):
        return os.mkdir, (str(self.made),)


@pytest.mark.promise(
    "Killed and resumed",
    "Saved files that are missing, damaged, unsafe or do not fit are refused by name before anything changes.",
)
@pytest.mark.parametrize("layout", ["safetensors", "dcp"])
def test_files_that_are_missing_or_damaged_are_named_and_nothing_is_loaded(layout, tmp_path):
    folder, made = tmp_path / "save", tmp_path / "made"
    with opened(make_model(0)).sync() as pipe:
        pipe.step(*next(batches(make_loader())))
        pipe.save(folder, format=layout)
        pipe.step(*next(batches(make_loader())))
        before = copy.deepcopy([pipe.state_dict(), pipe.optimizer_states()])
        names = {path.name for path in folder.iterdir()}
        assert names >= {"snapshot.json", "pipeline.pt", *({".metadata"} if layout == "dcp" else {"model.safetensors"})}
        for name in names:
            whole = (folder / name).read_bytes()
            (folder / name).unlink()
            for content in (None, whole[:-9], whole[:50] + bytes([whole[50] ^ 1]) + whole[51:]):
                if content is not None:
                    (folder / name).write_bytes(content)
                with pytest.raises(OptionError, match=f"{name} (cannot be read|is damaged)"):
                    pipe.load(folder)
            (folder / name).write_bytes(whole)
        for name in (".metadata", "pipeline.pt") if layout == "dcp" else ("weights.pt", "optimizer-1.pt"):
            whole = (folder / name).read_bytes()
            torch.save(Malicious(made), tmp_path / "file")
            evil = pickle.dumps(Malicious(made)) if name == ".metadata" else (tmp_path / "file").read_bytes()
            rewritten(folder, name, evil)
            with pytest.raises(OptionError, match="holds more than tensors and plain values"):
                pipe.load(folder)
            rewritten(folder, name, whole)
        assert not made.exists()
        after = [pipe.state_dict(), pipe.optimizer_states()]
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        pipe.load(folder)
        assert not torch.equal(pipe.state_dict()["0.weight"], before[0]["0.weight"])


def frozen(model):
    model[0].bias.requires_grad_(False)
    return model


def wider(model):
    model[0] = nn.Linear(6, 8, bias=False).double()
    return model


@pytest.mark.promise(
    "Killed and resumed",
    "Saved files that are missing, damaged, unsafe or do not fit are refused by name before anything changes.",
)
@pytest.mark.parametrize(
    ("model", "options", "match"),
    [
        (make_model(0, tied=False), {}, "lacks .*'6.bias'"),
        (wider(make_model(0, tied=False)), {}, "lacks"),
        (nn.Sequential(*make_model(0), nn.Linear(6, 6).double()), {}, "lacks .*'7.bias'"),
        (nn.Sequential(*make_model(0)[:5]), {}, "unknown .*'5.bias'"),
        (nn.Sequential(nn.Linear(6, 9), *make_model(0)[1:]).double(), {}, "'0.weight' has the shape"),
        (
            make_model(0),
            {"optimizer": None, "lr_schedule": None},
            "was saved with optimizer=, unlike this pipeline",
        ),
        (make_model(0), {"lr_schedule": None}, "the pipeline has no lr_schedule"),
        (frozen(make_model(0)), {}, "trains no parameter '0.bias'"),
    ],
)
@pytest.mark.parametrize("layout", ["safetensors", "dcp"])
def test_what_does_not_fit_is_refused_before_anything_changes(model, options, match, layout, tmp_path):
    with opened(make_model(1)).sync() as pipe:
        pipe.step(*next(batches(make_loader())))
        pipe.save(tmp_path / "save", format=layout)
    with opened(model, (1, len(model) - 1), **options).sync() as pipe:
        before = copy.deepcopy(pipe.state_dict())
        with pytest.raises(StateDictError, match=match):
            pipe.load(tmp_path / "save")
        with pytest.raises((OptionError, StateDictError)):
            pipe.load(tmp_path / "save", state={"loader": make_loader()})
        assert all(map(torch.equal, before.values(), pipe.state_dict().values()))


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    pipe = opened(make_model(0, tied=False)).sync()
    with pytest.raises(PipelineClosedError):
        pipe.save(tmp_path / "save")
    with pipe:
        pipe.save(tmp_path / "save")
        pipe.save(tmp_path / "save")
        (tmp_path / "save" / "tokenizer.json").touch()
        (tmp_path / "step-3").mkdir()
        (tmp_path / "step-3" / "run.pt").touch()
        for name, other in (("save", "tokenizer.json"), ("step-3", "run.pt")):
            with pytest.raises(OptionError, match=rf"{name} has {other}, which save\(\) has not written"):
                pipe.save(tmp_path / name)
        with pytest.raises(OptionError, match="is a file; name a folder"):
            pipe.save(tmp_path / "save" / "tokenizer.json")
        with pytest.raises(OptionError, match="cannot be read: No such file"):
            pipe.load(tmp_path / "other")
        with pytest.raises(OptionError, match="format must be one of safetensors, dcp, got 'pt'"):
            pipe.save(tmp_path / "other", format="pt")
        with pytest.raises(OptionError, match="has no state of loader"):
            pipe.load(tmp_path / "save", state={"loader": make_loader()})
        with pytest.raises(TypeError, match="plain Python values"):
            pipe.save(tmp_path / "other", extra=Path("x"))
        for _ in pipe.steps(itertools.islice(batches(make_loader()), 2)):
            if pipe.steps_done == 1:
                with pytest.raises(OverlapError):
                    pipe.save(tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["save", "step-3"]


# In the background


@pytest.mark.parametrize("workers", [False, True])
async def test_steps_go_on_while_a_save_is_written(workers, pool, tmp_path, monkeypatch):
    """A second save copies when the first one is on disk. Closing waits."""
    go, began = threading.Event(), threading.Event()
    real = saving.new_folder

    def held(final, replace):
        began.set()
        go.wait(20)
        return real(final, replace=replace)

    monkeypatch.setattr(saving, "new_folder", held)
    source = batches(make_loader())
    async with opened(make_model(0), generator=torch.Generator(), **({"pool": pool} if workers else {})) as pipe:
        await pipe.step(*next(source))
        found = [await values_of(pipe)]
        first = await pipe.save(tmp_path / "0", background=True)
        began.wait(20)
        second = asyncio.ensure_future(pipe.save(tmp_path / "1", format="dcp", background=True))
        await pipe.step(*next(source))
        await pipe.step(*next(source))
        found.append(await values_of(pipe))
        assert not first.done()
        assert not second.done()
        assert not (tmp_path / "0").exists()
        go.set()
        await second
    async with opened(make_model(1), (2, 3, 2)) as pipe:
        for number, wanted in enumerate(found):
            assert await pipe.load(tmp_path / str(number)) is None
            assert all(map(torch.equal, await values_of(pipe), wanted))


@pytest.mark.parametrize("workers", [False, True])
async def test_a_save_that_fails_is_raised_and_leaves_the_former_one(workers, pool, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "save"
    async with opened(make_model(0), **({"pool": pool} if workers else {})) as pipe:
        await pipe.save(folder, extra=1)
        with monkeypatch.context() as patched:
            if workers:  # Which have no such folder.
                patched.setattr(saving, "new_folder", lambda *_, **__: whole_folder.new_folder(tmp_path / "x" / "y"))
                patched.setattr(Path, "mkdir", lambda *_, **__: None)
            else:

                def full(*_):
                    raise OSError(errno.ENOSPC, "No space left on device")

                patched.setattr(state_files.os, "fsync", full)
            second = await pipe.save(folder, extra=2, background=True)
            with pytest.raises(
                OSError, match=r"worker .* cannot write to .*all hosts share" if workers else "No space"
            ):
                await second
        assert f"nothing was saved to {folder}" in caplog.text
        assert await pipe.load(folder) == 1
        await pipe.save(folder, extra=3)
        assert await pipe.load(folder) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["save"]


# Read by others

ALONE = """
import sys
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch import nn
import warnings

warnings.simplefilter("ignore")
fresh, folder = sys.argv[1:]
assert not int(fresh) or "asyncpipe" not in sys.modules
layers = [nn.Linear(6, 8), nn.Tanh(), nn.Identity(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 6)]
model = nn.Sequential(*layers).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
states = {"model": model.state_dict(), "optim": {"state": get_optimizer_state_dict(model, optimizer)["state"]}}
dcp.load(states, checkpoint_id=folder, no_dist=True)
model.load_state_dict(states["model"])
groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
set_optimizer_state_dict(model, optimizer, {**states["optim"], "param_groups": groups})
x, target = torch.load(folder + ".batch")
nn.functional.mse_loss(model(x), target).backward()
optimizer.step()
torch.save(model.state_dict(), folder + ".alone")
dcp_to_torch_save(folder, folder + ".pt")
"""


@pytest.mark.promise("Killed and resumed", 'torch can read a save with `format="dcp"` without asyncpipe.')
@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_torch_alone_reads_and_trains_on(fresh, pool, tmp_path):
    """Each worker has written what it has: weights of its stage, and of each optimizer's state its replica's part."""
    folder, loader = tmp_path / "save", make_loader()
    async with opened(make_model(0, tied=False), pool=pool, lr_schedule=None, **SHARDED) as pipe:
        await trained(pipe, loader, 3)
        await pipe.save(folder, format="dcp")
        written = {path.name for path in folder.iterdir()}
        assert written == {".metadata", "pipeline.pt", "snapshot.json", *(f"__{i}_0.distcp" for i in range(4))}
        saved, states = copy.deepcopy(pipe.state_dict()), copy.deepcopy(pipe.optimizer_states())
        batch = next(batches(loader))
        await pipe.step(*batch)
        torch.save(batch, f"{folder}.batch")
        if fresh:
            command = [sys.executable, "-c", ALONE, "1", str(folder)]
            await asyncio.to_thread(subprocess.run, command, check=True, timeout=60)
        else:
            status, _, err = run_script(ALONE, tmp_path, "0", str(folder))
            assert status == 0, err
        torch.testing.assert_close(dict(pipe.state_dict()), dict(torch.load(f"{folder}.alone")), rtol=0, atol=1e-10)
    whole = torch.load(f"{folder}.pt", weights_only=False)
    torch.testing.assert_close(whole, {"model": dict(saved), "optim": {"state": states}}, rtol=0, atol=0)


def transformer(seed):
    torch.manual_seed(seed)
    return make_transformer("GPT2LMHeadModel")


def with_adapters(seed):
    import peft

    torch.manual_seed(seed)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(base(), config).double()


def base():
    torch.manual_seed(3)
    return make_transformer("LlamaForCausalLM")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    ("make", "workers"),
    [
        *[(transformer, False), (transformer, True), (with_adapters, False)],
        pytest.param(with_adapters, True, marks=pytest.mark.long),
    ],
)
def test_transformers_read_what_is_saved(make, workers, pool, tmp_path):
    batch, folder = make_batch("GPT2LMHeadModel"), tmp_path / "save"
    options = {"microbatches": 3, "optimizer": partial(torch.optim.AdamW, lr=0.01)}
    where = {"pool": pool} if workers else {}
    with from_transformers(make(0), batch, devices=["cpu:0", "cpu:1"], **options, **where).sync() as pipe:
        pipe.step(batch)
        pipe.save(folder)
        saved = copy.deepcopy(pipe.state_dict())
        wanted = [pipe.step(batch).loss, *copy.deepcopy(pipe.state_dict()).values()]
    if make is transformer:
        again = type(make(1)).from_pretrained(folder, dtype=torch.float64)
        assert all(map(torch.equal, saved.values(), again.state_dict().values()))
        assert torch.load(folder / "weights.pt") == {}
    else:
        import peft

        again = peft.PeftModel.from_pretrained(base(), folder)
        torch.testing.assert_close(dict(again.state_dict()), dict(saved), check_dtype=False, rtol=0, atol=1e-6)
        assert {name.split(".")[-3] for name in torch.load(folder / "weights.pt")} == {"lora_A", "lora_B"}
    with from_transformers(make(1), batch, devices=["cpu:0", "cpu:1", "cpu:2"], **options).sync() as pipe:
        pipe.load(folder)
        assert all(map(torch.equal, wanted, [pipe.step(batch).loss, *pipe.state_dict().values()]))

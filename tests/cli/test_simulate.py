"""The ``asyncpipe simulate`` command, as a user calls it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from math import inf
from pathlib import Path
from typing import Any

import pytest
from profiles import chain

from asyncpipe.cli import main
from asyncpipe.cli.prediction_files import write_profile
from asyncpipe.cli.step_options import shape_of
from asyncpipe.core.predict.layer_profile import LayerCosts, Measurement, Profile, ProfiledLayer
from asyncpipe.core.schedules.gpipe import GPipeSchedule
from asyncpipe.core.schedules.protocol import Shape

DOCS = Path(__file__).parents[2] / "docs"
Output = pytest.CaptureFixture[str]


def run(capsys: Output, line: str) -> str:
    assert main(["simulate", *line.split()]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def found(capsys: Output, line: str) -> dict[str, Any]:
    text = run(capsys, f"{line} --json")
    assert text.count("\n") == 1
    read: dict[str, Any] = json.loads(text)
    return read


class Mine(GPipeSchedule):
    """A schedule of the user's own."""


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 4), (4, 2), (4, 8), (8, 16)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_step_has_the_closed_form_of_its_schedule(capsys: Output, name: str, p: int, m: int) -> None:
    """Makespan (m + p - 1)(t_F + t_B), bubble (p - 1)(t_F + t_B), peak m, or p - r at most."""
    step = found(capsys, f"{name} --stages {p} --microbatches {m} --costs F=1,I=1,W=1,C=0")
    assert step["makespan"] == 3 * (m + p - 1)
    assert step["bubble"] == pytest.approx([(p - 1) / (m + p - 1)] * p)
    assert step["peak"] == [m if name == "gpipe" else min(m, p - r) for r in range(p)]


def test_virtual_stages_share_devices(capsys: Output) -> None:
    step = found(capsys, "interleaved --stages 8 --virtual 2 --microbatches 8 --costs F=1,I=1,W=1,C=0")
    assert step["makespan"] == 8 * 2 * 3 + 3 * 3 * 2 / 2
    assert step["peak"] == [5.5, 4.5, 3.5, 2.5]
    assert step["peak_in_flight"] == [8, 8, 7, 5, 4, 4, 3, 1]
    assert (step["stages"], step["devices"], step["microbatches"]) == (8, 4, 8)


def test_a_schedule_brings_its_virtual_stages_where_they_divide(capsys: Output) -> None:
    assert found(capsys, "interleaved --stages 4 --microbatches 2")["devices"] == 2
    assert found(capsys, "interleaved --stages 3 --microbatches 2")["devices"] == 3
    assert found(capsys, "interleaved --stages 6 --virtual 3 --microbatches 2")["devices"] == 2


def test_a_schedule_without_virtual_stages_of_its_own_gets_one_a_device() -> None:
    class Careless(GPipeSchedule):
        virtual = 0

    assert shape_of(Careless(), 4, 2, None) == Shape(4, 2, 4)


@pytest.mark.parametrize(
    ("line", "makespan"),
    [
        ("gpipe --stages 1 --microbatches 3 --costs F=2,I=3,W=4", 3 * 9),
        ("gpipe --stages 1 --microbatches 3 --costs F=2,I=3,W=4,B=5", 3 * 7),
        ("gpipe --stages 1 --microbatches 3 --costs F=2,B=5,R=1 --checkpoint always", 3 * 8),
        ("gpipe --stages 1 --microbatches 3 --costs F=2,B=5,R=1 --checkpoint except_last", 3 * 8 - 1),
        ("1f1b --stages 4 --microbatches 16 --costs C=1", 85),
        (f"{__name__}:Mine --stages 2 --microbatches 2", 9),
    ],
)
def test_costs_and_recomputation_count_and_a_schedule_may_be_anybodys(capsys: Output, line: str, makespan: int) -> None:
    assert found(capsys, line)["makespan"] == makespan


def test_the_order_may_be_a_hint(capsys: Output) -> None:
    step = found(capsys, "1f1b --order hint --stages 4 --microbatches 16")
    assert (step["schedule"], step["makespan"], step["peak"]) == ("1f1b as hint", 57.0, [4, 3, 2, 1])


def test_a_schedule_may_be_a_file(capsys: Output, tmp_path: Path) -> None:
    """torch's example of 1F1B for two ranks; the file says how many devices there are."""
    path = tmp_path / "orders.csv"
    path.write_text("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n", encoding="utf-8")
    step = found(capsys, f"csv:{path} --stages 2 --microbatches 2")
    assert (step["makespan"], step["peak"]) == (9, [2, 1])


def test_without_json_it_is_a_table(capsys: Output) -> None:
    assert run(capsys, "interleaved --stages 4 --microbatches 4") == (
        "interleaved: 4 stages on 2 devices, 4 micro-batches, checkpoint never, costs F=1 R=1 B=2 I=1 W=1 C=0\n"
        "\n"
        "device  stages  bubble  peak\n"
        "dev:0   0 2      11.1%   2.5\n"
        "dev:1   1 3      11.1%   1.5\n"
        "\n"
        "makespan 27, bubble 11.1%\n"
    )


def test_a_step_that_costs_nothing_has_no_bubble(capsys: Output) -> None:
    assert found(capsys, "gpipe --stages 2 --microbatches 2 --costs F=0,I=0,W=0")["bubble"] == [0, 0]


def test_replicas_run_beside_each_other_and_reduce(capsys: Output) -> None:
    line = "1f1b --stages 2 --microbatches 4 --replicas 2 --costs F=1,B=2,A=1.5,G=0.5,U=0.25"
    text = run(capsys, line)
    assert text.startswith("1f1b: 2 replicas of 2 stages on 2 devices, 4 micro-batches, checkpoint never, costs F=1 ")
    assert " U=0.25 A=1.5 G=0.5\n" in text
    step = found(capsys, line)
    assert step["makespan"] == 5 * 3 + 1.5 + 0.5 + 0.25
    assert (step["stages"], step["devices"], step["microbatches"], step["replicas"]) == (4, 4, 8, 2)
    assert step["peak"] == [2, 1, 2, 1]
    # Of steps that overlap, the next one's forwards wait for the parameters.
    assert found(capsys, f"{line} --shard-optimizer --steps 3")["steady_seconds"] == step["makespan"]


# Jitter


def test_jitter_repeats_with_its_seed(capsys: Output) -> None:
    line = "1f1b --stages 4 --microbatches 16 --jitter 0.3"
    one = found(capsys, f"{line} --seed 5")
    assert found(capsys, f"{line} --seed 5") == one
    assert found(capsys, f"{line} --seed 6")["makespan"] != one["makespan"]
    assert "makespans" not in one
    assert one["makespan"] > 57
    assert found(capsys, "1f1b --stages 4 --microbatches 16 --jitter 0")["makespan"] == 57


def test_repeats_print_means_and_the_highest_peaks(capsys: Output) -> None:
    line = "interleaved --order hint --stages 4 --microbatches 6 --jitter 0.5"
    singles = [found(capsys, f"{line} --seed {seed}") for seed in range(6)]
    assert len({tuple(single["peak"]) for single in singles}) > 1, "what comes next could not go wrong"
    step = found(capsys, f"{line} --repeat 6")
    assert step["makespans"] == [single["makespan"] for single in singles]
    assert step["makespan"] == pytest.approx(sum(step["makespans"]) / 6)
    assert step["bubble"] == pytest.approx([sum(single["bubble"][r] for single in singles) / 6 for r in (0, 1)])
    assert step["peak"] == [max(single["peak"][r] for single in singles) for r in (0, 1)]
    assert found(capsys, f"{line} --seed 2 --repeat 2")["makespans"] == step["makespans"][2:4]
    text = run(capsys, f"{line} --repeat 6")
    assert ", jitter 0.5 per task\n" in text
    assert f"makespan {step['makespan']:.6g}, " in text
    assert " (means of 6 runs; makespan " in text


def test_micro_batches_may_vary_as_a_whole(capsys: Output) -> None:
    """One device and no copies: two micro-batches of three units each, times their factors."""
    line = "gpipe --stages 1 --microbatches 2 --jitter 0.5 --jitter-per microbatch"
    both = found(capsys, f"{line} --costs F=1,B=2")["makespan"]
    assert found(capsys, f"{line} --costs F=2,B=1")["makespan"] == pytest.approx(both)
    by_task = line.replace("per microbatch", "per task")
    assert found(capsys, f"{by_task} --costs F=1,B=2") != found(capsys, f"{by_task} --costs F=2,B=1")


# Traces


def events(path: Path, phase: str) -> list[dict[str, Any]]:
    trace = json.loads(path.read_text(encoding="utf-8"))
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_a_trace_shows_a_unit_as_a_millisecond(capsys: Output, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    line = f"1f1b --stages 2 --microbatches 3 --costs F=1,B=2.5,C=0.25 --trace {path}"
    assert run(capsys, line).endswith(f"\ntrace: {path} (open it in https://ui.perfetto.dev)\n")
    times = {event["name"]: (event["ts"], event["dur"]) for event in events(path, "X")}
    assert times["F(0,0)"] == (0, 1000)
    assert times["C(0,0>1)"] == (1000, 250)
    assert times["B(0,1)"] == (2250, 2500)
    step = found(capsys, line)
    assert step["trace"] == str(path)
    assert times["step 0"] == (0, step["makespan"] * 1000)
    assert not [event for event in events(path, "C") if "memory" in event["name"]]


def test_a_trace_of_several_seeds_is_that_of_the_first(capsys: Output, tmp_path: Path) -> None:
    line = "gpipe --stages 2 --microbatches 2 --jitter 0.3 --seed 4"
    run(capsys, f"{line} --repeat 3 --trace {tmp_path / 'several.json'}")
    run(capsys, f"{line} --trace {tmp_path / 'one.json'}")
    run(capsys, f"{line.replace('4', '5')} --trace {tmp_path / 'other.json'}")
    one, several, other = ((tmp_path / f"{name}.json").read_bytes() for name in ("one", "several", "other"))
    assert one == several
    assert one != other


def test_a_trace_with_a_profile_is_in_seconds_and_shows_memory(capsys: Output, profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    line = f"gpipe --stages 2 --microbatches 4 --profile {profile} --balance 1,2 --trace {path}"
    step = found(capsys, line)
    (whole,) = [event for event in events(path, "X") if event["name"] == "step 0"]
    assert whole["dur"] == step["makespan"] * 1e6
    held: dict[int, list[int]] = {}
    for event in events(path, "C"):
        if event["name"] == "predicted memory":
            held.setdefault(event["pid"], []).append(event["args"]["bytes"])
    assert [max(of_device) for _, of_device in sorted(held.items())] == step["memory"]
    assert [of_device[0] for _, of_device in sorted(held.items())] == [2 * 4096 + 3072, 4 * 4096]
    assert [of_device[-1] for _, of_device in sorted(held.items())] == [2 * 4096, 4 * 4096]


# Steps that overlap


JITTERED = "zb-h2 --stages 2 --microbatches 4 --steps 3 --jitter 0.3"


def test_steps_show_their_steady_state_and_one_timeline(capsys: Output) -> None:
    text = run(capsys, "zb-h2 --stages 2 --microbatches 4 --steps 2")
    assert "dev:0   0         7.7%    0.0%     3\n" in text
    assert "\nmakespan 13, bubble 7.7%; steady state: a step every 12, bubble 0.0%\n\nstep   0    " in text
    assert "\ndev:1  ···F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3│F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3\n" in text


def test_steady_states_are_figures_too(capsys: Output) -> None:
    steps = found(capsys, "zb-h2 --stages 4 --microbatches 8 --steps 4")
    assert (steps["makespan"], steps["steady_seconds"]) == (27, 24)
    assert (steps["steady_bubble"], steps["steady_bubble_ratio"]) == ([0, 0, 0, 0], 0)
    alone = found(capsys, "zb-h2 --stages 4 --microbatches 8 --steps 4 --ahead 0")
    assert (alone["steady_seconds"], alone["steady_bubble_ratio"]) == (27, pytest.approx(1 / 9))
    assert "steady_seconds" not in found(capsys, "zb-h2 --stages 4 --microbatches 8")
    seeds = [found(capsys, f"{JITTERED} --seed {seed}")["steady_seconds"] for seed in (0, 1)]
    assert found(capsys, f"{JITTERED} --repeat 2")["steady_seconds"] == pytest.approx(sum(seeds) / 2)


def test_a_trace_and_a_picture_show_all_steps(capsys: Output, profile: Path, tmp_path: Path) -> None:
    trace, picture = tmp_path / "steps.json", tmp_path / "steps.svg"
    line = f"zb-h2 --stages 3 --microbatches 4 --profile {profile} --steps 3 --trace {trace} --svg {picture}"
    step = found(capsys, line)
    assert step["svg"] == str(picture)
    assert {event["args"]["step"] for event in events(trace, "X")} == {0, 1, 2}
    marks = [event["name"] for event in events(trace, "i")]
    assert marks == ["step 1 begins"] * 3 + ["step 2 begins"] * 3
    held: dict[int, list[int]] = {}
    for event in events(trace, "C"):
        if event["name"] == "predicted memory":
            held.setdefault(event["pid"], []).append(event["args"]["bytes"])
    assert [max(of_device) for _, of_device in sorted(held.items())] == step["memory"]
    assert 'class="border"' in picture.read_text(encoding="utf-8")
    assert run(capsys, line).endswith(f"\npicture: {picture}\n")


def test_the_documented_picture_is_what_its_command_makes(capsys: Output, tmp_path: Path) -> None:
    page = (DOCS / "schedules.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"`asyncpipe simulate (.* --svg )docs/steady.svg`", page)
    run(capsys, f"{command}{tmp_path / 'steady.svg'}")
    assert (tmp_path / "steady.svg").read_bytes() == (DOCS / "steady.svg").read_bytes()


# Profiles


def layer(seconds: float, recompute: float | None = None) -> LayerCosts:
    return LayerCosts(
        forward=seconds,
        light_forward=seconds / 2,
        recompute=seconds * 2 if recompute is None else recompute,
        backward=seconds * 3,
        input_gradient=seconds,
        weight_gradient=seconds,
        saved=0,
    )


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Three layers, of 1, 1 and 2 seconds; 2 kB between them; a copy takes 0.5 s and 1 s per 1024 bytes."""
    measured = Measurement(
        (layer(1), layer(1), layer(2)),
        {},
        step=0.25,
        latency=0.5,
        bandwidth=1024,
        sent=chain(1024, 2048, 2048, 0),
    )
    layers = tuple(ProfiledLayer(name, 4096, 4096) for name in "abc")
    path = tmp_path / "model.json"
    write_profile(Profile(layers, ((0, 1), (1, 2)), {4: measured}, ("cpu:0",)), path)
    return path


def test_a_profile_gives_costs_and_sizes(capsys: Output, profile: Path) -> None:
    """One micro-batch at a time on 1 + 3 s and 3 + 9 s, with 2.5 s copies; four overlap as GPipe's do."""
    step = found(capsys, f"gpipe --stages 2 --microbatches 4 --profile {profile} --balance 1,2")
    assert step["makespan"] == 1 + 2.5 + 4 * 3 + 4 * 9 + 2.5 + 3
    assert step["step_seconds"] == step["makespan"] + 0.25
    assert step["memory"] == [2 * 4096 + 4 * (1024 + 2048), 4 * 4096 + 4 * 2048]


def test_recomputation_changes_times_and_memory(capsys: Output, profile: Path) -> None:
    line = f"gpipe --stages 1 --microbatches 4 --profile {profile}"
    step = found(capsys, f"{line} --checkpoint always")
    assert step["makespan"] == 4 * (2 + 8 + 12)
    assert step["memory"] == [6 * 4096 + 4 * 1024]


def test_without_a_balance_stages_take_equally_long(capsys: Output, profile: Path) -> None:
    line = f"gpipe --stages 2 --microbatches 4 --profile {profile}"
    assert found(capsys, line) == found(capsys, f"{line} --balance 2,1")
    text = run(capsys, line)
    assert f", costs of {profile}, balance 2,1\n" in text
    assert "device  stages  bubble  peak  memory\n" in text
    assert text.splitlines()[3].endswith(" KiB")
    assert text.endswith(" s\n")


def test_recomputation_counts_for_the_balance(capsys: Output, tmp_path: Path) -> None:
    """Layers take 4, 4 and 8 s; where they are recomputed, 23.5, 3.5 and 7 s."""
    measured = Measurement((layer(1, 20), layer(1, 0), layer(2, 0)), {}, step=0, latency=0, bandwidth=inf)
    path = tmp_path / "model.json"
    write_profile(Profile(tuple(ProfiledLayer(name, 0, 0) for name in "abc"), (), {1: measured}), path)
    line = f"gpipe --stages 2 --microbatches 1 --profile {path}"
    assert "balance 2,1" in run(capsys, line)
    assert "balance 1,2" in run(capsys, f"{line} --checkpoint always")


def test_a_profile_of_links_over_stages_is_wired_so(capsys: Output, tmp_path: Path) -> None:
    """Two layers that exchange nothing run at the same time."""
    measured = Measurement((layer(1), layer(1)), {}, step=0, latency=0, bandwidth=inf)
    path = tmp_path / "apart.json"
    write_profile(Profile((ProfiledLayer("a", 0, 0), ProfiledLayer("b", 0, 0)), (), {1: measured}), path)
    assert found(capsys, f"gpipe --stages 2 --microbatches 1 --profile {path}")["makespan"] == 4


# What goes wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nope --stages 2 --microbatches 2", "unknown schedule 'nope'; known schedules: "),
        ("gpipe --stages 4 --microbatches 1 --virtual 3", "--virtual must divide the number of stages, got 3 for 4"),
        ("gpipe --stages 4 --microbatches 1 --virtual 2", "schedule 'gpipe' puts one stage on each device"),
        ("gpipe --stages 2 --microbatches 1 --checkpoint x", "checkpoint must be one of 'always', 'except_last'"),
        (
            "gpipe --stages 2 --microbatches 1 --costs Q=1",
            "--costs takes KIND=NUMBER with the kinds F, R, B, I, W, C, O, L, U, A, G and N",
        ),
        ("gpipe --stages 2 --microbatches 1 --costs B=-1", "--costs must not be negative or infinite, got 'B=-1'"),
        ("gpipe --stages 2 --microbatches 1 --jitter -1", "sigma must be finite and not negative, got -1"),
        ("gpipe --stages 2 --microbatches 1 --repeat 2", "--repeat without random factors simulates the same step"),
        (
            "gpipe --stages 2 --microbatches 1 --steps 1",
            "--steps must be 2 or more, since a steady state shows between",
        ),
        ("gpipe --stages 2 --microbatches 1 --ahead 1", "--ahead says how steps overlap; give --steps N with it"),
        ("gpipe --stages 2 --microbatches 1 --svg /nowhere/x", "cannot write /nowhere/x: No such file"),
        ("gpipe --stages 2 --microbatches 1 --trace /nowhere/x", "cannot write /nowhere/x: No such file"),
        ("gpipe --stages 3 --microbatches 1 --sent 100", "--sent is for a step on hosts; give --topology FILE with it"),
        (
            "gpipe --stages 3 --microbatches 1 --profile x --sent 1 --topology x",
            "--sent goes with --costs; a profile says",
        ),
        ("gpipe --stages 2 --microbatches 1 --shard-optimizer", "--shard-optimizer shares the optimizer among"),
        ("gpipe --stages 2 --microbatches 1 --balance 1,1", "--balance splits the layers of a profile"),
        ("gpipe --stages 2 --microbatches 1 --profile /nowhere/x", "/nowhere/x: cannot be read: No such file"),
    ],
)
def test_errors_are_one_line_and_status_2(capsys: Output, arguments: str, message: str) -> None:
    assert main(["simulate", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"asyncpipe: error: {message}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--microbatches 4 --balance 3", "--balance must be the number of layers of each of 2 stages, as 3,5,2 for 3"),
        ("--microbatches 4 --balance 1,1", ""),
        ("--microbatches 3 --balance 1,2", "3 micro-batches were not measured; the profile knows 4"),
    ],
)
def test_a_profile_must_fit(capsys: Output, profile: Path, options: str, message: str) -> None:
    assert main(["simulate", "gpipe", "--stages", "2", "--profile", str(profile), *options.split()]) == 2
    assert capsys.readouterr().err.startswith(f"asyncpipe: error: {message}")


def test_the_examples_of_the_help_are_commands(
    capsys: Output, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    text = capsys.readouterr().out
    assert all(word in text for word in ("makespan", "bubble", "peak", "memory", "csv:FILE", "module:Class"))
    lines = [line.strip() for line in text.partition("examples:\n")[2].splitlines()]
    assert len(lines) == 9
    (tmp_path / "hosts.toml").write_text('[[hosts]]\nname = "a"\ndevices = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]\n')
    for line in lines:
        program, *arguments = line.replace("my_package.schedules", __name__).replace("model.json", str(profile)).split()
        assert program == "asyncpipe"
        if "--profile" in arguments:
            arguments[arguments.index("--microbatches") + 1] = "4"
            arguments[arguments.index("--balance") + 1] = "1,1,1"
        assert main(arguments) == 0


def test_simulating_imports_no_torch() -> None:
    code = (
        "import sys, asyncpipe.cli\n"
        "line = 'simulate 1f1b --stages 2 --microbatches 2 --jitter 0.1 --json'\n"
        "assert asyncpipe.cli.main(line.split()) == 0\n"
        "assert not {'torch', 'numpy', 'pydantic', 'prometheus_client'} & sys.modules.keys()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


# Several hosts

HOSTS = """
link = {latency = 0.5, bandwidth = 100}

[[hosts]]
name = "a"
devices = ["cpu:0"]

[[hosts]]
name = "b"
devices = ["cpu:0"]
speeds = [0.5]
"""


def test_a_step_runs_on_a_topology(capsys, tmp_path):
    hosts = tmp_path / "hosts.toml"
    hosts.write_text(HOSTS)
    command = ["simulate", "gpipe", "--stages", "2", "--microbatches", "1", "--costs", "F=1,B=2"]
    placed = [*command, "--topology", str(hosts), "--sent", "100"]
    assert main(placed) == 0
    shown = capsys.readouterr().out
    # Twice 1.5 s on the link, and the second device takes twice as long: 1 + 1.5 + 2 + 4 + 1.5 + 2.
    assert "makespan 12, " in shown
    assert re.search(r"^a/cpu:0 +0 +75\.0% +12\.5% +1$", shown, re.MULTILINE)
    assert main([*placed, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["waits"] == [0.125, 0.125]
    assert main(["simulate", "gpipe", "--stages", "3", "--microbatches", "1", "--topology", str(hosts)]) == 2
    assert "the topology has 2 devices, the schedule needs 3" in capsys.readouterr().err

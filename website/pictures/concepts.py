"""Drawings of what happens in a step, where, and what becomes of a failure."""

from __future__ import annotations

from asyncpipe.core.kinds import TaskKind
from website.pictures.drawing import RED, Drawing

__all__ = ["backward", "failure", "hosts", "lanes", "step"]

F, B, R, COPY = (kind.colour for kind in (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.RECOMPUTE, TaskKind.COPY))


def step() -> str:
    """A mini-batch is cut, goes through the stages, and leaves gradients."""
    drawing = Drawing(900, 226, "A mini-batch of 4 micro-batches goes through 3 stages and comes back as gradients")
    drawing.text(66, 24, "mini-batch", bold=True)
    for number in range(4):
        drawing.box(16, 36 + number * 34, 100, 28, f"micro-batch {number}")
    for number in range(3):
        x = 180 + number * 215
        drawing.area(x, 36, 130, 130, f"stage {number}")
        drawing.text(x + 65, 82, f"device cpu:{number}")
        drawing.box(x + 14, 94, 46, 26, "F", F)
        drawing.box(x + 70, 94, 46, 26, "B", B)
        drawing.text(x + 65, 148, "parameters, .grad")
    drawing.arrow((116, 70), (180, 70))
    for x in (310, 525):
        drawing.arrow((x, 70), (x + 85, 70))
        drawing.text(x + 42, 62, "activations")
        drawing.arrow((x + 85, 144), (x, 144))
        drawing.text(x + 42, 160, "gradients")
    drawing.box(820, 54, 64, 32, "loss_fn")
    drawing.arrow((740, 70), (820, 70))
    drawing.arrow((852, 86), (852, 144), (740, 144))
    drawing.text(450, 196, "While one device works on micro-batch 2, the others work on micro-batches 1 and 0.")
    drawing.text(450, 214, "Losses and outputs are gathered; gradients are those of the unsplit model.")
    return drawing.svg()


def lanes() -> str:
    """One controller, a thread for each device, three lanes on each."""
    drawing = Drawing(820, 300, "The controller's loop hands tasks to the devices' threads and hears of their ends")
    drawing.area(12, 12, 226, 276, "controller")
    drawing.text(125, 52, "one asyncio loop, in your process")
    drawing.box(30, 66, 190, 40, "task graph of the step")
    drawing.box(30, 122, 190, 40, "scheduler: which ready\ntask is next on a lane")
    drawing.box(30, 178, 190, 40, "journal of every event")
    drawing.box(30, 234, 190, 40, "observers: metrics,\npictures, live page", dashed=True)
    for y in (106, 162, 218):
        drawing.arrow((125, y), (125, y + 16))
    queues = (
        ("compute", F, "F, R, B (or I and W), S, U"),
        ("copy-in", COPY, "activations that arrive"),
        ("grad-in", COPY, "gradients that arrive"),
    )
    for number, y in enumerate((12, 156)):
        drawing.area(400, y, 408, 132, f"device cuda:{number}: a thread")
        for row, (name, colour, text) in enumerate(queues):
            drawing.box(416, y + 32 + row * 32, 84, 24, name, colour)
            drawing.text(512, y + 48 + row * 32, text, anchor="start")
            drawing.text(796, y + 48 + row * 32, "a lane, a stream", anchor="end")
    drawing.arrow((238, 136), (290, 136), (290, 46), (400, 46))
    drawing.arrow((238, 148), (290, 148), (290, 190), (400, 190))
    drawing.text(345, 38, "tasks")
    drawing.text(345, 182, "tasks")
    drawing.arrow((400, 116), (330, 116), (330, 252), (310, 252), (310, 204), (238, 204))
    drawing.arrow((400, 264), (270, 264), (270, 212), (238, 212))
    drawing.text(330, 282, "began, ended, failed")
    return drawing.svg()


def hosts() -> str:
    """Workers on two hosts, each with its part of the graph; edges join them."""
    drawing = Drawing(760, 334, "Workers on two hosts: tensors go straight from worker to worker")
    drawing.area(240, 12, 280, 84, "your process: the controller")
    drawing.text(380, 58, "Pipeline, loop, observers")
    drawing.text(380, 78, "the model's shapes, no values")
    for number, (host, x) in enumerate((("host-a", 12), ("host-b", 396))):
        drawing.area(x, 138, 352, 172, host)
        drawing.box(x + 14, 190, 76, 66, "agent:\nstarts the\nworkers", dashed=True)
        for place in range(2):
            left = x + 108 + place * 122
            drawing.area(left, 176, 112, 122, f"cuda:{place}")
            drawing.text(left + 56, 226, f"stage {2 * number + place}")
            drawing.text(left + 56, 244, "its optimizer")
            drawing.text(left + 56, 262, "its part of")
            drawing.text(left + 56, 278, "the task graph")
        drawing.arrow((x + 90, 212), (x + 108, 212), dashed=True)
    drawing.arrow((320, 96), (188, 138), both=True)
    drawing.arrow((440, 96), (572, 138), both=True)
    drawing.text(140, 116, "micro-batches, journal, losses")
    for x, to_x in ((354, 504),):
        drawing.arrow((x, 292), (to_x, 292), both=True)
    drawing.text(380, 326, "activations and gradients go straight from worker to worker, by edges")
    return drawing.svg()


def backward() -> str:
    """Why a backward comes after its recomputation, and the last micro-batch's first."""
    drawing = Drawing(820, 262, "Order in the autograd graph: recompute before backward, the last micro-batch first")
    drawing.area(12, 12, 470, 238, "one micro-batch at one stage")
    drawing.box(30, 44, 130, 52, "F(i,j)\nkeeps its input only", F)
    drawing.box(30, 150, 130, 52, "R(i,j)\nthe same once more", R)
    drawing.box(330, 150, 130, 52, "B(i,j)", B)
    drawing.arrow((95, 96), (95, 150))
    drawing.text(104, 127, "input, draws, autocast, buffers", anchor="start")
    drawing.arrow((160, 176), (330, 176))
    drawing.text(245, 168, "the stage's own graph")
    drawing.arrow((395, 96), (395, 150))
    drawing.text(395, 88, "gradient of its output")
    drawing.text(247, 224, "Fork and Join tie Checkpoint to Recompute in autograd's graph:")
    drawing.text(247, 240, "a backward recomputes first, whoever starts it.")
    drawing.area(500, 12, 308, 238, "micro-batches of pipe(x)")
    for number in range(3):
        y = 40 + number * 52
        drawing.box(516, y, 96, 34, f"exit {number}", dashed=True)
        drawing.box(692, y, 96, 34, f"B({number},·)", B)
        drawing.arrow((612, y + 17), (692, y + 17))
        if number:
            drawing.arrow((564, y), (564, y - 18))
    drawing.text(654, 206, "Exits are chained by Fork, so autograd's")
    drawing.text(654, 222, "engine releases the last micro-batch first;")
    drawing.text(654, 238, "each opens the gate of a backward, a task.")
    return drawing.svg()


def failure() -> str:
    """What is left of a step whose task raises."""
    drawing = Drawing(820, 236, "A task raises: no other begins, what runs ends, gradients go back to what they were")
    rows = (("dev:0", "F0 F1 F2 F3"), ("dev:1", "- F0 F1 F2"), ("dev:2", "- - F0 B0"))
    for row, (device, tasks) in enumerate(rows):
        y = 40 + row * 46
        drawing.text(12, y + 19, device, anchor="start")
        for column, task in enumerate(tasks.split()):
            if task != "-":
                drawing.box(60 + column * 62, y, 56, 28, task, F if task[0] == "F" else B)
        for column in range(4, 6):
            drawing.box(60 + column * 62, y, 56, 28, "", dashed=True)
    drawing.text(274, 126, "raises", fill=RED)
    drawing.line(305, 24, 305, 176, RED)
    drawing.text(305, 18, "no task begins any more", fill=RED)
    drawing.arrow((438, 100), (484, 100))
    drawing.area(490, 24, 318, 156, "then")
    lines = (
        "1. tasks that run end, on every device",
        "2. .grad is what it was before the step",
        "3. the journal has what ran, and what did not",
        "4. step() raises one TaskError, which names",
        "    F(2,1): micro-batch 2, stage 1, device dev:1",
        "5. the next step works",
    )
    for number, text in enumerate(lines):
        drawing.text(504, 66 + number * 20, text, anchor="start")
    drawing.text(410, 206, "A cancellation (a timeout, Ctrl-C) takes the same way, and ends between two tasks.")
    drawing.text(410, 226, "A worker that dies is noticed within a second, a silent host within ten: WorkerLostError.")
    return drawing.svg()

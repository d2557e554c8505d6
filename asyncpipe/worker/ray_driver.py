"""Ray's part: reserves room on a cluster, and runs agents in it. A process of its own, started by ``RayWorkers``.

Ray's driver replaces signal handlers and hooks of its process, starts threads, and writes to its output. None of that
is in the controller's process, which imports no Ray. Commands come as lines of JSON on standard input; when that ends,
all that was started here ends, and so does this process.

This file imports nothing of asyncpipe: it runs before ``sys.path`` says where that is.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

CONNECT_SECONDS = 10.0
"""For a cluster to answer at all."""
END_SECONDS = 15.0
"""For Ray to shut down. The kernel kills what it has started when this process is gone."""


def main() -> None:
    """Do what the lines say, until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Whatever Ray prints is no answer.
    ray = _Ray(answers)
    commands: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(commands,), daemon=True).start()
    # On this thread: what Ray starts ends with the thread that has started it.
    while (command := commands.get()) is not None:
        ray.do(command)
    ray.close()
    os._exit(0)


def _read(commands: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    for line in sys.stdin:
        commands.put(json.loads(line))
    ending = threading.Timer(END_SECONDS, os._exit, (1,))  # Also if Ray is still starting.
    ending.daemon = True
    ending.start()
    commands.put(None)


class _Ray:
    def __init__(self, answers: Any) -> None:
        self._answers = answers
        self._lock = threading.Lock()
        self._groups: list[Any] = []
        self._actors: dict[int, Any] = {}

    def do(self, command: dict[str, Any]) -> None:
        number, name = command.pop("number"), command.pop("do")
        if name == "open":
            sys.path[:] = [*sys.path[1:], *command.pop("path")]
        function = getattr(self, f"_{name}")
        if name in ("open", "kill"):
            self._answer(number, function, command)
        else:  # They wait for others.
            if name == "start":
                command["number"] = number
            threading.Thread(target=self._answer, args=(number, function, command), daemon=True).start()

    def close(self) -> None:
        if (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
            for number in list(self._actors):
                self._kill(number)
            for group in self._groups:
                ray.util.remove_placement_group(group)
            ray.shutdown()

    def _answer(self, number: int, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        try:
            answer = {"value": function(**arguments)}
        except Exception as error:  # noqa: BLE001 - the controller raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        with self._lock:
            print(json.dumps({"number": number, **answer}), file=self._answers, flush=True)

    def _open(self, address: str, options: dict[str, Any]) -> dict[str, Any]:
        """Connect to a cluster, or start one; what its machines are."""
        host, _, port = address.rpartition(":")
        if port.isdecimal() and "/" not in host:
            # Ray itself goes on trying for minutes.
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        import ray

        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
        nodes = [
            {
                "name": node.get("NodeName") or node["NodeManagerAddress"],
                "hostname": node["NodeManagerHostname"],
                "address": node["NodeManagerAddress"],
            }
            for node in ray.nodes()
            if node["Alive"]
        ]
        return {"nodes": nodes, "here": ray.util.get_node_ip_address()}

    def _reserve(self, bundles: list[dict[str, float]], strategy: str, seconds: float) -> int:
        """A placement group, once it is there; its number."""
        import ray
        from ray.util.placement_group import placement_group

        group = placement_group(bundles, strategy=strategy)
        if not group.wait(seconds):
            ray.util.remove_placement_group(group)
            asked = {name for bundle in bundles for name in bundle}
            free, all_there = (
                {name: amount for name, amount in sorted(found.items()) if name in asked}
                for found in (ray.available_resources(), ray.cluster_resources())
            )
            count = len([node for node in ray.nodes() if node["Alive"]])
            raise RuntimeError(f"{count} machines, with {all_there} in all, and {free} free")
        self._groups.append(group)
        return len(self._groups) - 1

    def _start(self, number: int, group: int, bundle: int, needs: dict[str, float], **run: Any) -> Any:
        """Run an agent in a bundle; how it ended."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = dict(needs)
        actor = (
            ray.remote(_AgentActor)
            .options(
                num_cpus=needs.pop("CPU", 0),
                num_gpus=needs.pop("GPU", 0),
                resources=needs,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._groups[group], placement_group_bundle_index=bundle
                ),
            )
            .remote()
        )
        self._actors[number] = actor
        try:
            return ray.get(actor.run.remote(**run))
        finally:
            self._actors.pop(number, None)

    def _kill(self, of: int) -> None:
        import ray

        if (actor := self._actors.get(of)) is not None:
            ray.kill(actor)


class _AgentActor:
    """An actor: runs the agent in a process of its own, which ends with the actor's."""

    def run(self, line: str, program: str, environment: dict[str, str]) -> list[Any]:
        """The agent's exit status, and the end of what it wrote to its standard error."""
        import importlib.util
        import os
        import socket
        import subprocess
        import sys

        if not os.path.exists(program):
            found = importlib.util.find_spec("asyncpipe")
            if found is None or not found.submodule_search_locations:
                raise RuntimeError(f"asyncpipe is not installed on {socket.gethostname()}, for {sys.executable}")
            program = os.path.join(found.submodule_search_locations[0], "worker", "__main__.py")
        # Ray's own settings are for Ray. It sets the number of threads, too, which results may depend on.
        own = {k: v for k, v in os.environ.items() if not k.startswith("RAY_") and k != "OMP_NUM_THREADS"}
        command = [sys.executable, program, "agent"]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, bufsize=0, stdin=pipe, stderr=pipe, env=own | environment) as process:  # noqa: S603
            assert process.stdin is not None
            assert process.stderr is not None
            process.stdin.write(line.encode())
            tail = b""
            while part := process.stderr.read(65536):
                os.write(2, part)  # To Ray's log.
                tail = (tail + part)[-4096:]
            return [process.wait(), tail.decode(errors="replace")]


if __name__ == "__main__":
    main()

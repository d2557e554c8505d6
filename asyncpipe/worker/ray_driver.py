"""Ray's part: reserves room on a cluster, and runs agents in it. The entry of a worker that ``RayWorkers`` starts.

Ray's driver replaces signal handlers and hooks of its process, starts threads, and writes to its output. None of that
is in the controller's process, which imports no Ray. What is raised there is a ``LauncherError`` with Ray's words:
Ray's own errors would import Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

from asyncpipe.errors import LauncherError
from asyncpipe.runtime.workers.control_client import ControlClient

__all__ = ["serve"]

CONNECT_SECONDS = 10.0
"""For a cluster to answer at all."""


async def serve(control: ControlClient) -> None:
    """Do what the controller says, until it says to stop."""
    os.setsid()  # Ctrl-C means the controller.
    os.dup2(2, 1)  # Whatever Ray prints is no output of the controller's program.
    ray = _Ray()
    try:
        await control.serve(ray.handle)
    finally:
        ray.close()


class _Ray:
    """Used on the main thread: what Ray starts ends with the thread that has started it."""

    def __init__(self) -> None:
        self._groups: list[Any] = []
        self._prefix = ""
        self._actors: dict[int, Any] = {}
        self._numbers = count()

    def handle(self, command: tuple[str, dict[str, Any]]) -> Awaitable[Any]:
        name, arguments = command
        return _in_words(getattr(self, f"_{name}"), arguments)

    def close(self) -> None:
        if (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
            for actor in self._actors.values():
                ray.kill(actor)
            ray.shutdown()  # Ray removes the groups of a driver that has ended.

    async def _open(self, name: str, address: str, options: dict[str, Any]) -> dict[str, Any]:
        """Connect to a cluster, or start one; what its machines are."""
        host, _, port = address.rpartition(":")
        if port.isdecimal() and "/" not in host:
            # Ray itself goes on trying for minutes.
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        import ray

        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
        # Ray's number of this driver: names must not be those of another run that may still end.
        self._prefix = f"asyncpipe/{name}/{ray.get_runtime_context().get_job_id()}"
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

    async def _reserve(self, bundles: list[dict[str, float]], strategy: str, seconds: float) -> int:
        """A placement group, once it is there; its number."""
        import ray
        from ray.util.placement_group import placement_group

        group = placement_group(bundles, strategy=strategy, name=f"{self._prefix}/group {next(self._numbers)}")
        if not await asyncio.to_thread(group.wait, seconds):
            ray.util.remove_placement_group(group)
            asked = {name for bundle in bundles for name in bundle}
            free, all_there = (
                {name: amount for name, amount in sorted(found.items()) if name in asked}
                for found in (ray.available_resources(), ray.cluster_resources())
            )
            machines = len([node for node in ray.nodes() if node["Alive"]])
            raise RuntimeError(f"it has {machines} machines, with {all_there} in all, and {free} free")
        self._groups.append(group)
        return len(self._groups) - 1

    async def _find(self, group: str, seconds: float) -> list[dict[str, float]]:
        """What the bundles of somebody else's placement group have, the machine's own resource included.

        It is the first, and only, group of this driver.
        """
        import ray
        from ray.util.placement_group import PlacementGroup, placement_group_table

        there = {key: each["name"] for key, each in placement_group_table().items() if each["state"] != "REMOVED"}
        found = [key for key, name in there.items() if group in (key, name)]
        if len(found) != 1:
            names = ", ".join(sorted(name or key for key, name in there.items())) or "none"
            raise LookupError(f"the cluster has {len(found)} groups of this name or id; there are: {names}")
        self._groups = [PlacementGroup(ray.PlacementGroupID(bytes.fromhex(found[0])))]
        if not await asyncio.to_thread(self._groups[0].wait, seconds):
            raise TimeoutError(f"it was not ready within {seconds:g} s")
        table = placement_group_table(self._groups[0])
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        nodes = table["bundles_to_node_id"]
        return [{**table["bundles"][each], f"node:{addresses[nodes[each]]}": 1.0} for each in sorted(nodes)]

    async def _start(self, number: int, name: str, group: int, bundle: int, needs: dict[str, float], **run: Any) -> Any:
        """Run agent ``number`` in a bundle; how it ended."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # Machines need not be able to import this file.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        strategy = PlacementGroupSchedulingStrategy(self._groups[group], placement_group_bundle_index=bundle)
        options = {
            "name": f"{self._prefix}/{name}/{number}",
            "num_cpus": needs.pop("CPU", 0),
            "num_gpus": needs.pop("GPU", 0),
            "resources": needs,
            "scheduling_strategy": strategy,
        }
        self._actors[number] = actor = ray.remote(_AgentActor).options(**options).remote()
        try:
            return await asyncio.wrap_future(actor.run.remote(**run).future())
        finally:
            self._actors.pop(number, None)

    async def _kill(self, number: int) -> None:
        import ray

        if (actor := self._actors.get(number)) is not None:
            ray.kill(actor)


async def _in_words(function: Callable[..., Awaitable[Any]], arguments: dict[str, Any]) -> Any:
    try:
        return await function(**arguments)
    except Exception as error:  # noqa: BLE001 - the controller raises it
        raise LauncherError(f"{type(error).__name__}: {error}") from None


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

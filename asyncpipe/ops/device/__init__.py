"""Devices, and how work and tensors get onto them: streams, events, copies, memory.

Imports ``asyncpipe.core`` and torch, and no other folder of ``asyncpipe.ops``. Where to start:

- ``devices``: logical devices from the names that the caller lists;
- ``streams``: one stream a lane, the events that order them, and the ``Fence`` between a step and its caller;
- ``caller_streams``: streams of its own for each of several callers;
- ``lent_streams``: where streams come from, and how many a process uses;
- ``device_clock``: times on a device as times of the host;
- ``copies``: how a tensor gets from one lane's device to another's;
- ``memory_layout``: how a tensor lies in its memory;
- ``process_settings``: what a program has set for all of torch;
- ``wire``: values, tensors included, as bytes for another process;
- ``device_errors``: how an error of a device is told from one of the code;
- ``memory``: bytes that a device has, holds and has held;
- ``intra_op_threads``: how many threads a CPU stage computes with.

A new type of device needs its name in ``devices.ACCELERATORS``, in the pattern of device names that the service
accepts (``asyncpipe/service/settings/setting_types.py``), and its generators' states in snapshots
(``asyncpipe/train/randomness.py``). Some places name CUDA and would leave it out: ``--device-type``
(``asyncpipe/cli/train.py``), the memory limit of a job's process (``asyncpipe/service/jobs/isolation/confines.py``),
the retry of a failed step (``asyncpipe/train/step_failures.py``), and the devices that a worker sees
(``asyncpipe/runtime/workers/agent.py`` and ``ray_workers.py``). Everything else asks ``torch.get_device_module``.
"""

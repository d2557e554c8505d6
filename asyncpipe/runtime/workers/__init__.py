"""Worker processes: starting them, talking to them, and knowing at once when one is gone.

::

    controller's process                                        worker's process
      WorkerGroup, WorkerConnection   on the caller's loop        entry(control)    on the main thread's loop
             │                                                          │
      Supervisor, ControlListener     on a loop of their own      ControlClient     on a loop of its own: answers
             │                        (one thread for all               │           pings whatever the main thread does
             │                         workers)                         │
          Channel ◀═════════ one authenticated connection ═════════▶ Channel
      ProcessLauncher ────────────── lifeline ──────────────────▶ kernel: SIGKILL when the controller is gone

In the order of a start:

``group.py``       the workers of one controller: start, stop, replace
``launcher.py``    the seam: who starts workers, and how
``process_launcher.py``  starts processes of this machine: ``child_process.py`` a fresh interpreter, ``fork_server.py``
                   one that others are forked from (``process_title.py`` tells them apart), ``local_process.py``
                   what the controller has of each
``ray_workers.py``  starts them on the machines of a Ray cluster; Ray itself runs in a worker of its own
``torchrun_workers.py``  starts them in torchrun's processes, which meet in ``torchrun.py``
``agents.py``      workers that agents start, which are where the two above have put them; ``agent.py`` is such an agent
``handed_down.py``  what a worker takes over from its controller's process
``entrance.py``    lets in who knows the secret: workers (``listener.py``), workers that have edges (``meeting.py``),
                   and torchrun's ranks; ``handshake.py`` is how both sides show it, ``door.py`` what is listened
                   at, ``held_folder.py`` a folder for sockets
``tcp.py``         connections between machines, which notice a host that is gone without a word
``place.py``       where a worker is, and where others reach it
``meeting.py``     how workers find each other that have edges
``lifeline.py``    no worker outlives its controller
``worker_main.py``  what a worker does from its first line until its entry runs
``channel.py``     messages over the connection; ``packed.py`` makes bytes of them
``main_module.py``  classes of the controller's script
``supervisor.py``  one worker from its start to its end: who decides that it is lost
``connection.py``  a worker as its controller sees it; ``control_client.py`` the controller as a worker sees it
``clock.py``       the offset of a worker's clock
``remote_errors.py``, ``remote_logs.py``  errors and log records of workers in the controller

No torch. A worker's entry is named by text (``module:function``), so nothing here imports what runs in it.
"""

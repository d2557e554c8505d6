"""Edges: how tensors get from one worker process to another.

An edge is directed: ``EdgeOut`` at the sender, ``EdgeIn`` at the receiver, and between them one socket, which carries
headers and small tensors one way and credits the other way. Larger tensors travel by a transport. Imports
``asyncpipe.core``, ``asyncpipe.errors`` and torch. ``connect.py`` makes all edges of a worker, over sockets that are
connected (``asyncpipe/runtime/workers/meeting.py``): Unix sockets on one machine, TCP between two. Start there.

- ``message``: what is sent, and what arrives;
- ``edge_out``, ``edge_in``: the two ends, with a thread each;
- ``window``: how many messages the receiver may hold, in credits;
- ``channel``: a socket that never blocks its user, and a doorbell for the thread that waits for it;
- ``wire``: the frames on the socket;
- ``payload``: what a transport is, and the copies that transports share;
- ``shared_memory``: the transport on one machine, by the host's memory; ``cuda_memory``: by a GPU's; ``cuda_calls``:
  the calls of CUDA that both need;
- ``connection``: the transport between machines: tensors go with their headers;
- ``nccl``: the transport by a communicator for each edge, between CUDA devices; its ends meet by ``pair_store``.

::

    a task's thread          EdgeOut                             EdgeIn                   a task's thread
      send(message) ──▶ queue ──▶ header, tensors ────────────▶ thread ──▶ on_message ──▶ …
                           credits, memory given back ◀──────── release() ◀────────────── has taken the tensors

**Why edges cannot deadlock or swap**

1. The sender decides the order of an edge's messages. Each is announced by a header of fixed size: epoch, step, task,
   source, and the number of its layout (types, shapes, meta).
2. Each directed edge has a socket and a transport of its own.
3. The receiver's thread takes each message as it comes, and never waits for a task. Where a device's thread may take
   messages instead, while it runs no task, the receiver's thread takes what is left for some milliseconds.
4. ``send`` does not wait for the peer, nor does ``release``.
5. At most ``window`` messages that were not released are at the receiver. Credits come on the same socket in the other
   direction, where no data stands before them.
6. An abort is a new epoch: messages of an older one are dropped on both sides, and their credits go back.
"""

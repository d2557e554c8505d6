"""An accelerator that is not there: torch's ``emu`` device, which computes on the CPU and checks what a GPU relies on.

Every operator on a tensor of ``emu:0`` is a kernel on the calling thread's current stream. Values are
computed at once; *order* is what is emulated. Each stream knows, as a vector clock, which kernels of other streams are
over before its next one starts; events carry such knowledge from stream to stream and to the host. ``Hazard`` is raised

- by a kernel that reads or overwrites what a kernel on another stream may still be writing or reading,
- by a kernel whose memory may still be used on another stream by the tensor that had it before.

What an asynchronous copy brings to the host is NaN until the host has waited for an event behind it. What one reads in
pinned memory must stay as it is until then: ``Hazard`` is raised by the wait. ``hold`` keeps a kernel from ending, and
with it whoever waits for it; after ``spoil`` every call fails, as after an error on a GPU.
Memory is counted by logical device, which is that of the thread that allocates, and may have a limit (``limit``).
Kernels take no time, or as long as ``cost`` says: then the host runs ahead, and memory that ``record_stream`` has told
of other streams counts until a later allocation finds these done, as in torch's allocator for CUDA.

Importing this module changes the process for good, so tests run in one of their own
(``tests/pipeline/test_on_emulated_accelerator.py``).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.utils import backend_registration

from asyncpipe.ops.device import devices

# Before any other module takes the names from there.
devices.ACCELERATORS = (*devices.ACCELERATORS, "emu")

from asyncpipe.ops.device import copies  # noqa: E402
from asyncpipe.ops.torch_internals import thread_slot  # noqa: E402

DEVICES = 1


class Hazard(RuntimeError):
    """A kernel is not ordered behind another one that uses the same memory."""


class Spoiled(RuntimeError):
    """What every call raises once the device has failed."""


strays: set[str] = set()
"""The names of threads that waited for the device without having set it: on a GPU they make a context on GPU 0."""

_lock = threading.RLock()
_thread = threading.local()
_healthy = {"offset": 0.0, "drift": 0.0, "engine": None, "limit": None, "cost": 0.0, "spoiled": False}
_state = SimpleNamespace(host={}, landing=[], held={}, freed=[], **_healthy)
allocated, peak = Counter(), Counter()
"""Bytes by logical device (``"emu:0#1"``): now, and the most since ``reset`` or ``forget_peak``."""
history: list[tuple[float, str, int]] = []
"""(``perf_counter``, logical device, bytes from then on), since then."""
synchronized = Counter()
"""By name of the thread: how often it waited for the device."""
views: list[tuple[str, Stream]] = []
"""The name of the thread, and its current stream, for each view that was made."""


def reset() -> None:
    """A healthy device that is done with everything."""
    with _lock:
        for gate in _state.held.values():
            gate.set()
        for _, owner, size in _state.freed:
            _account(owner, -size)
        _state.__dict__.update(host={}, landing=[], held={}, freed=[], **_healthy)
        reading.clear()
        synchronized.clear()
        strays.clear()
        forget_peak()
        views.clear()
        # All kernels are over, so nobody needs to know of those of other streams; else clocks grow from test to test.
        for memory in _memories.values():
            memory.writes.clear()
            memory.reads.clear()
        for each in list(_all_streams):
            each.clock = {each: each.clock.get(each, 0)}
            each.freed.clear()
            each.ends = 0.0


def cost(seconds) -> None:
    """From now on each kernel takes so long, on its stream."""
    _state.cost = seconds


def spoil() -> None:
    """From now on every call fails."""
    _state.spoiled = True


def limit(size) -> None:
    """From now on each logical device has ``size`` bytes (``None``: any number)."""
    _state.limit = size


def forget_peak() -> None:
    peak.clear()
    history.clear()
    peak.update(allocated)


def _account(owner, size) -> None:
    """Allocate ``size`` bytes on a logical device, or give them back."""
    if size > 0:
        now, freed, _state.freed = time.perf_counter(), _state.freed, []
        for each in freed:
            if each[0] > now:
                _state.freed.append(each)
            else:
                _account(each[1], -each[2])
    if size > 0 and _state.limit is not None and allocated[owner] + size > _state.limit:
        raise torch.OutOfMemoryError(f"{owner} has {allocated[owner]} bytes in use of {_state.limit}; wanted {size}")
    allocated[owner] += size
    history.append((time.perf_counter(), owner, allocated[owner]))
    peak[owner] = max(peak[owner], allocated[owner])


def check_health() -> None:
    if _state.spoiled:
        raise Spoiled("CUDA error: device-side assert triggered (emulated)")


def _join(clock, other) -> None:
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count


class Stream:
    """A queue of kernels. ``clock``: of each stream, the last kernel that is over before the next one here starts."""

    made = 0

    def __init__(self, device=0, **_):
        device = torch.device("emu", device) if isinstance(device, int) else torch.device(device)
        self.device = torch.device(device.type, device.index or 0)
        Stream.made += 1
        self.number = Stream.made
        self.clock, self.freed, self.waited = {}, [], []
        self.ends = 0.0
        """When its last kernel ends, and what it waits for."""
        _all_streams.add(self)

    def __repr__(self):
        return f"stream {self.number} of {self.device}"

    def wait_event(self, event):
        check_health()
        with _lock:
            self.waited.append(event)
            _join(self.clock, event.clock)
            self.ends = max(self.ends, event.ends)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def launch(self):
        """Queue a kernel; its number."""
        with _lock:
            _join(self.clock, _state.host)
            self.clock[self] = self.clock.get(self, 0) + 1
            if _state.cost:
                self.ends = max(self.ends, time.perf_counter()) + _state.cost
            return self.clock[self]

    def synchronize(self):
        self.record_event().synchronize()


class Event:
    """A place in a stream."""

    def __init__(self, enable_timing=False, blocking=False, **_):
        self.clock, self.time, self.ends, self.recorded_by = {}, 0.0, 0.0, None

    def record(self, stream=None):
        check_health()
        stream = stream or current_stream()
        with _lock:
            _join(stream.clock, _state.host)
            self.clock, self.recorded_by = dict(stream.clock), threading.current_thread().name
            self.stream, self.device = stream, stream.device
            self.ends = stream.ends
            self.time = device_time(max(self.ends, time.perf_counter()))

    def gates(self):
        return [gate for (stream, count), gate in list(_state.held.items()) if self.clock.get(stream, 0) >= count]

    def query(self):
        check_health()
        _note_stray()
        if is_over := all(gate.is_set() for gate in self.gates()) and self.ends <= time.perf_counter():
            self._tell_host()
        return is_over

    def synchronize(self):
        check_health()
        _note_stray()
        synchronized[threading.current_thread().name] += 1
        for gate in self.gates():
            assert gate.wait(30), "the host waits for a kernel that does not end"
        if (left := self.ends - time.perf_counter()) > 0:
            time.sleep(left)
        check_health()
        self._tell_host()

    def _tell_host(self):
        """The host knows that it has happened."""
        with _lock:
            _join(_state.host, self.clock)
            for each in [each for each in reading if self.clock.get(each[0], 0) >= each[1]]:
                reading.remove(each)
                if each[2]._version != each[3]:
                    raise Hazard(f"the host has overwritten pinned memory that a copy on {each[0]} was still reading")
            waiting, _state.landing = _state.landing, []
            for stream, count, to, value in waiting:
                if self.clock.get(stream, 0) >= count:
                    to.copy_(value)
                    for each in reading:
                        if each[2].untyped_storage()._cdata == to.untyped_storage()._cdata:
                            each[3] = each[2]._version
                else:
                    _state.landing.append((stream, count, to, value))

    def elapsed_time(self, end):
        check_health()
        return (end.time - self.time) * 1e3


def _note_stray():
    if not getattr(_thread, "is_set", False):
        strays.add(threading.current_thread().name)


def _set_device(device):
    _thread.is_set = True


@contextmanager
def _device(device):
    before, _thread.is_set = getattr(_thread, "is_set", False), True
    try:
        yield
    finally:
        _thread.is_set = before


def device_time(at=None):
    """Seconds of the device's clock, which has an origin and a pace of its own; now, or at a time of the host's."""
    return (time.perf_counter() if at is None else at) * (1 + _state.drift) + _state.offset


_own_draws = thread_slot()


class Philox:
    """A device's default generator: a seed, and how far it is. Kernels draw from both, and move it on."""

    device = SimpleNamespace(type="emu")

    def __init__(self):
        self.seed, self.offset = 0, 0

    def manual_seed(self, seed):
        self.seed, self.offset = seed, 0
        return self

    def initial_seed(self):
        return self.seed

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        self.offset = offset

    def get_state(self):
        return torch.tensor([self.seed, self.offset])

    def set_state(self, state):
        self.seed, self.offset = state.tolist()

    @contextmanager
    def drawing(self, op):
        """The kernels of the CPU draw as this one would."""
        if torch.Tag.nondeterministic_seeded not in op.tags:
            yield
            return
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(hash((self.seed, self.offset)))
        own = _own_draws.get()
        _own_draws.put(None)  # They do not draw from what the thread draws from on a CPU.
        try:
            yield
        finally:
            _own_draws.put(own)
            self.offset += 4
            torch.default_generator.set_state(state)


_defaults: list[Stream] = []


def _currents():
    if isinstance(threading.current_thread(), threading._DummyThread) and _state.engine is not None:
        return [_state.engine]
    if not hasattr(_thread, "streams"):
        _thread.streams = list(_defaults)
    return _thread.streams


@contextmanager
def engine_on(stream):
    """The autograd engine's own threads run on ``stream``: on a GPU, a node's stream is that of its forward."""
    _state.engine = stream
    try:
        yield
    finally:
        _state.engine = None


def _index(device):
    return 0 if device is None or isinstance(device, int) else torch.device(device).index or 0


def current_stream(device=None):
    return _currents()[_index(device)]


def default_stream(device=None):
    return _defaults[_index(device)]


def set_stream(stream):
    _currents()[stream.device.index] = stream


@contextmanager
def stream(to):
    before = list(_currents())
    set_stream(to)
    try:
        yield
    finally:
        _thread.streams = before


def synchronize(device=None):
    for each in list(_all_streams):
        each.synchronize()


@contextmanager
def hold(on):
    """A kernel on the stream ``on`` does not end inside."""
    gate = threading.Event()
    _state.held[on, on.launch()] = gate
    try:
        yield gate
    finally:
        gate.set()


_all_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


class _Memory:
    """What one allocation has been used for: by stream and span, the last kernel that wrote and the last that read."""

    def __init__(self, stream, size=0):
        self.stream, self.writes, self.reads, self.recorded = stream, {}, {}, set()
        self.owner, self.size = threading.current_thread().name.removeprefix("asyncpipe "), size
        _account(self.owner, size)

    def use(self, stream, number, name, inner, *, write):
        begin, end = span = _span(inner)
        for kind, before in (("writing", self.writes), ("reading", self.reads if write else {})):
            for (other, low, high), count in before.items():
                if other is not stream and low < end and begin < high and stream.clock.get(other, 0) < count:
                    what = "overwrites" if write else "reads"
                    raise Hazard(f"{name} on {stream} {what} what {other} may still be {kind}")
        (self.writes if write else self.reads)[stream, *span] = number

    def free(self):
        ends = max((stream.ends for stream in self.recorded if stream is not self.stream), default=0.0)
        if _state.cost and ends > time.perf_counter():
            _state.freed.append((ends, self.owner, self.size))
        else:
            _account(self.owner, -self.size)
        used = {}
        for (stream, *_), count in (*self.reads.items(), *self.writes.items()):
            _join(used, {stream: count})
        behind = {}
        for stream in self.recorded:
            # Torch's allocator waits for an event of each such stream, which is behind all that this has waited for.
            _join(behind, stream.clock)
        late = {s: c for s, c in used.items() if s is not self.stream and behind.get(s, 0) < c}
        if late:
            self.stream.freed.append(late)


def _span(inner):
    """The bytes of its memory that a tensor has."""
    if not inner.is_contiguous():
        return 0, float("inf")
    begin = inner.storage_offset() * inner.itemsize
    return begin, begin + inner.nbytes


_memories: dict[int, _Memory] = {}
"""By address of the storage that holds the values."""


def _memory(inner, stream, counts=True):
    """``counts``: not what is only here since torch sees no gaps, and would be a view on a GPU."""
    storage = inner.untyped_storage()
    key = storage._cdata
    if key not in _memories:
        memory = _memories[key] = _Memory(stream, storage.nbytes() if counts else 0)
        _holders[key] = 0
        _check_reuse(stream)
        return key, memory
    return key, _memories[key]


_holders: dict[int, int] = {}


def _check_reuse(stream):
    for late in stream.freed:
        for other, count in late.items():
            if max(stream.clock.get(other, 0), _state.host.get(other, 0)) < count:
                raise Hazard(f"memory of {stream} is reused while {other} may still use it")
    stream.freed.clear()


def _drop(storage, key):
    with _lock:
        del _values[storage], _keys[storage]
        _holders[key] -= 1
        if not _holders[key]:
            del _holders[key]
            _memories.pop(key).free()


def _record_stream(tensor, on):
    check_health()
    if _on_device(tensor):
        _memory_of(tensor).recorded.add(on)


_values: dict[int, torch.Tensor] = {}
"""The values of a tensor of the device, by address of its own, empty storage, which it shares with those that were
detached from it."""
_keys: dict[int, int] = {}
"""The key in ``_memories`` of each of those."""


def _storage(tensor):
    return tensor.untyped_storage()._cdata


def _make(values, stream, counts=True):
    """A tensor of the device with these values."""
    made = torch._C._acc.create_empty_tensor(values.shape, values.dtype)
    storage = made.untyped_storage()
    key, _ = _memory(values, stream, counts)
    _holders[key] += 1
    _values[storage._cdata], _keys[storage._cdata] = values, key
    weakref.finalize(storage, _drop, storage._cdata, key)
    return made


def _inner(value):
    return _values[_storage(value)] if _on_device(value) else value


def _on_device(value):
    return isinstance(value, torch.Tensor) and value.device.type == "emu"


def _memory_of(tensor):
    return _memories[_keys[_storage(tensor)]]


def _leaves(value):
    """The tensors and numbers in the arguments of an operator; torch's own walk takes longer than a kernel."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _mapped(function, value):
    return type(value)(_mapped(function, each) for each in value) if type(value) in (list, tuple) else function(value)


def _kernel(op, *args, **kwargs):
    """Any operator with a tensor of the device among its arguments, or that makes one there."""
    name = op.name()
    is_view = _is_view(op)
    if not is_view and not name.startswith("aten::empty"):  # Those run no kernel.
        check_health()
    if name == "aten::view":
        views.append((threading.current_thread().name, current_stream()))
    if name == "aten::_copy_from":
        return _copy(*args, **kwargs)
    flat = [leaf for leaf in _leaves((args, tuple(kwargs.values()))) if _on_device(leaf)]
    if name == "aten::_local_scalar_dense":
        current_stream().synchronize()
    elif name == "aten::record_stream":
        return None
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu"), "pin_memory": None}
    with _lock:
        stream = current_stream()
        number = stream.launch()
        written = _written(op, args, kwargs)
        same = {id(_inner(tensor)): tensor for tensor in flat}
        with torch.emu.default_generators[0].drawing(op):
            out = op(
                *_mapped(_inner, _with_offset(name, args)),
                **{key: _mapped(_inner, value) for key, value in kwargs.items()},
            )
        counts = True
        if is_view and not out.is_contiguous():
            # torch sees tensors without gaps, so it would take the strides of a view of this view from those.
            is_view, out, counts = False, out.contiguous(), False
        for tensor in () if is_view else flat:
            _memory_of(tensor).use(
                stream, number, name, _inner(tensor), write=any(tensor is other for other in written)
            )

        def wrap(value):
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) in same:
                return same[id(value)]
            made = _make(value, stream, counts)
            if not is_view:
                _memory_of(made).use(stream, number, name, value, write=True)
            return made

        return _mapped(wrap, out)


def _with_offset(name, args):
    """torch sees tensors that begin where their memory does."""
    if name != "aten::as_strided":
        return args
    tensor, size, stride, *offset = args
    return tensor, size, stride, _inner(tensor).storage_offset() + (offset[0] if offset and offset[0] else 0)


def _written(op, args, kwargs):
    found = []
    for k, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[k] if k < len(args) else None)
            found += [leaf for leaf in _leaves(value) if _on_device(leaf)]
    return found


def _is_view(op):
    infos = [returned.alias_info for returned in op._schema.returns]
    return len(infos) == 1 and infos[0] is not None and not infos[0].is_write


def _copy(source, to, non_blocking=False):
    """``to.copy_(source)``, if one of the two is on the device."""
    stream = current_stream()
    with _lock:
        number = stream.launch()
        if _on_device(source):
            _memory_of(source).use(stream, number, "copy", _inner(source), write=False)
        if _on_device(to):
            _memory_of(to).use(stream, number, "copy", _inner(to), write=True)
            _inner(to).copy_(_inner(source) if _on_device(source) else _landed(source, stream))
            if source.is_cpu:
                copied_by.add(stream)
            if non_blocking and source.is_pinned():
                reading.append([stream, number, source, source._version])
        else:
            for each in [each for each in reading if each[2].untyped_storage()._cdata == to.untyped_storage()._cdata]:
                if each[0] is not stream and stream.clock.get(each[0], 0) < each[1]:
                    raise Hazard(f"a copy on {stream} overwrites what one on {each[0]} may still be reading")
                reading.remove(each)
            value = _inner(source).clone()
            if to.is_floating_point():
                to.fill_(float("nan"))
            elif to.dtype is not torch.bool:
                to.fill_(torch.iinfo(to.dtype).min)
            _state.landing.append((stream, number, to, value))
    if not (non_blocking or (_on_device(source) and _on_device(to))):
        stream.synchronize()
    return to


copied_by: set[Stream] = set()
"""The streams that have copied something from the host."""
reading: list[list] = []
"""Of copies out of pinned memory that may not be over: stream, number, tensor, and its version then."""
_pinned: set[int] = set()


def _pin(tensor, *_):
    return _mark_pinned(tensor.clone())


def _mark_pinned(tensor):
    storage = tensor.untyped_storage()
    _pinned.add(storage._cdata)
    weakref.finalize(storage, _pinned.discard, storage._cdata)
    return tensor


def _landed(source, stream):
    """What a copy from the host on ``stream`` reads there: what other copies bring, if it is queued behind them."""
    for other, count, to, value in _state.landing:
        if to.untyped_storage()._cdata == source.untyped_storage()._cdata and stream.clock.get(other, 0) >= count:
            # Of both, the memory is in one piece; ``source`` may be a part of it.
            return value.flatten().as_strided(
                source.shape, source.stride(), source.storage_offset() - to.storage_offset()
            )
    return source


class _Module(SimpleNamespace):
    """What ``torch.get_device_module`` gives."""


def _install():
    module = _Module(
        Stream=Stream, Event=Event, current_stream=current_stream, default_stream=default_stream, stream=stream,
        default_generators=[Philox()],
        set_stream=set_stream, set_device=_set_device, device=_device, synchronize=synchronize,
        is_initialized=lambda: True, is_available=lambda: True,
        current_device=lambda: _index(None), _is_in_bad_fork=lambda: False, manual_seed_all=lambda seed: None,
        device_count=lambda: DEVICES, memory_stats=lambda device=None: {}, memory_allocated=lambda device=None: 0,
        get_device_properties=lambda device=None: SimpleNamespace(total_memory=1 << 30), empty_cache=check_health,
    )  # fmt: skip
    backend_registration._setup_privateuseone_for_python_backend("emu", module)
    library = torch.library.Library("_", "IMPL")
    library.fallback(_kernel, "PrivateUse1")
    views = torch.library.Library("aten", "IMPL")
    views.impl("view.dtype", lambda *args: _kernel(torch.ops.aten.view.dtype, *args), "PrivateUse1")
    # Pinned memory needs a real device.
    torch.Tensor.pin_memory = _pin
    torch.Tensor.record_stream = _record_stream
    torch.Tensor.is_pinned = lambda self, *_: self.untyped_storage()._cdata in _pinned
    copies._pinned_like = lambda tensor: _mark_pinned(torch.empty(tensor.shape, dtype=tensor.dtype))
    _defaults.extend(Stream(k) for k in range(DEVICES))
    return library, views


_library = _install()

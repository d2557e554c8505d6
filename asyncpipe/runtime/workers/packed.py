"""Messages as bytes. Large buffers stay out of the pickle, so that they are not copied into it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Final

from asyncpipe.errors import MessageError

__all__ = ["EMPTY", "SMALLEST_OUT_OF_BAND", "Packed", "pack", "unpack"]

SMALLEST_OUT_OF_BAND = 1 << 16
"""Bytes. A smaller buffer costs less inside the pickle than in a frame of its own."""


class Packed:
    """A pickled message. To pack a large one in another thread, or one message once for several workers.

    ``parts`` are the pickle and the buffers that it refers to. These are views of the message's own memory: nobody may
    write to it until the message is sent.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self.parts = tuple(parts)


EMPTY: Final = Packed(())
"""No message: what there is to say is in the message's role."""


def pack(message: object) -> Packed:
    """``message`` as bytes; as it is, if it is packed already. From any thread. Raises ``MessageError``."""
    if isinstance(message, Packed):
        return message
    buffers: list[memoryview] = []

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        if (raw := buffer.raw()).nbytes < SMALLEST_OUT_OF_BAND:
            return True
        buffers.append(raw)
        return False

    try:
        pickled = pickle.dumps(message, protocol=5, buffer_callback=keep_in_band)
    except Exception as error:  # A class's own methods run here.
        raise MessageError(
            f"a {type(message).__qualname__} cannot be sent to another process, because it cannot be pickled "
            f"({type(error).__name__}: {error}); functions and classes must be importable from a module"
        ) from error
    return Packed((memoryview(pickled), *buffers))


def unpack(packed: Packed, main_class: Callable[[str], Any]) -> Any:
    """The message. ``main_class`` gives what has this name in the module that the controller runs as its script.

    Raises ``MessageError``. Imports the modules of the classes in the message.
    """
    pickled, *buffers = packed.parts
    try:
        return _MessageUnpickler(pickled, buffers, main_class).load()
    except MessageError:
        raise
    except Exception as error:  # A class's own methods run here, and modules are imported.
        raise MessageError(
            f"a message from another process cannot be unpickled ({type(error).__name__}: {error}); its functions and "
            "classes must be importable from a module in every process"
        ) from error


class _MessageUnpickler(pickle.Unpickler):
    def __init__(self, pickled: memoryview, buffers: Sequence[memoryview], main_class: Callable[[str], Any]) -> None:
        super().__init__(io.BytesIO(pickled), buffers=buffers)
        self._main_class = main_class

    def find_class(self, module: str, name: str) -> Any:
        if module in ("__main__", "__mp_main__"):
            return self._main_class(name)
        return super().find_class(module, name)

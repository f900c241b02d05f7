"""A GPU and its handle: one device of NVML, asked by the names of pynvml's functions and constants.

The names are text, so that collectors can be declared without pynvml, and a pynvml or a driver that lacks one is a device without it.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pynvml

from dshealthd.collector import Fault, NotAvailable, Reason, SourceError
from dshealthd.devices import codes
from dshealthd.devices.fields import Batch
from dshealthd.devices.values import Fields, number

if TYPE_CHECKING:
    from collections.abc import Callable

Call = tuple[str | int, ...]
"""A function of pynvml and its arguments after the handle; a text argument is the name of a constant of pynvml."""
_FAILURES_AT_MOST = 3
"""So many failing calls in one reading, and the device counts as failing: each may take the driver's own time-out."""


class DeviceError(Exception):
    """The device as a whole cannot be read."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@functools.cache
def _named(name: str | int) -> Any:
    """Return what pynvml calls so, None if this version has no such thing; numbers stand for themselves."""
    return getattr(pynvml, name, None) if isinstance(name, str) else name


class Device:
    """A handle, and what is known not to work with it. Lives from one enumeration to the next."""

    def __init__(self, part: str, handle: Any, session_ended: Callable[[pynvml.NVMLError], SourceError | NotAvailable]) -> None:
        """Take a handle; `session_ended` makes the error to raise when NVML as a whole is gone."""
        self.part = part
        self.handle = handle
        self.notes: list[Fault] = []
        """Single calls that failed since `take_notes`; what they would have told is left out."""
        self._session_ended = session_ended
        self._calls: dict[Call, tuple[Any, tuple[Any, ...]] | None] = {}
        self._constants: dict[Call, Any] = {}
        self._structures: dict[Call, Any] = {}
        self._batches: dict[Fields, Batch] = {}

    def ask(self, *call: str | int) -> Any:
        """Return what a function of pynvml says of this device, or None where it says nothing.

        DeviceError if the device is gone, SourceError or NotAvailable if NVML is. Another failure is noted, and None.
        """
        try:
            prepared = self._calls[call]
        except KeyError:
            named = [_named(name) for name in call]
            prepared = self._calls[call] = None if None in named else (named[0], tuple(named[1:]))
        if prepared is None:
            return None
        function, arguments = prepared
        try:
            value = function(self.handle, *arguments)
        except pynvml.NVMLError as error:
            self._failed(error, call)
            return None
        except UnicodeDecodeError as error:
            self._note(Reason.MALFORMED, f"{call[0]}: {error}")
            return None
        return number(value) if value.__class__ is int else value

    def first(self, *calls: Call) -> Any:
        """Return what the first of several functions says that says anything: newer names before older ones."""
        for call in calls:
            if (value := self.ask(*call)) is not None:
                return value
        return None

    def once(self, *call: str | int) -> Any:
        """Return what `ask` returned first: for what does not change between two enumerations."""
        return self.keep(call, lambda: self.ask(*call))

    def keep(self, key: Call, make: Callable[[], Any]) -> Any:
        """Return what `make` returned first that was not None."""
        value = self._constants.get(key)
        if value is None and (value := make()) is not None:
            self._constants[key] = value
        return value

    def fill(self, function: str, structure: str) -> Any:
        """Return a structure of pynvml filled by a function that takes it by reference, or None as `ask` does."""
        key = (function, structure)
        if key not in self._structures:
            kind = _named(structure)
            self._structures[key] = kind and kind()
        filled = self._structures[key]
        if filled is None:
            return None
        if key not in self._calls:
            made = _named(function)
            self._calls[key] = made and (made, (ctypes.byref(filled),))
        return None if self.ask(*key) is None else filled

    def fields(self, fields: Fields) -> list[float | None]:
        """Return the value of each field, None where there is none, in one call of NVML."""
        batch = self._batches.get(fields)
        if batch is None:
            # A name that this pynvml lacks becomes field 0, which no driver supports.
            batch = self._batches[fields] = Batch([(_named(name) or 0, scope) for name, scope in fields.fields])
        values, failure = batch.read(self.handle)
        if failure:
            self._failed(pynvml.NVMLError(failure), ("nvmlDeviceGetFieldValues",))
        return values

    def of(self, handle: Any) -> Device:
        """Return a part of this device: a MIG device, whose failures are this one's."""
        part = Device(self.part, handle, self._session_ended)
        part.notes = self.notes
        return part

    def take_notes(self) -> list[Fault]:
        """Return the failures since the last time as one fault, if there were any."""
        if not self.notes:
            return []
        first, more = self.notes[0], len(self.notes) - 1
        self.notes.clear()
        return [first._replace(detail=f"{first.detail}; {more} more calls failed") if more else first]

    def _failed(self, error: pynvml.NVMLError, call: Call) -> None:
        """Sort out what a failing call says about itself, the device, or NVML."""
        code = error.value
        if code in codes.UNSUPPORTED:
            self._calls[call] = None
        elif code in codes.OF_SESSION:
            raise self._session_ended(error) from error
        elif code in codes.OF_DEVICE:
            raise DeviceError(codes.reason(code), f"{call[0]}: {codes.describe(error)}") from error
        elif code not in codes.NOTHING_NOW:
            self._note(codes.reason(code), f"{call[0]}: {codes.describe(error)}")

    def _note(self, reason: Reason, detail: str) -> None:
        self.notes.append(Fault(self.part, reason, detail))
        if len(self.notes) >= _FAILURES_AT_MOST:
            raise DeviceError(self.notes[0].reason, f"{self.notes[0].detail}, and so say further calls")


@dataclass
class Gpu:
    """One position in NVML's list."""

    index: int
    uuid: str
    """Empty if it was never known in this session."""
    device: Device | None = None
    """None if the GPU could not be opened."""
    fault: Fault | None = None
    """Why it cannot be read in this sweep."""
    energy: float | None = None
    """Millijoules since the driver was loaded, as of this sweep."""
    looked_at: bool = False
    quarantined: bool = False
    """The fault is that a worker hung or crashed at it: leave it alone."""

    @property
    def part(self) -> str:
        """Its name where a fault or a deadline is concerned."""
        return f"gpu {self.index}"

    @property
    def labels(self) -> tuple[str, str]:
        """Values of the labels `gpu` and `uuid`."""
        return str(self.index), self.uuid

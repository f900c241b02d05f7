"""What a heartbeat puts into torch and into a program, and takes out again.

Beside hooks of torch's own, which it removes itself, there are two ways:

- `replace` puts a function in place of one of torch's. It is looked up as fast as the original.
- `follow` puts a descriptor into the class of one of the program's objects. That object alone finds
  our function; the class and everything else find their own. So nothing of ours is in the object,
  where copies and pickles of it would have it as well, nor in a pickle of the class: cloudpickle
  and dill write a class of `__main__` whole. Where the program itself has put a function into the
  object, ours takes its place there, and is copied and pickled as it.

Neither nests: what an ended heartbeat could not take out, as somebody had wrapped it meanwhile, is
not wrapped again. Neither holds an object or a class of the program.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns what is called instead of a function."""
_bind = types.MethodType
_replaced: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""What each of our functions was put in place of."""


class Installed:
    """What stands in torch and in the program until it is undone."""

    def __init__(self) -> None:
        self._undo = contextlib.ExitStack()

    def add(self, undo: Callable[[], object]) -> None:
        """Call `undo` with the rest."""
        self._undo.callback(undo)

    def part(self) -> Installed:
        """Return a part of this, which may be undone earlier, and more than once."""
        part = Installed()
        self.add(part.undo)
        return part

    def undo(self) -> None:
        """Take all out again, the last first."""
        self._undo.close()

    def replace(self, owner: Any, name: str, wrap: Wrap) -> None:
        """Wrap a function of one of torch's classes or modules, which need not have it."""
        own = vars(owner).get(name)
        if isinstance(own, types.FunctionType) and own in _replaced:
            own = _replaced[own]
            _put_back(owner, name, own)
        original = getattr(owner, name, None)
        if original is None:
            return
        called = functools.wraps(original)(wrap(original))

        def undo() -> None:
            if vars(owner).get(name) is called:  # else somebody has wrapped it after us
                _put_back(owner, name, own)

        setattr(owner, name, called)
        _replaced[called] = own
        self.add(undo)

    def follow(self, target: Any, name: str, wrap: Wrap) -> None:
        """Wrap a method of one object; both functions take the object first."""
        if name in vars(target):
            self._follow_own(target, name, wrap)
            return
        place = _Method(target, name)
        call = place.call()
        self._put(place, functools.wraps(call)(wrap(call)))

    def _follow_own(self, target: Any, name: str, wrap: Wrap) -> None:
        """Wrap what the program has put into an object in place of its class's method."""
        called, reference = _Own(target, vars(target)[name], wrap), weakref.ref(target)
        own = weakref.ref(called)

        def undo() -> None:
            target, called = reference(), own()
            if target is not None and called is not None and vars(target).get(name) is called:
                setattr(target, name, called.own)

        setattr(target, name, called)
        self.add(undo)

    def change(self, target: Any, name: str, value: Any) -> None:
        """Have one object find another value in place of its class's."""
        self._put(_Place(target, name), value)

    def _put(self, place: _Place, changed: Any) -> None:
        place.put(changed)
        removal = weakref.WeakMethod(place.remove)

        def undo() -> None:
            remove = removal()
            if remove is not None:  # else the class is gone
                remove()

        self.add(undo)


class _Place:
    """An attribute of a class that one object finds changed, and everything else as it was."""

    __slots__ = ("__weakref__", "_kind", "_name", "changed", "own", "target")

    def __init__(self, target: Any, name: str) -> None:
        """Prepare to change what `target` finds by this name."""
        kind = type(target)
        own = vars(kind).get(name)
        while isinstance(own, _Place) and own.target() is None:
            own = own.own
        self._kind, self._name = kind, name
        self.own: Any = own
        self.target: Callable[[], Any] = weakref.ref(target)
        self.changed: Any = None

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is not None and instance is self.target():
            return self.changed
        return self.original(instance, owner)

    def __reduce__(self) -> tuple[Any, ...]:
        own = self.own
        if own is None:
            name = self._name
            own = next(vars(base)[name] for base in self._kind.__mro__[1:] if name in vars(base))
        return operator.getitem, ((own,), 0)

    def original(self, instance: Any, owner: Any = None) -> Any:
        """Return what an object or its class finds without us."""
        own = self.own
        if own is None:
            return getattr(super(self._kind, owner if instance is None else instance), self._name)
        bind = getattr(type(own), "__get__", None)
        return own if bind is None else bind(own, instance, owner)

    def put(self, changed: Any) -> None:
        self.changed = changed
        setattr(self._kind, self._name, self)

    def remove(self) -> None:
        """Have the object find what it found before."""
        self.target = _nothing
        if vars(self._kind).get(self._name) is self:  # else somebody has wrapped it after us
            _put_back(self._kind, self._name, self.own)


class _Method(_Place):
    """A method that one object finds changed."""

    __slots__ = ()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is not None and instance is self.target():
            return _bind(self.changed, instance)
        return self.original(instance, owner)

    def call(self) -> Callable[..., Any]:
        """Return the function that the object's method is, which takes the object first."""
        kind, name, own, original = self._kind, self._name, self.own, self.original
        if isinstance(own, types.FunctionType):
            return own

        # Anew each time: somebody may replace what is inherited, as `torch.fx` does.
        def inherited(instance: Any, *arguments: Any, **named: Any) -> Any:
            return getattr(super(kind, instance), name)(*arguments, **named)

        def bound(instance: Any, *arguments: Any, **named: Any) -> Any:
            return original(instance)(*arguments, **named)

        return functools.wraps(original(None, kind))(inherited if own is None else bound)


class _Own:
    """What an object has in place of its class's method, changed; its copies have the original."""

    def __init__(self, target: Any, own: Callable[..., Any], wrap: Wrap) -> None:
        functools.update_wrapper(self, own)
        self.own = own
        self._target = weakref.ref(target)
        self._changed = wrap(lambda _target, *arguments, **named: own(*arguments, **named))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._changed(self._target(), *arguments, **named)

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, ((self.own,), 0)


def compiling() -> Callable[[], bool]:
    """Return torch's test for whether a call is being traced.

    The compiler evaluates it as true, so that nothing of ours is traced.
    """
    compiler = getattr(sys.modules["torch"], "compiler", None)
    return getattr(compiler, "is_compiling", None) or (lambda: False)


def _nothing() -> None:
    return None


def _put_back(owner: Any, name: str, own: Any) -> None:
    """Give a class or module what its dictionary had by a name; None if there was nothing.

    What `getattr` finds there would do for a function of Python only: one of C++ that is a method
    (`instancemethod`) is found without what binds it to an object.
    """
    if own is None:
        delattr(owner, name)
    else:
        setattr(owner, name, own)

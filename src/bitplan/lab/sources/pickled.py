"""The plain data inside a pickle, read without unpickling it.

``pickle.load`` executes whatever a file contains. Here the file's operations are only listed (by the standard library's
:mod:`pickletools`) and interpreted as far as they build plain values; a call is recorded as its name and arguments and
never made. NumPy arrays of bytes are reconstructed from such a recorded call.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


class NotPlainData(ValueError):
    """The pickle holds something other than plain values and arrays of bytes."""


@dataclass
class Call:
    """A call in the pickle, which is never made."""

    name: str
    arguments: Any
    state: Any = None


_MARK = object()
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
#: NumPy's names of number types.
_NUMBERS = frozenset({"u1", "uint8", "i1", "i2", "i4", "i8", "f4", "f8", "b1"})
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def plain_data(content: bytes) -> Any:
    """The contents of the pickle `content`, without making its calls.

    >>> import pickle
    >>> plain_data(pickle.dumps({"labels": [3, 1, 2], "name": "batch 1"}, protocol=2))
    {'labels': [3, 1, 2], 'name': 'batch 1'}
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for operation, argument, _ in pickletools.genops(content):
            _follow(operation.name, argument, stack, memo)
        (result,) = stack
    except NotPlainData:
        raise
    except Exception as error:  # a damaged file fails in many ways, which need no distinction
        raise NotPlainData(f"not a readable pickle ({type(error).__name__})") from error
    return result


def _follow(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    if name in ("PROTO", "FRAME", "STOP"):
        return
    if name == "MARK":
        stack.append(_MARK)
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name in _LITERALS:
        stack.append(argument)
    elif name in _EMPTY:
        stack.append(_EMPTY[name]())
    elif name in _TUPLES:
        stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
    elif name == "DICT":
        items = _down_to_mark(stack)
        stack.append(dict(zip(items[::2], items[1::2], strict=True)))
    elif name in ("TUPLE", "LIST"):
        items = _down_to_mark(stack)
        stack.append(tuple(items) if name == "TUPLE" else items)
    elif name in ("APPEND", "APPENDS"):
        items = [stack.pop()] if name == "APPEND" else _down_to_mark(stack)
        stack[-1].extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = [*reversed([stack.pop(), stack.pop()])] if name == "SETITEM" else _down_to_mark(stack)
        stack[-1].update(zip(items[::2], items[1::2], strict=True))
    elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
        memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
    elif name in ("GET", "BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name in ("GLOBAL", "STACK_GLOBAL"):
        text = argument if name == "GLOBAL" else " ".join(reversed([stack.pop(), stack.pop()]))
        stack.append(Call(text.replace(" ", "."), None))
    elif name == "REDUCE":
        arguments, function = stack.pop(), stack.pop()
        stack.append(_reduced(function.name, arguments))
    elif name == "NEWOBJ":
        arguments, kind = stack.pop(), stack.pop()
        stack.append(Call(kind.name, arguments))
    elif name == "BUILD":
        state = stack.pop()
        stack[-1].state = state
    else:
        raise NotPlainData(f"more than plain data ({name})")


def _down_to_mark(stack: list[Any]) -> list[Any]:
    place = len(stack) - 1 - next(number for number, item in enumerate(reversed(stack)) if item is _MARK)
    items = stack[place + 1 :]
    del stack[place:]
    return items


def _reduced(name: str, arguments: Any) -> Any:
    if name == "_codecs.encode":
        return _encoded(arguments)
    if name == "collections.defaultdict":
        return {}  # filled by what follows; a default factory is not needed
    return Call(name, arguments)


def _encoded(arguments: Any) -> bytes:
    """Decode bytes that Python 3 wrote in Python 2's protocol."""
    match arguments:
        case (str(text), "latin1"):
            return text.encode("latin-1")
    raise NotPlainData("a text in another encoding")


def bytes_array(call: Any) -> NDArray[np.uint8]:
    """The NumPy array of unsigned bytes that `call` would make."""
    array = any_array(call)
    if array.dtype != np.uint8:
        raise NotPlainData("no array of bytes")
    return array


def any_array(call: Any) -> NDArray[Any]:
    """The NumPy array of numbers that `call` would make."""
    match call:
        case Call(
            name=name, state=(_, tuple(shape), Call(name="numpy.dtype", arguments=(kind, *_)) as of, fortran, data)
        ):
            if not name.endswith("multiarray._reconstruct"):
                raise NotPlainData(f"a call of {name}")
            array = np.frombuffer(_bytes(data), _number_type(kind, of.state))
            if array.size != np.prod(shape):
                raise NotPlainData("an array whose data and shape differ")
            return array.reshape(shape, order="F" if fortran else "C")
    raise NotPlainData("no array of numbers")


def _number_type(kind: Any, state: Any) -> np.dtype[Any]:
    """The dtype that NumPy calls `kind`; the second value of its state is the byte order."""
    name = kind.decode("latin-1") if isinstance(kind, bytes) else str(kind)
    if name not in _NUMBERS:
        raise NotPlainData(f"an array of {name}")
    order = state[1] if isinstance(state, tuple) and len(state) > 1 else "="
    order = order.decode("latin-1") if isinstance(order, bytes) else str(order)
    return np.dtype(f"{order}{name}") if order in ("<", ">") else np.dtype(name)


def _bytes(data: Any) -> bytes:
    match data:
        case bytes():
            return data
        case str():  # Python 2's strings are bytes, which pickletools shows as Latin-1
            return data.encode("latin-1")
    raise NotPlainData("an array without its bytes")

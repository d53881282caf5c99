from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from bitplan.lab.sources.pickled import NotPlainData, bytes_array, plain_data

PLAIN = {
    "numbers": [1, -2, 300, 70_000, 2**40, 1.5],
    "texts": ["a", "ä" * 300, b"bytes", b"x" * 300],
    "others": (None, True, False, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    "nested": {"empty": {}, "list": [[], [1]]},
    7: "a number as key",
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_come_out_as_pickle_would_give_them(protocol: int) -> None:
    assert plain_data(pickle.dumps(PLAIN, protocol)) == PLAIN


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_shared_values_are_followed(protocol: int) -> None:
    shared = ["x"]
    assert plain_data(pickle.dumps([shared, shared, ("x", "x")], protocol)) == [["x"], ["x"], ("x", "x")]


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_bytes_come_out_without_a_call(protocol: int, order: str) -> None:
    array = np.asarray(np.arange(200, dtype=np.uint8).reshape(4, 50), order=order)  # type: ignore[call-overload]
    held = plain_data(pickle.dumps({"data": array}, protocol))
    assert np.array_equal(bytes_array(held["data"]), array)


def test_what_python_2_wrote_is_read() -> None:
    # A dictionary with a string and an array, in the opcodes that Python 2's protocol 2 used: strings are bytes.
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
    state = b"(K\x01K\x02K\x03\x86cnumpy\ndtype\n(U\x02u1K\x00K\x01tR\x89U\x06\x00\x01\x02\xfe\xff\x80tb"
    held = plain_data(b"\x80\x02}(U\x04dataq\x01" + array + state + b"U\x06labels](K\x01K\x09eu.")
    assert held["labels"] == [1, 9]
    assert bytes_array(held["data"]).tolist() == [[0, 1, 2], [254, 255, 128]]


class Bomb:
    """What a hostile pickle does: it calls something as it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_is_ever_called(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "called"
    content = pickle.dumps({"data": Bomb(mark)}, protocol)
    held = plain_data(content)
    with pytest.raises(NotPlainData, match="no array of numbers"):
        bytes_array(held["data"])
    assert not mark.exists()
    pickle.loads(content)
    assert mark.exists()  # so it would have been


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\x80\x02.", b"\x80\x02}(U\x04dat", b"\x80\x02K\x01K\x02.", b"\x80\x02e."]
)
def test_damaged_pickles_are_refused(content: bytes) -> None:
    with pytest.raises(NotPlainData):
        plain_data(content)


@pytest.mark.parametrize("value", [{1, 2}, bytearray(b"x"), 1j, Path("x")])
def test_what_is_not_plain_is_no_array(value: object) -> None:
    try:
        held = plain_data(pickle.dumps(value, 4))
    except NotPlainData:
        return
    with pytest.raises(NotPlainData):
        bytes_array(held)


@pytest.mark.parametrize("array", [np.zeros(3, np.int16), np.zeros(3), np.array([object()])])
def test_arrays_of_other_things_are_refused(array: np.ndarray) -> None:  # type: ignore[type-arg]
    with pytest.raises(NotPlainData):
        bytes_array(plain_data(pickle.dumps(array, 2)))


def test_an_array_whose_shape_lies_is_refused() -> None:
    content = pickle.dumps(np.arange(6, dtype=np.uint8).reshape(2, 3), 2).replace(b"K\x02K\x03", b"K\x02K\x04")
    with pytest.raises(NotPlainData, match="data and shape differ"):
        bytes_array(plain_data(content))

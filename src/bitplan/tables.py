"""Results in rows and columns: a :class:`Table` prints at 80 columns and converts to a dictionary, pandas and HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from bitplan.errors import BitplanError

if TYPE_CHECKING:
    import pandas

Row = TypeVar("Row")

#: Printed tables are at most this wide.
WIDTH = 80
#: A table that is displayed, in a notebook or at a prompt, has at most so many rows; print() shows all.
MOST_ROWS = 60
#: No column is made narrower than this to fit the width.
_LEAST_WIDTH = 8
_GAP = "  "


class Table(Sequence[Row], Generic[Row]):
    """Rows in their order: iterates, indexes and compares like a list of them.

    >>> lengths = Table(["ab", "c"], {"word": str, "letters": len})
    >>> print(lengths)
    word  letters
    ab          2
    c           1
    >>> len(lengths), lengths[0], lengths == ["ab", "c"], lengths.to_dict()
    (2, 'ab', True, {'word': ['ab', 'c'], 'letters': [2, 1]})
    """

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have none

    def __init__(
        self, rows: Iterable[Row], columns: Mapping[str, Callable[[Row], Any]], empty: str = "no rows"
    ) -> None:
        """`columns`: name -> plain value (text, number, boolean or None) of a row. `empty`: printed for no rows."""
        self._rows = tuple(rows)
        self._columns = dict(columns)
        self._empty = empty

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Table[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Table[Row]:
        if isinstance(index, slice):
            return Table(self._rows[index], self._columns, self._empty)
        return self._rows[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Table, list, tuple)):
            return NotImplemented
        return self._rows == tuple(other)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self._columns)

    def to_dict(self) -> dict[str, list[Any]]:
        """Column -> its plain values, one per row."""
        return {name: [value(row) for row in self._rows] for name, value in self._columns.items()}

    def to_pandas(self) -> pandas.DataFrame:
        """The table as a pandas DataFrame."""
        try:
            import pandas
        except ImportError:
            raise BitplanError("to_pandas() needs pandas, which is not installed: pip install pandas.") from None
        return pandas.DataFrame(self.to_dict(), columns=self.columns)

    def __str__(self) -> str:
        return plain_table(self.to_dict()) if self._rows else self._empty

    def __repr__(self) -> str:
        return "\n".join([str(self[:MOST_ROWS]), *self._left_out()])

    def _repr_html_(self) -> str:
        if not self._rows:
            return f"<p>{escape(self._empty)}</p>"
        return html_table(self[:MOST_ROWS].to_dict()) + "".join(f"<p>{escape(line)}</p>" for line in self._left_out())

    def _left_out(self) -> list[str]:
        """A line that says how many rows a display leaves out; none where it shows all."""
        rest = len(self) - MOST_ROWS
        return [f"... and {rest:,} more rows: print() shows all."] if rest > 0 else []


def plain_table(columns: Mapping[str, Sequence[Any]], width: int = WIDTH) -> str:
    """Columns as text of at most `width` characters a line; long cells are wrapped, numbers stand to the right."""
    texts = {name: [_text(value) for value in values] for name, values in columns.items()}
    widths = {name: max([len(name), *map(len, cells)]) for name, cells in texts.items()}
    room = width - len(_GAP) * (len(texts) - 1)
    whole = {
        name: max(len(word) for cell in (name, *cells) for word in cell.split() or [""])
        for name, cells in texts.items()
    }
    while sum(widths.values()) > room:
        # Columns that can break between words give way first, so that names stay in one piece.
        breakable = [name for name in widths if widths[name] > max(whole[name], _LEAST_WIDTH)]
        widest = max(breakable or widths, key=lambda name: widths[name])
        if widths[widest] <= _LEAST_WIDTH:
            break
        widths[widest] -= 1
    numeric = {name: _is_numeric(values) for name, values in columns.items()}
    lines: list[str] = []
    for cells in [list(texts), *map(list, zip(*texts.values(), strict=True))]:
        parts = [wrap(cell, widths[name]) or [""] for name, cell in zip(texts, cells, strict=True)]
        for number in range(max(map(len, parts))):
            padded = [
                (part[number] if number < len(part) else "").rjust(widths[name])
                if numeric[name]
                else (part[number] if number < len(part) else "").ljust(widths[name])
                for name, part in zip(texts, parts, strict=True)
            ]
            lines.append(_GAP.join(padded).rstrip())
    return "\n".join(lines)


def html_table(columns: Mapping[str, Sequence[Any]]) -> str:
    """Columns as an HTML table; everything in it is escaped."""

    def cell(tag: str, name: str, text: str) -> str:
        align = "right" if numeric[name] else "left"
        return f'<{tag} style="text-align:{align}">{escape(text)}</{tag}>'

    numeric = {name: _is_numeric(values) for name, values in columns.items()}
    head = "".join(cell("th", name, name) for name in columns)
    body = "".join(
        f"<tr>{''.join(cell('td', name, _text(value)) for name, value in zip(columns, row, strict=True))}</tr>"
        for row in zip(*columns.values(), strict=True)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _is_numeric(values: Sequence[object]) -> bool:
    numbers = [value for value in values if value is not None]
    return bool(numbers) and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in numbers)

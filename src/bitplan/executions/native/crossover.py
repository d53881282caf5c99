"""The sizes from which on low-precision backends are faster on this machine: measured once, and cached in a file.

A linear layer's three GEMMs with their casts are timed in turns with the same GEMMs in the model's precision, for
square matrices of growing size. GEMMs with fewer multiply-accumulates than the smallest size from which on the backend
always won are not native. Casts are compiled, as in a compiled model. On a GPU the calls are replayed as a CUDA graph,
because a compiled model hides the host's time behind the device's. The whole table is measured several times and the
fastest times count, so that a short burst of other work does not decide it. One process measures at a time, and the
others then read its table. A table whose rounds disagree about the faster one was measured on a busy machine: it serves
this process, is not cached, and a warning says so.

Convolutions that need im2col are timed against torch's own in the same way, for 3x3 kernels with growing numbers of
channels: the cost of im2col is amortised over the output channels.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bitplan.compiler import torch_private
from bitplan.compiler.torch_private import unset_fake_temporarily
from bitplan.errors import BitplanWarning
from bitplan.executions.native.backends import GemmBackend, backends_of, supports_shape
from bitplan.executions.native.convolution import ConvGemmLayout
from bitplan.executions.native.float8_cast import FORMATS, INPUT_DTYPES, cast_float8
from bitplan.executions.native.gemm import BY_ROW, Codes, GemmLayout, codes_of
from bitplan.executions.native.paths import NativeTerms
from bitplan.files import locked, parse_json, write_whole
from bitplan.gemm.products import Product
from bitplan.machine import cpu_name
from bitplan.numerics.noise import preserve_rng_state
from bitplan.numerics.quantizer import Quantizer, make_quantizer
from bitplan.plans.match import PASSES
from bitplan.progress import announced, duration_text

log = logging.getLogger("bitplan")

SIZES = {"cpu": (128, 256, 512, 1024, 2048), "cuda": (512, 1024, 2048, 3072, 4096, 8192)}
#: Channels of 3x3 convolutions, and (samples, height and width) of their images, by device type.
CHANNELS = (16, 32, 64, 128, 256)
IMAGES = {"cpu": (8, 14), "cuda": (64, 28)}
#: For backends that won at no measured size.
NEVER = 1 << 62
#: Part of the cache key: tables that were measured by another method are measured again.
_METHOD = "three products, compiled"
#: Measurements of the whole table, of which the fastest times count.
ROUNDS = 3
#: Timed calls of a size in each of them.
_CALLS = 3
#: Ratios of both times that differ by no more than this are close: where they disagree about the faster one, it does
#: not matter.
_WIDEST_RATIOS = 0.2
#: Alternating measurements of a single product.
_TURNS = 7
#: What measuring takes, roughly: to announce it; and how long a process waits at most for others that measure.
_SECONDS, _MOST_SECONDS_WAITED = 20.0, 60.0
#: Calls per CUDA graph, so that its launch does not count.
_CALLS_PER_GRAPH = 10
_FORMATS = {"int8": "int8", "fp8": "e4m3"}


@dataclass(frozen=True)
class Crossing:
    """Milliseconds of one size, in the model's precision and on a backend. Its fields are those of the cache file."""

    unit: str
    #: The side of square matrices, or the channels of a convolution.
    size: int
    plain: float
    native: float

    def __post_init__(self) -> None:
        times = (self.plain, self.native)
        if (
            not isinstance(self.unit, str)
            or type(self.size) is not int
            or self.size < 1
            or not all(type(value) in (int, float) and 0 < value < math.inf for value in times)
        ):
            raise ValueError(f"{self} is no row of a crossover table")


@dataclass(frozen=True)
class Rounds:
    """The whole table, measured several times."""

    tables: list[list[Crossing]]

    @property
    def fastest(self) -> list[Crossing]:
        """The table of the shortest times."""
        return fastest(row for table in self.tables for row in table)

    @property
    def is_quiet(self) -> bool:
        """Whether most rounds agree with the fastest times about which is faster, or all are close to each other.

        >>> def rounds(*native):
        ...     return Rounds([[Crossing("int8", 8, 1.0, time)] for time in native])
        >>> rounds(0.5, 0.9, 10.0).is_quiet, rounds(0.97, 1.02, 1.03).is_quiet, rounds(0.6, 1.4, 1.5).is_quiet
        (True, True, False)
        """
        ratios: dict[tuple[str, int], list[float]] = {}
        for row in (row for table in self.tables for row in table):
            ratios.setdefault((row.unit, row.size), []).append(row.native / row.plain)
        wins = {(row.unit, row.size): row.native < row.plain for row in self.fastest}
        return all(
            2 * sum((ratio < 1) == wins[size] for ratio in values) > len(values)
            or max(values) - min(values) <= _WIDEST_RATIOS
            for size, values in ratios.items()
        )


def measure_crossover(device: torch.device, dtype: torch.dtype = torch.float32) -> Rounds:
    """The table for this machine: every backend of the device, every size."""
    return _rows(_crossing, SIZES[device.type], device, dtype)


def measure_im2col_crossover(device: torch.device, dtype: torch.dtype = torch.float32) -> Rounds:
    """The same for 3x3 convolutions of channels-last images, where the backend supports so few channels."""
    return _rows(_crossing_im2col, CHANNELS, device, dtype)


def _rows(
    measure: Callable[[GemmBackend, int, torch.device, torch.dtype], Crossing | None],
    sizes: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> Rounds:
    """All rows that fit into the device's free memory; the random number generators are left as they were."""
    rounds: list[list[Crossing]] = []
    for _ in range(ROUNDS):
        rows: list[Crossing | None] = []
        with preserve_rng_state():
            for backend in backends_of(device):
                with contextlib.suppress(torch.OutOfMemoryError):
                    for size in sizes:
                        rows.append(measure(backend, size, device, dtype))
        rounds.append([row for row in rows if row is not None])
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the largest matrices take gigabytes, which torch would keep cached
    return Rounds(rounds)


def fastest(rows: Iterable[Crossing]) -> list[Crossing]:
    """One row for each backend and size, with the shortest times of all its measurements.

    >>> fastest([Crossing("int8", 8, 1.0, 9.0), Crossing("int8", 8, 4.0, 2.0)])
    [Crossing(unit='int8', size=8, plain=1.0, native=2.0)]
    """
    table: dict[tuple[str, int], Crossing] = {}
    for row in rows:
        before = table.get((row.unit, row.size), row)
        shortest = min(before.plain, row.plain), min(before.native, row.native)
        table[row.unit, row.size] = Crossing(row.unit, row.size, *shortest)
    return list(table.values())


def smallest_winning_macs(table: list[Crossing]) -> dict[str, int]:
    """Backend -> multiply-accumulates from which on every size of the table won.

    >>> int8 = [Crossing("int8", 128, 1.0, 2.0), Crossing("int8", 256, 3.0, 2.0)]
    >>> smallest_winning_macs([*int8, Crossing("fp8", 256, 1.0, 2.0)])
    {'int8': 16777216, 'fp8': 4611686018427387904}
    """
    return {backend: NEVER if size == NEVER else size**3 for backend, size in smallest_winning_sizes(table).items()}


def smallest_winning_sizes(table: list[Crossing]) -> dict[str, int]:
    """Backend -> the size from which on every size of the table won.

    >>> smallest_winning_sizes([Crossing("int8", 16, 1.0, 2.0), Crossing("int8", 32, 3.0, 2.0)])
    {'int8': 32}
    """
    smallest: dict[str, tuple[int, bool]] = {}
    for row in sorted(table, key=lambda row: -row.size):
        size, won_so_far = smallest.setdefault(row.unit, (NEVER, True))
        wins = won_so_far and row.native < row.plain
        smallest[row.unit] = (row.size if wins else size, wins)
    return {backend: size for backend, (size, _) in smallest.items()}


class CrossoverTables(NamedTuple):
    """The tables of one device and dtype."""

    linear: list[Crossing]
    im2col: list[Crossing]
    #: Whether both are in the cache file; a busy machine's are not.
    is_stored: bool = True

    def terms(self, backends: Iterable[str]) -> NativeTerms:
        """The sizes from which on these backends are used: never, where a table has no row of one."""
        never = dict.fromkeys(backends, NEVER)
        return NativeTerms(
            min_macs_by_backend=tuple({**smallest_winning_macs(self.linear), **_missing(never, self.linear)}.items()),
            min_channels_by_backend=tuple(
                {**smallest_winning_sizes(self.im2col), **_missing(never, self.im2col)}.items()
            ),
        )


def _missing(sizes: Mapping[str, int], table: Iterable[Crossing]) -> dict[str, int]:
    measured = {row.unit for row in table}
    return {backend: size for backend, size in sizes.items() if backend not in measured}


def load_crossover(device: torch.device, dtype: torch.dtype) -> NativeTerms:
    """The sizes from which on backends are faster on this machine: from the cache file, or measured now."""
    backends = [backend.name for backend in backends_of(device)]
    return crossover_tables(device, dtype).terms(backends) if backends else NativeTerms(NEVER)


def crossover_tables(device: torch.device, dtype: torch.dtype, measure_again: bool = False) -> CrossoverTables:
    """The tables of a device that has backends: from the cache file, or measured now and written there."""
    file = cache_file()
    key = f"{machine_name(device)}, {dtype}, torch {torch.__version__}, {torch.get_num_threads()} threads, {_METHOD}"
    measures = {key: measure_crossover, f"{key}, 3x3": measure_im2col_crossover}
    known = {} if measure_again else _known(file)
    if not all(known.get(name) for name in measures):
        with _while_others_wait(file):
            if not measure_again:
                known = _known(file)  # another process may have measured it meanwhile
            missing = {name: measure for name, measure in measures.items() if not known.get(name)}
            if missing:
                known |= _measure(file, missing, device, dtype)
    linear, im2col = (known[name] for name in measures)
    return CrossoverTables(linear, im2col, not any((file, name) in _UNSETTLED for name in measures))


def _known(file: Path) -> dict[str, list[Crossing]]:
    """All tables of the cache file, and those that were measured on a busy machine."""
    return _read(file) | {name: table for (path, name), table in _UNSETTLED.items() if path == file}


@contextlib.contextmanager
def _while_others_wait(file: Path) -> Iterator[None]:
    """Measure alone: several processes that measure at the same time slow each other, and none trusts its table.

    Where each must measure for itself, because no table is quiet or can be stored, the last do not wait for all others.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a cache that cannot be written: others are not waited for
            stack.enter_context(locked(file.with_suffix(".lock"), most_seconds=_MOST_SECONDS_WAITED))
        yield


def _measure(
    file: Path,
    measures: Mapping[str, Callable[[torch.device, torch.dtype], Rounds]],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, list[Crossing]]:
    """Measure tables, and write those of a quiet machine to the cache file."""
    steps = ROUNDS * len(backends_of(device)) * len(SIZES[device.type]) * len(measures)
    sentence = (
        f"measuring from which size on native products are faster on this {device.type}: "
        f"{duration_text(_SECONDS)}, once per machine."
    )
    measured: dict[str, Rounds] = {}
    # A plan may be attached under a fake mode; times need real tensors.
    with unset_fake_temporarily(), announced(sentence, steps) as advance:
        for name, measure in measures.items():
            measured[name] = measure(device, dtype)
            advance(steps // len(measures))
    tables = {name: rounds.fastest for name, rounds in measured.items()}
    for name, rounds in measured.items():
        _UNSETTLED.pop((file, name), None)
        if not rounds.is_quiet:
            _UNSETTLED[file, name] = tables[name]
    if not all(rounds.is_quiet for rounds in measured.values()):
        warnings.warn(
            "the crossover of native products was measured on a busy machine and is not remembered: run "
            "'bitplan crossover --measure' while the machine is idle.",
            BitplanWarning,
            stacklevel=5,
        )
    stored = _read(file) | {name: tables[name] for name, rounds in measured.items() if rounds.is_quiet}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {name: [asdict(row) for row in rows] for name, rows in stored.items()}
        write_whole(file, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        log.info("the crossover table is not cached, and will be measured again: %s", error)
    return tables


#: Tables of a busy machine by cache file and key: they serve this process only.
_UNSETTLED: dict[tuple[Path, str], list[Crossing]] = {}


def cache_file() -> Path:
    """The cache file of the tables; ``BITPLAN_CACHE`` names another folder."""
    folder = os.environ.get("BITPLAN_CACHE")
    if folder:
        return Path(folder) / "crossover.json"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitplan" / "crossover.json"


def _read(file: Path) -> dict[str, list[Crossing]]:
    """All tables of the cache file; none, with a warning, where it is damaged."""
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        return {str(name): [Crossing(**row) for row in rows] for name, rows in content.items()}
    except OSError:
        return {}
    except (ValueError, TypeError, AttributeError):
        warnings.warn(f"{file} is damaged: the crossover is measured again.", BitplanWarning, stacklevel=4)
        return {}


def machine_name(device: torch.device) -> str:
    """The processor or GPU, as its maker calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def _crossing(backend: GemmBackend, size: int, device: torch.device, dtype: torch.dtype) -> Crossing:
    x, w, dy = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(3))

    def plain() -> tuple[Tensor, ...]:
        return x @ w.t(), dy @ w, dy.t() @ x

    times = _in_turns(plain, lambda: _three_gemms(backend, x, w, dy, GemmLayout()), device)
    return Crossing(backend.name, size, *times)


@dataclass(frozen=True)
class ProductTime:
    """Milliseconds of a linear layer's three GEMMs, in the model's precision and on a backend with casts."""

    plain: float
    native: float
    #: Interquartile range of the ratio of both over its median, from turns that alternate.
    spread: float


def time_product(
    backend: GemmBackend, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> ProductTime | None:
    """Time a linear layer of (tokens, inputs, outputs); None where the backend does not support its shape.

    Both ways take turns, so that a busy machine slows down both alike.
    """
    tokens, inputs, outputs = shape
    layout = GemmLayout()
    shapes = (torch.Size((tokens, inputs)), torch.Size((outputs, inputs)))
    if not all(supports_shape(backend.name, device.type, layout.gemm_shape(name, *shapes)) for name in PASSES):
        return None
    with preserve_rng_state(), unset_fake_temporarily():
        x, w, dy = (torch.randn(size, device=device, dtype=dtype) for size in (*shapes, (tokens, outputs)))
        plain_call, native_call = (
            _timer(call, device)
            for call in (
                lambda: (x @ w.t(), dy @ w, dy.t() @ x),
                lambda: _three_gemms(backend, x, w, dy, layout),
            )
        )
        turns = [(plain_call(), native_call()) for _ in range(_TURNS)]
    ratios = [native / plain for plain, native in turns]
    quarters = statistics.quantiles(ratios, n=4)
    plain, native = (statistics.median(times) for times in zip(*turns, strict=True))
    return ProductTime(plain, native, (quarters[2] - quarters[0]) / statistics.median(ratios))


def _in_turns(plain: Callable[[], object], native: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """The milliseconds of the fastest calls of both, which take turns: a busy machine slows down both alike."""
    timers = _timer(plain, device), _timer(native, device)
    turns = [(timers[0](), timers[1]()) for _ in range(_CALLS)]
    return min(turn[0] for turn in turns), min(turn[1] for turn in turns)


def _timer(call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """A function that makes the call and returns its milliseconds."""
    if device.type != "cuda":
        call()  # compiles the casts

        def timed() -> float:
            began = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - began)

        return timed
    with torch.cuda.device(device):
        replay = _capture(call)

    def timed_on_device() -> float:
        with torch.cuda.device(device):  # events are of the current device
            return _device_milliseconds(replay) / _CALLS_PER_GRAPH

    return timed_on_device


def _crossing_im2col(backend: GemmBackend, channels: int, device: torch.device, dtype: torch.dtype) -> Crossing | None:
    """All three passes, because their memory layouts differ."""
    samples, side = IMAGES[device.type]
    x, dy = (torch.randn(samples, side, side, channels, device=device, dtype=dtype).movedim(-1, 1) for _ in range(2))
    w = torch.randn(channels, 3, 3, channels, device=device, dtype=dtype).movedim(-1, 1)
    product = Product("conv2d", ([1, 1], [1, 1], [1, 1], False, [0, 0], 1))
    layout = ConvGemmLayout(product, (3, 3))
    if not all(
        supports_shape(backend.name, device.type, layout.gemm_shape(gemm_pass, x.shape, w.shape))
        for gemm_pass in PASSES
    ):
        return None

    def plain() -> tuple[Tensor, ...]:
        return product.forward(x, w, None), product.grad_x(dy, x, w), product.grad_w(dy, x, w)

    times = _in_turns(plain, lambda: _three_gemms(backend, x, w, dy, layout), device)
    return Crossing(backend.name, channels, *times)


def _three_gemms(backend: GemmBackend, x: Tensor, w: Tensor, dy: Tensor, layout: GemmLayout) -> tuple[Tensor, ...]:
    """Forward and backward GEMMs as in native execution, with casts."""
    fprop_x, wgrad_x = _codes(backend, x, ["fprop.x", "wgrad.x"])
    fprop_w, dgrad_w = _codes(backend, w, ["fprop.w", "dgrad.w"])
    dgrad_dy, wgrad_dy = _codes(backend, dy, ["dgrad.dy", "wgrad.dy"])
    y = _multiply(backend, layout.x_matrix(fprop_x, x.shape), layout.w_matrix(fprop_w, w.shape).transposed(), x.dtype)
    left, right = layout.dy_matrix(dgrad_dy, x.shape), layout.w_matrix_backward(dgrad_w, w.shape)
    grad_x = _multiply(backend, left, right, x.dtype)
    grad_w = _multiply(backend, wgrad_dy.transposed(), layout.x_matrix(wgrad_x, x.shape), x.dtype)
    return layout.output(y, x.shape), layout.grad_x(grad_x, x.shape), layout.grad_w(grad_w, w.shape)


def _codes(backend: GemmBackend, tensor: Tensor, operands: list[str]) -> list[Codes]:
    """The codes of these operands as in native execution; the tensor's features are on axis 1."""
    _, code_dtype = _rounding(backend)
    if code_dtype not in FORMATS or tensor.dtype not in INPUT_DTYPES:
        return [_encoder(backend)(tensor)] * len(operands)
    by_row = [operand in BY_ROW for operand in operands]
    rows = tensor.movedim(1, -1).reshape(-1, tensor.shape[1])
    cast = cast_float8(rows, code_dtype, as_rows=any(by_row), as_columns=not all(by_row))
    return [Codes(cast.rows if is_by_row else cast.columns.t(), cast.scale) for is_by_row in by_row]


def _rounding(backend: GemmBackend) -> tuple[Quantizer, torch.dtype]:
    """A quantizer whose format the backend supports, and the dtype of its codes."""
    quantizer = make_quantizer(_FORMATS[backend.name], scale="tensor")
    code_dtype = backend.code_dtype(quantizer.format)  # type: ignore[arg-type]  # a constant one
    assert code_dtype is not None
    return quantizer, code_dtype


@cache
def _encoder(backend: GemmBackend) -> Callable[[Tensor], Codes]:
    """Rounds to codes of a backend, compiled as in a compiled model: one or two passes over memory."""
    quantizer, code_dtype = _rounding(backend)

    def encode(tensor: Tensor) -> Codes:
        return codes_of(quantizer.encode(tensor), code_dtype, 1)

    compiled: Callable[[Tensor], Codes] | None = torch.compile(encode, dynamic=True, fullgraph=True)

    def encode_compiled(tensor: Tensor) -> Codes:
        nonlocal compiled
        if compiled is not None:
            try:
                return compiled(tensor)
            except torch_private.TorchDynamoException as error:  # no compiler: models are not compiled either
                log.info("the crossover is measured uncompiled: %s", error)
                compiled = None
        return encode(tensor)

    return encode_compiled


def _multiply(backend: GemmBackend, left: Codes, right: Codes, dtype: torch.dtype) -> Tensor:
    return backend.multiply(left.values, right.values, (left.scale, right.scale), dtype)


def milliseconds(call: Callable[[], object], device: torch.device, calls: int = 5) -> float:
    """The fastest of several calls, after a warm-up."""
    timed = _timer(call, device)
    return min(timed() for _ in range(calls))


def _device_milliseconds(call: Callable[[], None]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    call()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))


def _capture(call: Callable[[], object]) -> Callable[[], None]:
    """A CUDA graph of several calls; returns the function that replays it."""
    warmup = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    warmup.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warmup):  # kernels are compiled and libraries initialised outside the graph
        call()
    torch.cuda.current_stream().wait_stream(warmup)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_CALLS_PER_GRAPH):
            call()
    return graph.replay

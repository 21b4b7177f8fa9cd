"""Functions of one metric of one machine, applied to all: in numpy, or for large panels compiled, in one pass.

numpy reads and writes the memory of a whole (M, N) array at each operation, some 400 a tick; a compiled function keeps
everything in between in registers, and releases the interpreter's lock, so that two threads share its metrics. Both
forms run the same source, with the same operations in float32, so they differ by rounding at most. A function may use
arithmetic, comparisons, `&`, `|`, `~`, `np.abs`, `np.isfinite`, the functions here, other `helper`s, and float32
constants: a Python float would make the compiled form compute in float64.
"""

import hashlib
import inspect
import itertools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

COMPILED_MACHINES = 1000
"""From this many on. Compiling takes ten seconds at the first ticks of the first large panel; it is kept on disk, and
loaded in one."""
NUM_THREADS = min(2, os.cpu_count() or 1)
_HELPERS = list[Callable[..., Any]]()


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a function that elementwise functions call."""
    _HELPERS.append(function)
    return function


def where(condition: Any, a: Any, b: Any) -> Any:
    return np.where(condition, a, b)


def lower(a: Any, b: Any) -> Any:
    return np.minimum(a, b)


def higher(a: Any, b: Any) -> Any:
    return np.maximum(a, b)


def clip(x: Any, low: Any, high: Any) -> Any:
    return lower(higher(x, low), high)


def log(x: Any) -> Any:
    """Of float32 above 1e-37, to 1e-7 (the polynomial of Cephes' `logf`): `np.log` compiles to calls of the C library,
    one element at a time, and the result may differ from numpy's in the last bit."""
    bits = np.float32(x).view(np.int32)
    exponent = np.int32(np.int32(bits - np.int32(0x3F3504F3)) >> np.int32(23))
    f = np.int32(bits - np.int32(exponent << np.int32(23))).view(np.float32) - np.float32(1)
    p = np.float32(7.0376836292e-2) * f - np.float32(1.1514610310e-1)
    p = p * f + np.float32(1.1676998740e-1)
    p = p * f - np.float32(1.2420140846e-1)
    p = p * f + np.float32(1.4249322787e-1)
    p = p * f - np.float32(1.6668057665e-1)
    p = p * f + np.float32(2.0000714765e-1)
    p = p * f - np.float32(2.4999993993e-1)
    p = p * f + np.float32(3.3333331174e-1)
    square = f * f
    return p * f * square - np.float32(0.5) * square + f + np.float32(exponent) * np.float32(math.log(2))


def is_large(num_machines: int) -> bool:
    return num_machines >= COMPILED_MACHINES


def at(rows: Array, index: Any) -> Any:
    """The value of the metric's row (M, any) at this index."""
    return np.take_along_axis(rows, index, axis=1)


class Elementwise:
    """Decorator of f(states, *inputs) -> (new states..., outputs...), with the types of the outputs; states and inputs
    are tuples of values."""

    def __init__(self, *outputs: type) -> None:
        self.outputs = outputs
        self.kept = WeakKeyDictionary[object, tuple[list[Array], Callable[..., None]]]()

    def __call__(self, function: Callable[..., tuple[Any, ...]]) -> "Elementwise":
        self.function = function
        return self

    def apply(self, owner: object, states: Sequence[Array], *inputs: Sequence[Array]) -> list[Array]:
        """Changes the states, (M, N), in place. Inputs are (M, N), (M, 1), (N,), or rows for `at`; the first array of
        all is (M, N). The shapes are the same in each call for an owner, and its next call may overwrite outputs."""
        num_metrics, num_machines = (*states, *inputs[0])[0].shape
        if not is_large(num_machines):
            results = self.function(states, *inputs)
            for state, new in zip(states, results, strict=False):
                state[...] = new
            return list(results[len(states) :])
        if owner not in self.kept:
            # New memory would cost more than what is computed.
            outputs = [np.empty((num_metrics, num_machines), dtype=kind) for kind in self.outputs]
            places = tuple(tuple(_place(x, num_machines) for x in group) for group in (states, *inputs))
            self.kept[owner] = outputs, _compiled(self.function, len(outputs), places)
        outputs, rows = self.kept[owner]
        in_threads(rows, num_metrics, *outputs, *states, *itertools.chain(*inputs))
        return outputs


def _place(x: Array, num_machines: int) -> str:
    """Where in an array the value of metric m and machine n is."""
    return "[n]" if x.ndim == 1 else {num_machines: "[m, n]", 1: "[m, 0]"}.get(x.shape[1], "_of_m")


def in_threads(function: Callable[..., None], num: int, *arguments: Any) -> None:
    """Calls it for parts of `num` rows: with the first, the last, and these arguments."""
    bounds = [num * i // NUM_THREADS for i in range(NUM_THREADS + 1)]
    others = [_threads().submit(function, *part, *arguments) for part in itertools.pairwise(bounds[1:])]
    function(0, bounds[1], *arguments)
    for other in others:
        other.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_THREADS - 1 or 1)


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not survive a fork


@cache
def _compiled(
    function: Callable[..., Any], num_outputs: int, places: tuple[tuple[str, ...], ...]
) -> Callable[..., None]:
    """The loop over some rows of the panel."""
    from numba.extending import register_jitable

    names = [[f"x{i}_{j}" for j in range(len(group))] for i, group in enumerate(places)]
    outputs = [f"output{i}" for i in range(num_outputs)]
    arguments = [[x + place for x, place in zip(*group, strict=True)] for group in zip(names, places, strict=True)]
    rows = [x for x in itertools.chain(*arguments) if x.endswith("_of_m")]
    tuples = ", ".join("(" + "".join(f"{x}, " for x in group) + ")" for group in arguments)
    every = [*outputs, *itertools.chain(*names)]
    name = f"{function.__name__}_{_version()}"
    source = (
        f"def {name}(first, last, {', '.join(every)}):\n"
        f"    for m in range(first, last):\n"
        f"        {'; '.join(f'{row} = {row[:-5]}[m]' for row in rows) or 'pass'}\n"
        f"        for n in range({every[num_outputs]}.shape[1]):\n"
        f"            {', '.join(f'{x}[m, n]' for x in (*names[0], *outputs))}, = "
        f"function({tuples})\n"
    )
    space: dict[str, Any] = {"__name__": function.__module__, "function": register_jitable(forceinline=True)(function)}
    # Under the file of the function, beside which numba keeps what it compiled.
    exec(compile(source, inspect.getfile(function), "exec"), space)  # noqa: S102 (our own names)
    return compiled(space[name])


@cache
def _version() -> str:
    """Of the source: numba looks for changes in one file only, and functions use helpers and constants of others."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of arrays that do not overlap."""
    import numba  # half a second, only for large panels
    from numba.core.compiler import Compiler

    _register()

    class Distinct(Compiler):  # type: ignore[misc]
        def define_pipelines(self) -> Any:
            # Else loops with many arrays are not turned into vector instructions.
            self.state.flags.noalias = True
            return super().define_pipelines()

    options = {"nogil": True, "error_model": "numpy", "pipeline_class": Distinct}
    try:
        return numba.njit(**options, cache=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # there is nowhere to write
        return numba.njit(**options)(function)  # type: ignore[no-any-return]


@cache
def _register() -> None:
    """Tells numba what the functions above mean for one element."""
    from numba.extending import overload, register_jitable

    inline = {"forceinline": True}  # LLVM turns no loop with calls into vector instructions
    overload(where, jit_options=inline)(lambda condition, a, b: lambda condition, a, b: a if condition else b)
    overload(lower, jit_options=inline)(lambda a, b: lambda a, b: min(a, b))
    overload(higher, jit_options=inline)(lambda a, b: lambda a, b: max(a, b))
    overload(at, jit_options=inline)(lambda rows, index: lambda rows, index: rows[index])
    for function in (clip, log, *_HELPERS):
        register_jitable(forceinline=True)(function)

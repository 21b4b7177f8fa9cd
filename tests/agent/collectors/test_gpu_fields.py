"""Field values read as a block of bytes: the layout is pynvml's, and each type of number is understood."""

import ctypes
from pathlib import Path
from typing import Any

import pytest

from rolecall.agent.collectors.gpu import queries
from rolecall.agent.collectors.gpu.nvml import FIELD_ROW, NOT_ANSWERED, FieldQuery, close_nvml, number_of, open_nvml
from tests.agent.nvml import Machine, build, shown_by


def test_the_layouts_are_those_of_pynvml() -> None:
    pynvml: Any = pytest.importorskip("pynvml")
    field = pynvml.c_nvmlFieldValue_t
    assert ctypes.sizeof(field) == FIELD_ROW.size
    names = ("fieldId", "scopeId", "timestamp", "latencyUsec", "valueType", "nvmlReturn", "value")
    assert [getattr(field, n).offset for n in names] == [0, 4, 8, 16, 24, 28, 32]
    metric = pynvml.c_nvmlGpmMetric_t
    assert ctypes.sizeof(metric) == queries.ROW.size
    assert [getattr(metric, n).offset for n in ("metricId", "nvmlReturn", "value")] == [0, 4, 8]


@pytest.mark.parametrize(
    ("member", "type_", "number"),
    [
        ("dVal", 0, 0.25),
        ("uiVal", 1, 2**32 - 1),
        ("ulVal", 2, 2**40),
        ("ullVal", 3, 2**63),
        ("sllVal", 4, -3),
        ("siVal", 5, -7),
        ("usVal", 6, 2**16 - 1),
    ],
)
def test_a_number_of_each_type(member: str, type_: int, number: float) -> None:
    pynvml: Any = pytest.importorskip("pynvml")
    value = pynvml.c_nvmlValue_t()
    setattr(value, member, number)
    assert number_of(type_, bytes(value)) == number


def test_values_unknown_to_nvml_are_omitted() -> None:
    assert number_of(3, b"\xff" * 8) is None, "all ones: not available"
    assert number_of(7, b"\0" * 8) is None, "a type that is newer than this"


def test_a_query_asks_again_each_time(tmp_path: Path) -> None:
    with shown_by(Machine(tmp_path / "state", num_gpus=1)) as machine:
        pynvml = open_nvml(build(tmp_path))
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        query = FieldQuery(pynvml, [(82, 0), (91, 0), (4711, 0)])
        assert query.ask(gpu) == [(0, 51.0), (0, 18.0), (3, None)]
        machine.set({"field.82": 60, "field.91": "@15"})
        assert query.ask(gpu) == [(0, 60.0), (15, None), (3, None)]
        machine.set({"error.nvmlDeviceGetFieldValues": 999})
        with pytest.raises(pynvml.NVMLError):
            query.ask(gpu)
        assert FieldQuery(pynvml, []).ask(gpu) == []
        close_nvml(pynvml)


def test_a_row_that_a_driver_leaves_untouched_is_no_answer() -> None:
    class Lazy:
        """A driver that returns success without a value."""

        class nvmlLib:
            @staticmethod
            def nvmlDeviceGetFieldValues(gpu: object, count: int, rows: object) -> int:
                return 0

    assert FieldQuery(Lazy, [(82, 0)]).ask(None) == [(NOT_ANSWERED, None)]

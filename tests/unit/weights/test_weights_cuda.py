"""Tensors on a GPU are lent by the allocations that they lie in."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from refitfsm.weights.allocations import HANDLE_BYTES, Allocation
from refitfsm.weights.counters import CudaCounts
from refitfsm.weights.cuda import REBUILD, lend
from refitfsm.weights.errors import WeightsError
from refitfsm.weights.lending import Lent
from refitfsm.weights.opcodes import Call, Global
from tests.support.borrower import count_down

UUID = "0a1b2c3d-0000-1111-2222-333344445555"


class Tensor:
    """A bfloat16 tensor at an address."""

    dtype = "torch.bfloat16"

    def __init__(self, address: int, *shape: int) -> None:
        self.shape = shape
        self._address = address

    def data_ptr(self) -> int:
        return self._address

    def element_size(self) -> int:
        return 2

    def stride(self) -> tuple[int, ...]:
        return (*self.shape[1:], 1)


class Driver:
    """A GPU with an allocation at each thousand bytes, which gives no handle of the one at 9000."""

    def allocation_at(self, address: int) -> Allocation:
        return Allocation(address // 1000 * 1000, 1000)

    def handle_of(self, allocation: Allocation) -> bytes:
        if allocation.base == 9000:
            raise WeightsError("CUDA's error 1")
        return str(allocation.base).encode().ljust(HANDLE_BYTES)


@pytest.fixture
def counts(tmp_path: Path) -> Iterator[CudaCounts]:
    made = CudaCounts(tmp_path)
    yield made
    made.close()


def lent(counts: CudaCounts, **tensors: Tensor) -> Lent:
    return lend(tensors, Driver(), counts, UUID)  # type: ignore[arg-type]


def arguments(lent: Lent, name: str) -> Any:
    value = lent.values[name]
    assert isinstance(value, Call)
    assert value.function == REBUILD
    return value.args


def test_tensors_of_one_allocation_share_a_handle_and_a_count(counts: CudaCounts, tmp_path: Path) -> None:
    """The borrower opens each allocation once, and has counted down once for each tensor when it is back."""
    loan = lent(counts, a=Tensor(1000, 3), b=Tensor(2004, 2), c=Tensor(1512, 4))
    a, b, c = (arguments(loan, name) for name in "abc")
    assert a[7:] == c[7:]
    assert a[7].strip() == b"1000"
    assert b[7].strip() == b"2000"
    assert len(loan.counters) == 2
    in_one = next(count for count in loan.counters if count.index == a[12])  # type: ignore[attr-defined]
    for back in (False, True):
        count_down(a[11], a[12], tmp_path)
        assert in_one.is_back() is back
    assert sum(count.is_back() for count in loan.counters) == 1


def test_a_tensor_is_found_where_it_lies_in_its_allocation(counts: CudaCounts) -> None:
    """Shape and strides are its own, the offset is in elements from the allocation's beginning."""
    loan = lent(counts, a=Tensor(1512, 4, 8))
    assert arguments(loan, "a")[:7] == (
        Global("torch", "Tensor"),
        (4, 8),
        (8, 1),
        256,
        Global("torch.storage", "TypedStorage"),
        Global("torch", "bfloat16"),
        UUID,
    )
    assert arguments(loan, "a")[8:11] == (1000, 0, False)
    assert arguments(loan, "a")[13:] == (b"", False)


def test_memory_without_a_handle_is_refused_with_the_remedy(counts: CudaCounts, tmp_path: Path) -> None:
    """The error names the tensor and what to set, and nothing counts as lent."""
    with pytest.raises(WeightsError, match=r"^tensor 'b': .*error 1.*expandable_segments:False"):
        lent(counts, a=Tensor(1000, 3), b=Tensor(9000, 2))
    assert not list(tmp_path.iterdir())

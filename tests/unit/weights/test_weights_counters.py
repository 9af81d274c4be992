"""A count is up until its borrower has counted it down, and what was lent lives for as long."""

import gc
import struct
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from refitfsm.weights.counters import COUNTS, CountFile, CudaCount, CudaCounts
from refitfsm.weights.errors import WeightsError
from tests.support.borrower import count_down

HEADER_BYTES = 64


class Held:
    """Something that was lent."""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[CountFile]:
    made = CountFile(tmp_path)
    yield made
    made.close()


def lent(file: CountFile, borrowed: int = 1, held: object = None) -> CudaCount:
    count = file.lend(borrowed, held)
    assert count is not None
    return count


def test_a_loan_is_back_when_its_borrower_has_counted_all_of_it_down(file: CountFile, tmp_path: Path) -> None:
    """Each tensor of a loan is counted down once; the loan is back with the last, and others stay."""
    one, other = lent(file, 2), lent(file, 1)
    for back in (False, True):
        count_down(file.name, one.index, tmp_path)
        assert one.is_back() is back
    assert not other.is_back()


def test_what_is_lent_lives_until_it_is_back(file: CountFile, tmp_path: Path) -> None:
    """The count alone keeps what was lent alive, whatever the lender lets go of."""
    held = Held()
    watch = weakref.ref(held)
    index = lent(file, 1, held).index
    del held
    gc.collect()
    file.collect()
    assert watch() is not None
    count_down(file.name, index, tmp_path)
    file.collect()
    gc.collect()
    assert watch() is None


def test_the_layout_is_what_torch_maps(file: CountFile, tmp_path: Path) -> None:
    """torch's borrowers find one user at the head, and 64-bit counts from byte 64 on."""
    count = lent(file, 7)
    data = (tmp_path / file.name.decode().lstrip("/")).read_bytes()
    assert len(data) == HEADER_BYTES + 8 * COUNTS
    assert struct.unpack_from("=i", data) == (1,)
    assert struct.unpack_from("=q", data, HEADER_BYTES + 8 * count.index) == (7,)


def test_a_place_is_used_again_only_after_it_was_counted_down(file: CountFile, tmp_path: Path) -> None:
    """Whoever was written off might still count down: nobody else is counted there."""
    back, written_off = lent(file), lent(file)
    count_down(file.name, back.index, tmp_path)
    assert back.is_back()
    written_off.write_off()
    assert written_off.is_back()
    again = [lent(file) for _ in range(COUNTS - 1)]
    assert back.index in {count.index for count in again}
    assert written_off.index not in {count.index for count in again}
    assert back.is_back()  # though another is counted in its place
    assert file.lend(1, None) is None


def test_there_is_always_a_count(tmp_path: Path) -> None:
    """When a file is full there is another."""
    pool = CudaCounts(tmp_path)
    files = {pool.lend(1, None).file.name for _ in range(COUNTS + 1)}
    assert len(files) == 2
    pool.close()
    assert not list(tmp_path.iterdir())


def test_without_shared_memory_the_error_says_what_to_do(tmp_path: Path) -> None:
    """Where no file can be made the error names the folder, and the container's option."""
    with pytest.raises(WeightsError, match=r"nowhere.*No such file.*--shm-size"):
        CudaCounts(tmp_path / "nowhere").lend(1, None)


def test_files_of_processes_that_were_killed_are_removed(file: CountFile, tmp_path: Path) -> None:
    """A file that nobody locks any more goes with the next that is made; one in use, or being made, stays."""
    name = Path(file.name.decode()).name
    abandoned, begun = tmp_path / f"{name}-abandoned", tmp_path / f"{name}-begun"
    abandoned.write_bytes(bytes(100))
    begun.touch()
    CountFile(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, begun.name])


@pytest.mark.parametrize("ending", ["", "os.kill(os.getpid(), 9)"])
def test_a_process_leaves_no_file_for_long(tmp_path: Path, ending: str) -> None:
    """A process that ends takes its files along; those of one that was killed go with the next's first."""
    script = (
        "import os, sys; from pathlib import Path; from refitfsm.weights.counters import CudaCounts\n"
        "CudaCounts(Path(sys.argv[1])).lend(1, None); print(len(os.listdir(sys.argv[1])), flush=True)\n"
        + ending
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, check=False, text=True
    )
    assert done.stdout.strip() == "1", done.stderr
    assert len(list(tmp_path.iterdir())) == bool(ending)
    CountFile(tmp_path).close()
    assert not list(tmp_path.iterdir())


def test_counting_down_in_no_file_is_no_error(tmp_path: Path) -> None:
    """A borrower whose lender is gone has nothing to tell it."""
    count_down(b"/nowhere", 0, tmp_path)
    assert not list(tmp_path.iterdir())

"""Stands in for torch_memory_saver, which hooks the CUDA driver, on a machine without a GPU.

Storages created inside `region(tag)` are tracked. `pause(tag)` takes their bytes away, so that whoever
touches them fails; `resume(tag)` gives bytes back: the old ones where a CPU copy was asked for, else 0xFF,
which reads as NaN. Addresses change, unlike the real library's. Pausing what is paused, or resuming what is
not, ends the process with status 1 after the CUDA library's own message: per storage, so a tag without any is
always fine. This is a model of the hardware; the state machine around it is SGLang's own.
"""

import contextlib
import os
import sys

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_UNDEFINED = 0xFF


class _Allocation:
    """One tracked storage. While paused it is held, since its owners must find the same object."""

    def __init__(self, storage, tag, backup):
        self.tag = tag
        self._backup = backup
        self._weak = StorageWeakRef(storage)
        self._held = None
        self._nbytes = 0
        self._saved = None

    @property
    def paused(self):
        return self._held is not None

    def alive(self):
        return self.paused or not self._weak.expired()

    def pause(self):
        storage = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
        if storage is None:
            return 0
        self._held, self._nbytes = storage, storage.nbytes()
        self._saved = storage.clone() if self._backup else None
        if storage.resizable():
            storage.resize_(0)
        else:  # somebody holds a numpy view of it: the bytes cannot go, their meaning can
            storage.fill_(_UNDEFINED)
        return self._nbytes

    def resume(self):
        storage, self._held = self._held, None
        if storage.nbytes() != self._nbytes:
            storage.resize_(self._nbytes)
        if self._saved is None:
            storage.fill_(_UNDEFINED)
        else:
            storage.copy_(self._saved)
            self._saved = None
        return self._nbytes


class _Recorder(TorchDispatchMode):
    """Notes every CPU storage that an operator returns."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                if storage.nbytes() and storage.resizable():
                    self.storages.setdefault(storage._cdata, storage)
        return result


class TorchMemorySaver:
    """The part of the real class that SGLang uses."""

    enabled = True
    hook_mode = None

    def __init__(self):
        self._allocations = []

    @contextlib.contextmanager
    def region(self, tag="default", enable_cpu_backup=False):
        with _Recorder() as recorder:
            yield
        found = [_Allocation(storage, tag, enable_cpu_backup) for storage in recorder.storages.values()]
        recorder.storages.clear()
        self._allocations += found
        _say(f"region {tag}: {len(found)} storages")

    @contextlib.contextmanager
    def cuda_graph(self, **kwargs):
        yield

    @contextlib.contextmanager
    def disable(self):
        yield

    def pause(self, tag=None):
        chosen = self._of(tag)
        if any(allocation.paused for allocation in chosen):
            _die("Cannot pause allocation that is not active.")
        _say(f"pause {tag}: {sum(allocation.pause() for allocation in chosen)} bytes")

    def resume(self, tag=None):
        chosen = self._of(tag)
        if not all(allocation.paused for allocation in chosen):
            _die("Cannot resume allocation that is not paused.")
        _say(f"resume {tag}: {sum(allocation.resume() for allocation in chosen)} bytes")

    def _of(self, tag):
        self._allocations = [allocation for allocation in self._allocations if allocation.alive()]
        return [allocation for allocation in self._allocations if tag in (None, allocation.tag)]


def _say(message):
    print(f"[memory saver stand-in] {message}", file=sys.stderr, flush=True)


def _die(message):
    print(message, file=sys.stderr, flush=True)
    os._exit(1)


torch_memory_saver = TorchMemorySaver()


@contextlib.contextmanager
def configure_subprocess():
    """The real one preloads its library into children started inside."""
    yield

"""Lets torchvision from a registry be imported beside a CPU build of torch.

Its compiled half is missing then, and the import dies because two operators it wants to give a fake kernel
are not declared. SGLang and transformers import torchvision; a text model never calls it. Python imports this
module at the start of every process that has its folder on PYTHONPATH, so it reaches SGLang's children too.
The operators are declared just before torchvision is first imported, since torch should not be loaded into
processes that never need it.
"""

import importlib.abc
import sys

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _DeclareFirst(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in _OPERATORS:
                library.define(schema)
            torch._refitfsm_torchvision = library  # the declarations live as long as this object
        return None  # the usual finders find the module


sys.meta_path.insert(0, _DeclareFirst())

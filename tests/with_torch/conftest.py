"""Left out where there is no torch; `tests/real/test_with_torch.py` runs every file where there is."""

import importlib.util

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]

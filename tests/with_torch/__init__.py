"""Tests that need torch: `tests/real/test_with_torch.py` runs them where the real servers run."""

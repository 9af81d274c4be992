"""Every interleaving of a small fleet: the real planner in an abstract environment, to the fixed point."""

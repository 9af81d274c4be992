"""What tests of your own can be made of. Needs Hypothesis: `pip install 'refitfsm[test]'`."""

from refitfsm.testing.machine import LawBroken, machine
from refitfsm.testing.profiles import load_profile, register_profiles

__all__ = ["LawBroken", "load_profile", "machine", "register_profiles"]

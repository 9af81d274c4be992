"""The profiles that the package ships for its users are those of its own tests."""

from refitfsm.testing import load_profile

load_profile()

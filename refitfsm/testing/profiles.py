"""Hypothesis profiles: how hard to look, and whether two runs look at the same.

`dev` looks for something new in each run, `ci` at the same in each run, `nightly` at much more.
"""

import os

VARIABLE = "REFITFSM_HYPOTHESIS_PROFILE"
"""Names the profile, where none is named otherwise."""
NAMES = ("dev", "ci", "nightly")


def register_profiles() -> None:
    """Make the profiles known to `settings.load_profile` and to `pytest --hypothesis-profile`.

    Raises:
        ImportError: Hypothesis is not installed.
    """
    from hypothesis import settings  # noqa: PLC0415 - optional

    settings.register_profile("dev", deadline=None, print_blob=True)
    settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
    settings.register_profile(
        "nightly", deadline=None, print_blob=True, max_examples=2_000, stateful_step_count=150
    )


def load_profile(name: str = "") -> str:
    """Make the profiles known, and one of them that of this run; for a `conftest.py`.

    `pytest --hypothesis-profile` overrules it.

    Args:
        name: of the profile. Empty: what `REFITFSM_HYPOTHESIS_PROFILE` says; else `ci` where `CI` is set, and
            `dev` elsewhere.

    Returns:
        The name of the profile.

    Raises:
        ImportError: Hypothesis is not installed.
        InvalidArgument: Hypothesis knows no such profile.
    """
    from hypothesis import settings  # noqa: PLC0415 - optional

    register_profiles()
    chosen = name or os.environ.get(VARIABLE, "") or ("ci" if os.environ.get("CI") else "dev")
    settings.load_profile(chosen)
    return chosen

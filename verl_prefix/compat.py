"""Which verl this package was run with, and the refusal of any other.

verl hides what a plugin raises while it is imported (the end of verl/__init__.py logs it at DEBUG), so the check stands
in the constructors of our configs and trainer, where its message reaches the user. Imports nothing but the standard
library: it must work where verl does not.
"""

import importlib.metadata
import os

TESTED_VERL = ("0.9.0", "0.9.1")
OVERRIDE = "VERL_PREFIX_ALLOW_UNTESTED_VERL"


def untested_verl() -> str | None:
    """What is wrong with the installed verl, or None; `OVERRIDE=1` makes everything right."""
    allowed = os.environ.get(OVERRIDE, "0").strip()
    if allowed not in ("0", "1"):
        return f"{OVERRIDE}={allowed!r}: set it to 1, or unset it"
    try:
        version = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown (no package metadata)"
    if version in TESTED_VERL or allowed == "1":
        return None
    return (
        f"verl {version} is not one of those that verl_prefix was tested with ({', '.join(TESTED_VERL)}), and it "
        f"overrides methods of verl: pip install verl=={TESTED_VERL[-1]}, or set {OVERRIDE}=1 to try this one "
        "(tests/verl/test_contract.py names what changed)"
    )


def check_verl_version() -> None:
    """Refuses a verl that this package was not tested with.

    Raises:
        ImportError: its version is not in `TESTED_VERL` and the environment variable `OVERRIDE` is not 1.
    """
    if problem := untested_verl():
        raise ImportError(problem)

"""How hard the fuzz tests try: a little and always the same in `make test`, much in `make fuzz`."""

import os

from hypothesis import HealthCheck, Phase, settings

from dflow_lightning.errors import InputError

COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}

settings.register_profile("short", derandomize=True, database=None, **COMMON)
settings.register_profile("long", database=None, print_blob=True, **COMMON)
# The first failure as it was found: making it small takes minutes.
settings.register_profile("raw", database=None, phases=[Phase.generate], **COMMON)
settings.load_profile(os.environ.get("FUZZ_PROFILE", "short"))


def examples(few: int) -> settings:
    """Settings of a test that tries so many examples in `make test`."""
    factor = int(os.environ.get("FUZZ_FACTOR", "1"))
    return settings(max_examples=few * factor)


def check_sentence(error: InputError) -> None:
    """What a user reads is one line that says something."""
    assert str(error).strip()
    assert len(str(error).splitlines()) == 1

"""What a check of the environment reports: a record with its remedy."""

import dataclasses
from typing import Literal

State = Literal["ok", "warn", "fail"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        name: what was looked at, such as "C++ compiler".
        state: "ok", "warn" (works, and could surprise), or "fail".
        found: what is there, with its version or value.
        remedy: what mends it, as a command where one does; never empty for "fail".
    """

    name: str
    state: State
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.state == "fail" and not self.remedy:
            raise ValueError(f"The failing check {self.name!r} ({self.found}) names no remedy; give it one.")

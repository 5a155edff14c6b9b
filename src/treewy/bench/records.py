"""What a benchmark of the kernels writes: one JSON document, checked when it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field

Case = Literal["verify", "deferred", "reconstruct", "decode", "commit", "peer"]
StateDtype = Literal["bfloat16", "float16", "float32"]
Positive = Annotated[float, Field(gt=0)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Record(_Model):
    """One time, of one layer."""

    case: Case
    """`verify`: 8 pending rows, nothing folds. `deferred`: the mean of a cycle of rounds between folds. `reconstruct`:
    every round folds. `decode`: one row, deferred. `commit`: all layers in one launch. `peer`: another package."""
    impl: str
    """`triton` or `cuda` of this package, or the name of a peer's kernel."""
    batch: Annotated[int, Field(ge=1)]
    rows: Annotated[int, Field(ge=1, le=64)]
    pending: Annotated[float, Field(ge=0)]
    """Pending rows of a request when its window is verified, on average."""
    heads: tuple[int, int]
    """Key heads, value heads."""
    state_dtype: StateDtype
    with_conv: bool
    """The convolution is part of it; otherwise its outputs are the inputs."""
    with_norm: bool
    """The gated norm is part of it."""
    with_commit: bool
    """A whole round: verify and commit."""
    us: Positive
    """Median replay over its layers, microseconds."""
    us_again: Positive
    """The same once more."""
    baseline: str | None = None
    """`impl` of the peer that this is compared with."""
    baseline_us: Positive | None = None
    floor_us: Positive | None = None
    """Bytes that must move over the bandwidth of a copy; None where they are not counted."""
    layers: Annotated[int, Field(ge=1)]
    """Layers of one replay, each with memory of its own."""

    @property
    def ratio(self) -> float | None:
        """Time over the baseline's."""
        return self.us / self.baseline_us if self.baseline_us else None

    @property
    def over_floor(self) -> float | None:
        """Time over the floor."""
        return self.us / self.floor_us if self.floor_us else None

    @property
    def spread(self) -> float:
        """Difference of the two measurements over the smaller."""
        return abs(self.us - self.us_again) / min(self.us, self.us_again)


class Check(_Model):
    """Outputs of a few rounds beside the float64 walk over the tree."""

    impl: str
    case: Case
    rows: int
    heads: tuple[int, int]
    state_dtype: StateDtype
    with_conv: bool
    rounds: int
    error: Annotated[float, Field(ge=0)]
    """Largest of the rounds: norm of the difference over the norm of the exact outputs; infinite where not finite."""
    tolerance: Positive

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool:
        """The error is within the tolerance."""
        return self.error <= self.tolerance

    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="strings")


class Refused(_Model):
    """What was not timed, and why."""

    what: str
    reason: str


class Machine(_Model):
    """Where it ran."""

    gpu: str | None
    driver: str | None
    cpu: str
    cores: int
    l2_bytes: int | None = None
    memory_bytes: int | None = None


class Results(_Model):
    """A run."""

    command: str
    date: str
    machine: Machine
    versions: dict[str, str]
    method: str
    copy_bytes_per_s: Positive
    """Bytes read and written per second by a large copy, made by a kernel."""
    complete: bool
    """False where the budget of seconds ended first."""
    seconds: float
    checks: list[Check]
    refused: list[Refused]
    records: list[Record]

    @staticmethod
    def read(path: Path) -> Results:
        """From a file.

        Raises:
            OSError: a file that cannot be read.
            pydantic.ValidationError: a file that is no result.
        """
        return Results.model_validate_json(path.read_text(encoding="utf-8"))

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        unfinished = path.with_suffix(path.suffix + ".part")
        unfinished.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)

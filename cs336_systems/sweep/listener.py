"""Events that a sweep reports while it runs."""

from collections.abc import Sequence

from cs336_systems.config import RunConfig
from cs336_systems.measure.nvml import Gpu
from cs336_systems.record import RecordError, RunRecord


class Listener:
    """Receives the events of a sweep. Each method does nothing here; a subclass overrides those that it shows."""

    def planned(self, kept: Sequence[RunRecord], todo: Sequence[RunConfig], problems: Sequence[RecordError]) -> None:
        """The sweep keeps these records, will run these configurations, and set these unreadable files aside."""

    def importing(self) -> None:
        """The fork server imports PyTorch, which takes seconds. Nothing is measured until this method has returned."""

    def started(self, config: RunConfig, gpu: Gpu | None) -> None:
        """A worker has been started."""

    def finished(self, record: RunRecord) -> None:
        """A run has ended, and this is its record."""

    def explaining(self, config: RunConfig) -> None:
        """A worker has been started that explains the raw profile of this run."""

    def explained(self, config: RunConfig, failure: str | None) -> None:
        """That worker has ended; `failure` says in one line why there is no explanation; None if there is one."""

    def noted(self, line: str) -> None:
        """A message about a machine of the sweep; it may be text that the machine sent."""

    def tick(self) -> None:
        """A second has passed."""

"""Where the wall time of a watched loop goes: its steps, the data that it waits for, the rest."""

from dataclasses import dataclass
from functools import cached_property

from ..config import Phase
from ..loop_record import LoopRecord
from ..record import RunRecord
from .loop_advice import between_verdict, memory_sentence, rank_sentence
from .loop_causes import slow_sentence

LIMITING_DATA = 0.1
"""Least share of a loop's time that waits for data to say that data limits the loop."""


@dataclass(frozen=True)
class LoopTimes:
    """The times of a watched loop from its record, in seconds.

    The loop lasts from the end of the last warm-up step to the end of the last measured step, so
    that its time is that of the measured steps and of what lies before each.
    """

    record: RunRecord

    @cached_property
    def steps_s(self) -> float:
        """Time of all measured steps."""
        return self._sum_s(Phase.STEP)

    @cached_property
    def between_s(self) -> float:
        """Time between steps."""
        return sum(self.record.between_s)

    @cached_property
    def loop_s(self) -> float:
        return self.steps_s + self.between_s

    @cached_property
    def between_data_s(self) -> float:
        """Time between steps that waited for data."""
        return sum(self._seen.between_data_s)

    @cached_property
    def data_s(self) -> float:
        """Time that waited for data, in steps and between them."""
        return self._sum_s(Phase.DATA) + self.between_data_s

    @cached_property
    def data_share(self) -> float:
        """Share of the loop that waited for data."""
        return self.data_s / self.loop_s if self.loop_s else 0.0

    @cached_property
    def tokens_per_s(self) -> float | None:
        """Tokens over the time of the loop; None where no tokens were seen."""
        tokens: float = sum(self._seen.tokens)
        if self.record.seen is None:  # of an earlier version, which kept their median
            tokens = (self.record.subject.tokens_per_step or 0) * self._num_steps
        return tokens / self.loop_s if tokens and self.loop_s else None

    @property
    def _seen(self) -> LoopRecord:
        return self.record.seen or LoopRecord()

    @property
    def _num_steps(self) -> int:
        steps = self.record.measurement(Phase.STEP)
        return len(steps.times_s) if steps else 0

    def _sum_s(self, phase: Phase) -> float:
        measurement = self.record.measurement(phase)
        return sum(measurement.times_s) if measurement else 0.0


def loop_sentences(record: RunRecord) -> list[str]:
    """Why steps of a watched loop were slow, what lies between them, and whether data limits it."""
    slow = slow_sentence(record)
    sentences = [] if slow is None else [slow]
    if record.seen is not None and record.seen.growth is not None:
        sentences.append(memory_sentence(record.seen.growth))
    if record.seen is not None and record.seen.rank is not None:
        lag = rank_sentence((record.seen.rank, *record.seen.other_ranks))
        sentences += [lag] if lag is not None else []
    syncs = record.seen.syncs_per_update if record.seen else None
    if syncs is not None and syncs > 1:
        sentences.append(
            f"the gradients are averaged over the ranks {syncs} times in each update: put all "
            "micro-steps but the last into `with model.no_sync():`"
        )
    if not record.between_s:
        return sentences
    times, count = LoopTimes(record), len(record.between_s)
    data_ms, other_ms = (
        1e3 * seconds / count
        for seconds in (times.between_data_s, times.between_s - times.between_data_s)
    )
    between = f"between steps: {1e3 * times.between_s / count:.4g} ms"
    sentences.append(f"{between}, data {data_ms:.4g} and other {other_ms:.4g} ms")
    verdict = between_verdict(
        times.steps_s / count, (times.between_s - times.between_data_s) / count
    )
    if verdict is not None:
        sentences.append(verdict)
    if times.data_share >= LIMITING_DATA:
        sentences.append(
            f"data limits the loop: {100 * times.data_share:.3g} % of its time waits for a batch"
        )
    return sentences

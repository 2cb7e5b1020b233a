"""Where the wall time of a watched loop goes: its steps, the data that it waits for, the rest."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ..config import Phase
from ..loop_record import LoopRecord
from ..record import RunRecord
from ..text import counted
from .loop_advice import between_verdict, memory_sentence, rank_sentence
from .loop_causes import slow_sentence
from .shortage import shortage_sentences

UNITS = (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6))
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
        """Seconds of all measured steps together."""
        return self._sum_s(Phase.STEP)

    @cached_property
    def between_s(self) -> float:
        """Seconds between the measured steps."""
        return sum(self.record.between_s)

    @cached_property
    def loop_s(self) -> float:
        """Seconds of the whole loop: its steps and what lies between them."""
        return self.steps_s + self.between_s

    @cached_property
    def between_data_s(self) -> float:
        """Seconds between steps in which the loop waited for data."""
        return sum(self._seen.between_data_s)

    @cached_property
    def data_s(self) -> float:
        """Seconds in which the loop waited for data, within steps and between them."""
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

    @cached_property
    def flops_per_s(self) -> float | None:
        """The model's FLOPs over the time of the loop; None where they are not known."""
        flops = self._seen.flops
        if flops is None or not self.loop_s:
            return None
        return flops.per_step * self._num_steps / self.loop_s

    @property
    def _seen(self) -> LoopRecord:
        """What was recorded of the loop itself, apart from times of steps; empty if nothing was."""
        return self.record.seen or LoopRecord()

    @property
    def _num_steps(self) -> int:
        """Number of steps that have a time."""
        steps = self.record.measurement(Phase.STEP)
        return len(steps.times_s) if steps else 0

    def _sum_s(self, phase: Phase) -> float:
        """Seconds of all measurements of this phase together; 0 if it was not measured."""
        measurement = self.record.measurement(phase)
        return sum(measurement.times_s) if measurement else 0.0


def loop_sentences(record: RunRecord) -> list[str]:
    """Why memory did not suffice, why steps of a watched loop were slow, what differs between its
    steps, what lies between them, whether data limits it, what its model computes in a step, and of
    which rank all this is.
    """
    seen = record.seen or LoopRecord()
    shortage = seen.out_of_memory
    return [
        *([] if shortage is None else shortage_sentences(shortage)),
        *_cause_sentences(record),
        *_update_sentences(record),
        *_token_sentences(seen),
        *_between_sentences(record),
        *_flops_sentences(seen),
        *_rank_sentences(seen),
    ]


def _update_sentences(record: RunRecord) -> Iterator[str]:
    """In how many steps the optimizer ran, if not in all: its time is the mean of those alone."""
    steps, updates = record.measurement(Phase.STEP), record.measurement(Phase.OPTIMIZER)
    if steps is None or updates is None or len(updates.times_s) >= len(steps.times_s):
        return
    counts = f"{len(updates.times_s)} of {len(steps.times_s)} steps"
    yield f"the optimizer ran in {counts}, and its time is the mean of those"


def _cause_sentences(record: RunRecord) -> list[str]:
    """Slow steps, memory that rises, a slow rank, and gradients that are averaged too often."""
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
    return sentences


def _flops_sentences(seen: LoopRecord) -> Iterator[str]:
    """The FLOPs of a step, or why they are not known."""
    if seen.not_traced:
        yield f"FLOPs not traced: {seen.not_traced}"
    if seen.flops is not None:
        again = ""
        if seen.flops.recomputed_per_step:
            again = f", and {_in_flop(seen.flops.recomputed_per_step)} computed again in backward"
        if count := seen.flops.modules_with_hooks:
            again += f", without what forward hooks of {counted(count, 'module')} compute"
        yield f"model: {_in_flop(seen.flops.per_step)} a step{again}"


def _rank_sentences(seen: LoopRecord) -> Iterator[str]:
    """Of which of several ranks the numbers are."""
    if seen.rank is not None:
        which = f"rank {seen.rank.rank} of {seen.rank.world_size}"
        yield f"{which}: times, tokens and FLOPs are those of this rank alone"


def _in_flop(flops: float) -> str:
    """A number of FLOPs in the largest unit in which it is at least one."""
    unit, size = next((entry for entry in UNITS if flops >= entry[1]), ("FLOP", 1.0))
    return f"{flops / size:.4g} {unit}"


def _between_sentences(record: RunRecord) -> list[str]:
    """What lies between the steps, and whether data limits the loop."""
    sentences: list[str] = []
    if not record.between_s:
        return sentences
    times, count = LoopTimes(record), len(record.between_s)
    data_ms, other_ms = (
        1e3 * seconds / count
        for seconds in (times.between_data_s, times.between_s - times.between_data_s)
    )
    between = f"between steps: {1e3 * times.between_s / count:.4g} ms"
    if record.seen is None or not record.seen.between_data_s:
        return [between]  # what was data is not known
    sentences.append(f"{between}, data {data_ms:.4g} and other {other_ms:.4g} ms")
    verdict = between_verdict(
        times.steps_s / count, (times.between_s - times.between_data_s) / count
    )
    # what takes the most of the loop limits it; the other is in the sentence before
    if times.data_share >= LIMITING_DATA and times.data_s >= times.between_s - times.between_data_s:
        verdict = (
            f"data limits the loop: {100 * times.data_share:.3g} % of its time waits for a batch"
        )
    if verdict is not None:
        sentences.append(verdict)
    return sentences


def _token_sentences(seen: LoopRecord) -> list[str]:
    """The ranges of what differs from step to step, and the share of padding."""
    ranges = []
    if seen.context_lengths is not None and len(set(seen.context_lengths)) > 1:
        least, most = seen.context_lengths
        ranges.append(f"sequences of {least:,} to {most:,} tokens")
    if len(set(seen.tokens)) > 1:
        ranges.append(f"steps of {min(seen.tokens):,} to {max(seen.tokens):,} tokens")
    sentences = [", ".join(ranges)] if ranges else []
    if seen.padding_tokens and seen.masked_tokens:
        share = 100 * seen.padding_tokens / seen.masked_tokens
        sentences.append(f"padding: {share:.3g} % of the tokens, which tokens/s counts")
    return sentences

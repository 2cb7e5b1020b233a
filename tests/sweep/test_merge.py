"""One record of the records of ranks."""

from cs336_systems.config import SIZES, Phase, RunConfig
from cs336_systems.record import Measurement, RunRecord, Status
from cs336_systems.sweep.ranks import merge


def rank(steps_s: tuple[float, ...], host_s: tuple[float, ...]) -> RunRecord:
    return RunRecord(
        config=RunConfig(size="tiny", model=SIZES["tiny"]), status=Status.OK, started_at="2026-01-02T03:04:05+00:00",
        measurements=tuple(Measurement(phase, steps_s) for phase in (Phase.FORWARD, Phase.COMMUNICATION, Phase.STEP)),
        host_times_s=host_s, host_phases=(Measurement(Phase.FORWARD, host_s),),
    )  # fmt: skip


def test_the_host_s_time_for_a_phase_is_that_of_the_rank_whose_time_on_the_device_it_is() -> None:
    """The second rank takes longer for the second step, the first for the others, with hosts that do not."""
    merged = merge([rank((0.3, 0.1, 0.3), (0.01, 0.02, 0.03)), rank((0.2, 0.4, 0.2), (0.04, 0.05, 0.06))])
    assert merged.measurement(Phase.FORWARD) == Measurement(Phase.FORWARD, (0.3, 0.4, 0.3))
    assert merged.host_phases == (Measurement(Phase.FORWARD, (0.01, 0.05, 0.03)),)
    assert [own.host_phases[0].times_s for own in merged.ranks] == [(0.01, 0.02, 0.03), (0.04, 0.05, 0.06)]

import argparse
import datetime
import itertools

import pytest

from benchmarks import report, timing
from benchmarks.memory import slope
from benchmarks.report import Aim, Table


def test_spread_is_median_and_quartiles_within_the_range():
    found = timing.spread([5.0, 1.0, 3.0, 2.0, 4.0])
    assert found == timing.Spread(median=3.0, low=2.0, high=4.0, num_rounds=5)
    assert found.text(1) == "3.0 (2.0 to 4.0)"


def test_spread_of_two_values_does_not_leave_their_range():
    found = timing.spread([1.0, 2.0])
    assert 1.0 <= found.low <= found.median == 1.5 <= found.high <= 2.0


def test_spread_of_one_value_is_that_value():
    assert timing.spread([7.0]) == timing.Spread(7.0, 7.0, 7.0, 1)


def test_spread_of_nothing_is_refused():
    with pytest.raises(ValueError, match="Run at least one round"):
        timing.spread([])


def test_ratios_are_taken_within_a_round():
    """The machine is ten times slower in the second round: the ratio of the medians would not see it as 2."""
    assert timing.ratios([20.0, 2.0, 20.0], [10.0, 1.0, 10.0]) == [2.0, 2.0, 2.0]


def test_ratios_of_different_rounds_are_refused():
    with pytest.raises(ValueError, match="zip"):
        timing.ratios([1.0, 2.0], [1.0])


def _recorded(names, log):
    def candidate(name):
        def run():
            log.append(name)
            return float(len(log))

        return run

    return {name: candidate(name) for name in names}


def test_candidates_take_turns_in_alternating_order_after_a_warm_up_that_is_dropped():
    log = []
    measured = timing.take_turns(_recorded("ab", log), num_rounds=3)
    assert "".join(log) == "ab" + "ab" + "ba" + "ab"
    assert measured == {"a": [3.0, 6.0, 7.0], "b": [4.0, 5.0, 8.0]}


def test_no_round_starts_that_would_pass_the_budget():
    ticks = itertools.count()  # a second each time it is read
    measured = timing.take_turns(
        _recorded("a", []),
        num_rounds=100,
        budget_s=9,
        least_rounds=2,
        warm_up=False,
        clock=lambda: float(next(ticks)),
    )
    # Start at 0; round r begins at 1 + 2r and takes 1. Round 4 begins at 9, and 9 + 1 > 9.
    assert len(measured["a"]) == 4


def test_the_least_rounds_are_run_also_beyond_the_budget():
    measured = timing.take_turns(_recorded("a", []), num_rounds=100, budget_s=0.0, least_rounds=2)
    assert len(measured["a"]) == 2


def test_a_quiet_machine_is_timed():
    assert timing.refuse_when_busy(allow_busy=False, measure=lambda: [0.99, 0.95]) is None


def test_a_busy_core_ends_the_program_with_status_3(capsys):
    with pytest.raises(SystemExit) as ended:
        timing.refuse_when_busy(allow_busy=False, measure=lambda: [1.0, 0.5])
    assert ended.value.code == 3
    message = capsys.readouterr().err
    assert "core 1: 0.50" in message
    assert "core 0" not in message
    assert "--allow-busy" in message


def test_a_busy_machine_can_be_allowed_and_says_why_it_is_unreliable():
    reason = timing.refuse_when_busy(allow_busy=True, measure=lambda: [0.2], when="after the run")
    assert reason is not None
    assert reason.startswith("after the run, ")
    assert "core 0: 0.20" in reason


def test_the_share_of_each_core_is_measured():
    shares = timing.core_shares(seconds=0.05)
    assert shares
    # Clock ticks can give a little more than all.
    assert all(0 < share < 1.1 for share in shares)


@pytest.mark.parametrize(
    ("aim", "met"),
    [
        pytest.param(Aim("", 0.98, at_least=0.98), True, id="just-enough"),
        pytest.param(Aim("", 0.97, at_least=0.98), False, id="too-little"),
        pytest.param(Aim("", 2.0, at_most=2.0), True, id="just-not-too-much"),
        pytest.param(Aim("", 2.1, at_most=2.0), False, id="too-much"),
    ],
)
def test_an_aim_is_met_up_to_its_bound(aim, met):
    assert aim.is_met is met


def test_results_have_one_form():
    text = report.render(
        "Rates",
        known={"Command": "`python -m x`", "Commit": "abc"},
        tables=[Table("MLP", ("", "rows/s"), [("plain", "1 (1 to 1)")])],
        aims=[Aim("at least 3", 2.0, at_least=3)],
        unreliable=["it was busy"],
    )
    assert text == (
        "# Rates\n\n**UNRELIABLE**: it was busy.\n\n* Command: `python -m x`\n* Commit: abc\n\n"
        "## Aims\n\n| aim | found | met |\n| --- | --- | --- |\n| at least 3 | 2.000 | **no** |\n\n"
        "## MLP\n\n|  | rows/s |\n| --- | --- |\n| plain | 1 (1 to 1) |\n"
    )


def test_what_must_be_known_about_a_number_is_there():
    known = report.facts(["--write"], "benchmarks.towers")
    assert set(known) >= {"Command", "Hardware", "Versions", "Commit", "Date"}
    assert known["Command"] == "`python -m benchmarks.towers --write`"
    assert "keras" in known["Versions"]


def _finish(monkeypatch, folder, *, shares, allow_busy=False, busy=None):
    monkeypatch.setattr(report, "ROOT", folder)
    monkeypatch.setattr(report, "RESULTS", folder / "results")
    monkeypatch.setattr(
        report,
        "refuse_when_busy",
        lambda **kwargs: timing.refuse_when_busy(measure=lambda: shares, **kwargs),
    )
    options = argparse.Namespace(write=True, allow_busy=allow_busy)
    report.finish("rates", "Rates", options=options, known={}, tables=[], aims=[], busy=busy)


def test_results_of_a_quiet_machine_are_written_under_name_and_date(monkeypatch, tmp_path):
    _finish(monkeypatch, tmp_path, shares=[1.0])
    today = datetime.datetime.now(datetime.timezone.utc).date()
    assert [path.name for path in (tmp_path / "results").iterdir()] == [f"rates-{today}.md"]


def test_results_of_a_machine_that_became_busy_are_not_written_and_end_with_status_3(monkeypatch, tmp_path):
    with pytest.raises(SystemExit) as ended:
        _finish(monkeypatch, tmp_path, shares=[0.5])
    assert ended.value.code == 3
    assert not (tmp_path / "results").exists()


def test_results_of_a_busy_machine_are_printed_with_a_label_and_not_written(monkeypatch, tmp_path, capsys):
    _finish(monkeypatch, tmp_path, shares=[1.0], allow_busy=True, busy="before the run, it was busy")
    assert "**UNRELIABLE**: before the run, it was busy." in capsys.readouterr().out
    assert not (tmp_path / "results").exists()


def test_slope_is_the_growth_per_epoch():
    assert slope([10.0, 12.0, 14.0]) == pytest.approx(2.0)
    assert slope([5.0, 5.0, 5.0]) == pytest.approx(0.0)

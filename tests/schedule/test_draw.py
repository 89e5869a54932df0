"""Drawings: the scale of the text, and that the PNG is a picture of every action."""

from PIL import Image

from longstraw_megatron.plan.draw import COLORS, draw_plan, draw_png, draw_text
from longstraw_megatron.schedule import Costs, Description, GroupShape, check_plan, make_plan, prove_step

DESCRIPTION = Description(groups=(GroupShape(2, 3), GroupShape(1, 2)), pp_size=3, vpp_size=2, max_live_prefixes=2)


def _report(costs=None):
    return check_plan(make_plan(DESCRIPTION), DESCRIPTION, costs)


def test_text_is_to_scale_in_any_width():
    report = _report()
    whole = draw_text(report, columns=None).splitlines()
    for pp_rank, line in enumerate(whole[:-1]):
        computes = [span for span in report.timeline[pp_rank] if span.action.op.is_compute]
        assert line.count("-") > 0 and line.startswith(f"rank {pp_rank} |P0.0a-".replace("|", "|" + " " * 6 * pp_rank))
        assert sum(character in "PFBW" for character in line) == len(computes)
        assert len(line) == len("rank 0 |") + round(6 * computes[-1].end)  # six columns for "P0.0a-"
    for columns in (30, 80, 120):
        lines = draw_text(report, columns=columns).splitlines()
        assert len(lines) == 4
        longest = max(len(line) for line in lines[:-1]) - len("rank 0 |")
        assert columns - 1 <= longest <= columns
    assert whole[-1] == f"makespan {report.makespan:g}, bubble {100 * report.bubble_fraction:.1f} %"


def test_text_of_actions_that_take_no_time():
    costs = Costs(prefill=0, forward=1, backward=1, prompt_backward=0)
    lines = draw_text(_report(costs), columns=60).splitlines()
    assert not any(letter in line for line in lines for letter in "PW")
    assert "F" in lines[0] and "B" in lines[0]


def test_text_of_nothing():
    empty = Description(groups=(), pp_size=2)
    report = check_plan(make_plan(empty), empty)
    assert draw_text(report) == "rank 0 |\nrank 1 |\nmakespan 0, bubble 0.0 %"


def test_png_shows_all_kinds_of_actions(tmp_path):
    report = _report()
    drawn = {span.action.op for spans in report.timeline for span in spans if span.action.op.is_compute}
    assert len(drawn) == 4  # none of these microbatches has blocks
    draw_png(report, tmp_path / "plan.png", title="PP3 VPP2", unit="s")
    image = Image.open(tmp_path / "plan.png").convert("RGB")
    colors = {color: count for count, color in image.getcolors(maxcolors=1 << 24)}
    assert image.width > 1500 and image.height > 300
    for color in (COLORS[op] for op in drawn):
        assert colors[tuple(bytes.fromhex(color[1:]))] > 2000


def test_a_plan_is_drawn_with_costs_that_it_was_not_made_for(tmp_path):
    step = prove_step(DESCRIPTION, Costs())
    costs = Costs(prefill=2, forward=1, backward=3, prompt_backward=9)
    text = draw_plan(step, costs)
    assert text == draw_text(_report(costs)) != draw_text(_report())
    assert draw_plan(step, costs, tmp_path / "plan.png") == text
    assert Image.open(tmp_path / "plan.png").width > 1500

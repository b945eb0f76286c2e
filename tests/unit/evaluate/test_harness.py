"""The harness against what it must equal: decoding round by round, trees by hand, plain sums; and bad
records."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from tiny_models import HIDDEN, tiny_config, tiny_drafter, tiny_head, tiny_record

from dflash_online.distill.pack import all_blocks, valid_anchors
from dflash_online.errors import ConfigError, ShapeError
from dflash_online.evaluate import readings
from dflash_online.evaluate.harness import Harness, compare_reports
from dflash_online.evaluate.plot import write_plots
from dflash_online.evaluate.readings import read_record
from dflash_online.evaluate.table import length_table, paired_table, slot_table, tau_table
from dflash_online.evaluate.tau import chain_walk, evaluate_drafter, tau_of
from dflash_online.tree.reference import heap_tree

CONFIG = tiny_config(block_size=6)


def some_records():
    return [tiny_record(40, ((5, 40),), seed=seed, record_id=f"r{seed}") for seed in range(4)] + [
        tiny_record(30, ((3, 12), (20, 30)), seed=9, record_id="two answers"),
        tiny_record(8, ((5, 8),), seed=10, record_id="shorter than a block"),
    ]


def loose_head():
    """A head whose logits are close together, so that ranks of labels spread."""
    return dataclasses.replace(tiny_head(), weight_VH=0.05 * tiny_head().weight_VH)


def reported(records, **options):
    harness = Harness(tiny_drafter(CONFIG), loose_head(), **options)
    for record in records:
        assert harness.add(record)
    return harness.report


def tree_walk(record, num_nodes):
    """Accepted drafts of every round by the heap's tree, drafted with the context cache as a server does."""
    drafter, head, tokens = tiny_drafter(CONFIG), loose_head(), record.header.token_ids
    accepted = []
    for first, end in record.header.loss_spans:
        anchor = first
        while anchor + 1 < end:
            cache = drafter.new_cache()
            drafter.extend_context(cache, record.features_TF[:anchor], torch.arange(anchor))
            block = torch.tensor([tokens[anchor]] + [CONFIG.mask_token_id] * 5)
            logits = head.logits(drafter.draft_block(head.embed(block), anchor, cache))[1:]
            log_prob = F.log_softmax(logits, dim=-1)
            width = min(num_nodes, log_prob.shape[1])
            best = log_prob.sort(dim=-1, descending=True, stable=True)
            nodes = heap_tree(best.values[:, :width], best.indices[:, :width], num_nodes)
            paths = {node.path for node in nodes}
            rest = tuple(tokens[anchor + 1 : end])
            depth = max((len(path) for path in paths if path == rest[: len(path)]), default=0)
            accepted.append(depth)
            anchor += depth + 1
    return accepted


def test_chain_is_that_of_decoding_and_of_the_gate():
    records, drafter, head = some_records(), tiny_drafter(CONFIG), loose_head()
    report = reported(records)
    assert report.record_ids == [record.header.record_id for record in records]
    assert report.histograms["chain"] == [chain_walk(drafter, head, record) for record in records]
    gate = evaluate_drafter(drafter, head, records)
    assert report.tau("chain") == gate.tau
    assert report.top1 == pytest.approx(gate.stats.accuracy())


@pytest.mark.parametrize("num_nodes", [1, 5, 12])
def test_trees_are_those_of_the_heap_walked_round_by_round(num_nodes):
    records = some_records()
    report = reported(records, num_nodes=[num_nodes])
    total = 0
    for record, found in zip(records, report.histograms[f"ddtree_nodes_{num_nodes}"], strict=True):
        wanted = tree_walk(record, num_nodes)
        assert found == tuple(wanted.count(a) for a in range(CONFIG.block_size))
        total += sum(wanted)
    assert total > 0


def test_readings_are_ordered_as_theory_says_at_every_anchor():
    record = some_records()[0]
    anchors = valid_anchors(record.loss_mask_T())
    found = read_record(tiny_drafter(CONFIG), loose_head(), record, anchors, num_nodes=[4, 8]).accepted
    assert list(found) == ["chain", "ddtree_nodes_4", "ddtree_nodes_8", "top8_oracle"]
    assert (found["ddtree_nodes_4"] <= found["ddtree_nodes_8"]).all()
    assert (found["ddtree_nodes_8"] <= found["top8_oracle"]).all()
    assert (found["chain"] <= found["top8_oracle"]).all()
    assert int(found["top8_oracle"].sum()) > int(found["ddtree_nodes_8"].sum()) > int(found["chain"].sum())


def test_slots_loss_and_calibration_are_plain_sums(monkeypatch):
    monkeypatch.setattr(readings, "_CHUNK_VALUES", 700)  # three anchors to a chunk of logits
    monkeypatch.setattr(readings, "_CHUNK_ANCHORS", 8)
    records, drafter, head = some_records(), tiny_drafter(CONFIG), loose_head()
    report = reported(records)
    num, loss, top8, confidence, right = (torch.zeros(5) for _ in range(5))
    for record in records:
        anchors = valid_anchors(record.loss_mask_T())
        batch = all_blocks(record, anchors, CONFIG.block_size)
        for row, anchor in enumerate(anchors.tolist()):
            cache = drafter.new_cache()
            drafter.extend_context(cache, record.features_TF[:anchor], torch.arange(anchor))
            block = torch.tensor([record.header.token_ids[anchor]] + [CONFIG.mask_token_id] * 5)
            logits = head.logits(drafter.draft_block(head.embed(block), anchor, cache))
            for k in batch.valid_AB[row].nonzero().flatten().tolist():
                label = int(batch.label_AB[row, k])
                num[k - 1] += 1
                loss[k - 1] += F.cross_entropy(logits[k], torch.tensor(label))
                top8[k - 1] += int(label in logits[k].topk(8).indices)
                confidence[k - 1] += logits[k].softmax(0).max()
                right[k - 1] += int(logits[k].argmax() == label)
    assert report.num_D.tolist() == num.tolist()
    assert report.loss == pytest.approx((loss / num).tolist(), rel=1e-4)
    assert report.top8 == pytest.approx((top8 / num).tolist())
    bins = report.calibration_3L.sum(dim=1).tolist()
    assert bins == pytest.approx([num.sum().item(), confidence.sum().item(), right.sum().item()], rel=1e-4)
    assert sum(report.loss_histogram) == int(num.sum())
    assert sum(slots for _, slots, _ in report.loss_by_length.values()) == int(num.sum())
    assert {bucket: records for bucket, (_, _, records) in report.loss_by_length.items()} == {"1..127": 6}


def test_rounds_of_every_reading_add_up_to_the_answer():
    records = some_records()
    report = reported(records, num_nodes=[8])
    for histograms in report.histograms.values():
        for record, histogram in zip(records, histograms, strict=True):
            committed = sum((a + 1) * count for a, count in enumerate(histogram))
            # Tokens behind each answer's first; of its last round the bonus may lie behind its end.
            lengths = [end - start - 1 for start, end in record.header.loss_spans]
            assert sum(lengths) <= committed <= sum(lengths) + len(lengths)


def test_calibration_error_of_a_drafter_that_is_sure_and_wrong_is_near_one():
    head = dataclasses.replace(tiny_head(), weight_VH=100 * tiny_head().weight_VH)
    harness = Harness(tiny_drafter(CONFIG), head)
    for record in some_records():
        harness.add(record)
    assert harness.report.calibration_error > 0.8


def test_intervals_hold_the_estimate_and_need_two_records():
    report = reported(some_records(), num_nodes=[8])
    interval = report.tau_interval("ddtree_nodes_8")
    assert interval.low <= report.tau("ddtree_nodes_8") <= interval.high
    assert interval.low < interval.high
    assert reported(some_records()[:1]).tau_interval("chain") is None


def test_comparison_is_record_by_record_and_refuses_other_records():
    records = some_records()
    first = reported(records)
    harness = Harness(tiny_drafter(CONFIG, seed=5), loose_head())
    for record in records:
        harness.add(record)
    paired = compare_reports(first, harness.report, reading="chain")
    differences = [
        tau_of(new) - tau_of(old)
        for old, new in zip(first.histograms["chain"], harness.report.histograms["chain"], strict=True)
    ]
    assert paired.mean_difference == pytest.approx(sum(differences) / len(differences))
    with pytest.raises(ShapeError, match="not on the same ones"):
        compare_reports(first, reported(records[1:]), reading="chain")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (tiny_record(20, (), seed=1), "no two supervised tokens in a row"),
        (tiny_record(20, ((3, 4), (8, 9)), seed=1), "no two supervised tokens in a row"),
        (tiny_record(20, ((4, 20),), seed=1, width=3 * HIDDEN), "features 72 wide, the drafter reads 48"),
        (tiny_record(3, ((1, 3),), token_ids=(1, 2, 99)), "a token beyond the target's vocabulary of 37"),
    ],
)
def test_a_record_that_is_of_no_use_is_left_out_and_counted_by_reason(record, reason):
    harness = Harness(tiny_drafter(CONFIG), tiny_head())
    assert not harness.add(record)
    assert harness.report.left_out == {reason: 1}
    assert harness.report.record_ids == []


def test_records_of_other_layers_or_with_features_that_are_not_finite_are_left_out():
    harness = Harness(tiny_drafter(CONFIG), tiny_head())
    record = tiny_record(20, ((4, 20),))
    for layer_ids in ((5, 1), (1, 4)):
        other = dataclasses.replace(record, header=dataclasses.replace(record.header, layer_ids=layer_ids))
        assert not harness.add(other)
    for value in (float("nan"), float("inf")):
        broken = tiny_record(20, ((4, 20),))
        broken.features_TF[3, 7] = value
        assert not harness.add(broken)
    assert harness.report.left_out == {
        "layers [5, 1], the drafter reads [1, 5]": 1,
        "layers [1, 4], the drafter reads [1, 5]": 1,
        "features that are not finite": 2,
    }


def test_a_record_of_another_target_than_the_first_is_left_out():
    harness = Harness(tiny_drafter(CONFIG), tiny_head())
    record = tiny_record(20, ((4, 20),))
    tuned = dataclasses.replace(record.header.target, path="tuned", weight_checksum="01")
    other = dataclasses.replace(record, header=dataclasses.replace(record.header, target=tuned))
    assert [harness.add(one) for one in (record, other, record)] == [True, False, True]
    assert harness.report.left_out == {"of target tuned, not of tiny with the weights of the first": 1}


def test_tables_show_every_figure_in_80_columns_and_drafters_of_unequal_blocks():
    short = Harness(tiny_drafter(tiny_config(block_size=4)), loose_head(), num_nodes=[8, 64])
    for record in some_records():
        short.add(record)
    long_name = "5-de9e7c8469d8 (/home/user/runs/run-20250101-000000-f336/checkpoints/v000005)"
    reports = {long_name: short.report, "5-de9e7c8469d8": reported(some_records(), num_nodes=[8, 64])}
    pairs = {name: compare_reports(*reports.values(), reading=name) for name in short.report.histograms}
    console = Console(width=80, file=io.StringIO(), soft_wrap=True)
    for table in (tau_table(reports), slot_table(reports), length_table(reports), paired_table(pairs)):
        console.print(table)
    text = console.file.getvalue()
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for report in reports.values():
        figures = [f"{report.tau(name):.3f}" for name in report.histograms]
        assert all(figure in text for figure in (*figures, *(f"{share:.3f}" for share in report.top8)))
    assert [
        line.split()[3] for line in text.splitlines() if line.startswith("\N{BOX DRAWINGS LIGHT VERTICAL} 5 ")
    ] == ["-"]


@pytest.mark.parametrize("budget", [0, -3, 513])
def test_a_budget_out_of_bounds_is_named(budget):
    with pytest.raises(ConfigError, match=rf"nodes must be in 1..512, got {budget}"):
        Harness(tiny_drafter(CONFIG), tiny_head(), num_nodes=[8, budget])


def test_plots_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    report = reported(some_records(), num_nodes=[8])
    files = write_plots({"one": report, "two": report}, tmp_path / "plots")
    assert {file.name for file in files} == {
        "tau.png",
        "accuracy.png",
        "calibration.png",
        "loss-by-length.png",
        "loss-histogram.png",
    }
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)

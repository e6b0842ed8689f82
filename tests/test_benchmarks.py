"""Each benchmark runs at tiny sizes on a CPU; what it counts is right; what breaks becomes a row and an exit code."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import attention, calls, overhead
from benchmarks.harness import Config, Result, geometric_mean, measure, table, write_json
from benchmarks.peers import PEERS, Attend
from benchmarks.works import CPU_WORKS, WORKS, Mods, Work, count_pairs, document_lengths, forward_flops

CPU = torch.device("cpu")
QUICK = ["--device", "cpu", "--quick"]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch about its own dense paths


# harness


def test_measure_gives_each_round_a_sample_and_keeps_going_after_an_error() -> None:
    good, bad = Config("work", "good", "forward"), Config("work", "bad", "forward")
    ran: list[int] = []

    def fail() -> None:
        raise ValueError("no\nmore")

    results = measure({bad: fail, good: lambda: ran.append(1)}, CPU, rounds=3, flops={good: 1e9}, sample_ms=0.01)
    assert len(results[good].milliseconds) == 3
    assert results[good].tflops == pytest.approx(1 / results[good].median)
    assert results[bad].note == "error: ValueError: no"
    assert results[bad].failed


def test_json_has_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.json"
    write_json(str(path), {"mean": geometric_mean([]), "list": [1.5, math.inf]})
    assert json.loads(path.read_text()) == {"mean": None, "list": [1.5, None]}


def test_table_aligns() -> None:
    assert table(["what", "ms"], [["a", "1.0"], ["bc", "10.0"]]) == "what    ms\n----  ----\na      1.0\nbc    10.0"


# works


@pytest.mark.parametrize("name", [*WORKS, *CPU_WORKS])
def test_pairs_are_those_of_the_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.works.PAIRS_AT_ONCE", 1000)
    work = {**WORKS, **CPU_WORKS}[name].shrunk(40)
    mask = work.mods(work, CPU).mask_mod
    zero, index = torch.tensor(0), torch.arange(work.length)
    expected = work.length**2 if mask is None else int(mask(zero, zero, index[:, None], index).sum())
    assert count_pairs(mask, work.length, CPU) == expected
    assert forward_flops(work, expected) == 2 * expected * (work.head_dim + work.dv) * work.heads


def test_the_works_are_those_of_the_tables() -> None:
    assert len(WORKS) == 14
    assert WORKS["causal_gqa"].shape == "2x32:8x8192 D128"
    assert WORKS["causal_d192_128"].shape == "2x16x8192 D192/128"
    lengths = document_lengths(16384)
    assert len(lengths) == 12
    assert sum(lengths) == 16384


# attention


def test_attention_measures_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    works = "full_d128,causal_gqa,causal_d192_128,relative_bias"
    code = attention.main([*QUICK, "--works", works, "--peers", "torch_flex_eager,sdpa_flash,fa3", "--json", str(path)])
    text = capsys.readouterr().out
    assert code == 0, text
    record = json.loads(path.read_text())
    assert {"device", "torch", "triton", "flexattn", "commit", "date"} <= record["environment"].keys()
    assert {check["work"] for check in record["checks"]} == set(works.split(","))
    rows = {(r["work"], r["peer"], r["direction"]): r for r in record["results"]}
    assert rows["causal_gqa", "flexattn", "backward"]["median"] > 0
    assert rows["relative_bias", "without_score_mod", "backward"]["median"] > 0
    assert rows["relative_bias", "sdpa_flash", "forward"]["note"] == "n/a: this work needs a mod"
    assert rows["full_d128", "torch_flex_eager", "backward"]["note"] == "n/a: forward only on this device"
    assert "geometric mean over sdpa_flash" in text
    assert "of the time without its score_mod" in text


def test_attention_in_other_processes_first(capsys: pytest.CaptureFixture[str]) -> None:
    code = attention.main([*QUICK, "--works", "causal_d64", "--peers", "none", "--precompile", "2"])
    assert code == 0
    assert "warmed causal_d64: ok" in capsys.readouterr().err


def broken_for(work_name: str, spoil: bool) -> Any:
    def peer(work: Work, mods: Mods, device: torch.device) -> Attend:
        attend = PEERS["sdpa_flash"](work, mods, device)
        if work.name != work_name:
            return attend
        if not spoil:
            raise RuntimeError("boom")
        return lambda q, k, v: 1.1 * attend(q, k, v)

    return peer


@pytest.mark.parametrize(
    ("spoil", "message"), [(False, "error: RuntimeError: boom"), (True, "is 1.0e-01 from sdpa_flash")]
)
def test_one_broken_work_does_not_lose_the_rest(
    spoil: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PEERS, "flexattn", broken_for("causal_d64", spoil))
    path = tmp_path / "a.json"
    argv = [*QUICK, "--works", "causal_d64,causal_d128", "--peers", "sdpa_flash", "--json", str(path)]
    assert attention.main(argv) == 1
    text = capsys.readouterr().out
    assert message in text
    assert "FAILED" in text
    measured = {(r["work"], r["peer"]) for r in json.loads(path.read_text())["results"] if r["milliseconds"]}
    assert {("causal_d128", "flexattn"), ("causal_d128", "sdpa_flash"), ("causal_d64", "sdpa_flash")} <= measured


def test_a_process_that_dies_while_warming_up_is_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path("no/such/place")))
    monkeypatch.setattr("sys.executable", "/bin/false")
    argv = [*QUICK, "--works", "causal_d64", "--peers", "none", "--precompile", "1"]
    assert attention.main(argv) == 1
    assert "error: exit 1 while warming up" in capsys.readouterr().out


def test_ratios_are_times_of_the_peer_over_ours() -> None:
    ours = Result(Config("w", "flexattn", "forward"), (2.0,))
    peer = Result(Config("w", "torch_flex", "forward"), (3.0,))
    assert attention.ratios([ours, peer], "flexattn", "torch_flex") == {peer.config: 1.5}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SystemExit, match="--works: unknown causal_d65; known are full_d128"):
        attention.main(["--works", "causal_d65"])


# overhead


def test_overhead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "o.json"
    argv = [*QUICK, "--parts", "masks,host,recompiles", "--peers", "flexattn,torch_flex_eager", "--json", str(path)]
    assert overhead.main(argv) == 0, capsys.readouterr().out
    record = json.loads(path.read_text())
    found = {(r["work"], r["peer"], r["direction"]) for r in record["results"]}
    assert ("document mask 128", "flexattn", "new closure") in found
    assert ("call, alibi + documents", "flexattn", "forward + backward") in found
    assert [r["peer"] for r in record["recompiles"]] == ["flexattn"]


def test_first_call_in_a_fresh_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert overhead.main([*QUICK, "--parts", "first_call", "--peers", "flexattn"]) == 0
    text = capsys.readouterr().out
    assert "empty cache: backward" in text
    assert "warm cache: forward" in text


# calls


def a_call(seed: int = 0) -> calls.Call:
    scale, draw = calls.SCALES["interpreter"], random.Random(seed)
    torch.manual_seed(seed)
    kind = calls.Kind("bias_document", torch.float32, 16, "transposed", False)
    return calls.make_call(kind, scale, draw)


def dense_results(call: calls.Call) -> dict[str, Tensor]:
    out, _ = calls.reference.attention(
        call.query, call.key, call.value, call.score_mod, call.mask_mod, scale=call.scale, dtype=torch.float32
    )
    leaves = (call.query, call.key, call.value, *call.learnable)
    return calls._named(out, torch.autograd.grad(out, leaves, call.d_out))


def test_right_results_pass_and_wrong_ones_do_not() -> None:
    call = a_call()
    results = dense_results(call)
    assert max(calls.excess(call, results, random.Random(0)).values()) < 1.0
    for name in results:
        spoiled = {**results, name: results[name] * 1.01 + 1e-3}
        parts = calls.excess(call, spoiled, random.Random(0))
        assert parts[name] > 1.0
    assert calls.excess(call, {"out": results["out"] * math.nan}, random.Random(0)) == {"out": math.inf}


def test_each_kind_comes_before_any_comes_again() -> None:
    for scale in calls.SCALES.values():
        kinds = calls.kinds_of(scale, list(calls.MODS))
        assert len(kinds) <= calls.SETTLED
        order = calls.order_of_kinds(kinds, 200, random.Random(0))
        assert set(order[: len(kinds)]) == set(kinds)
        assert len(order) == 200


def test_claims_that_fail_are_named() -> None:
    fine = {"entries": ["a"], "wrong": [], "unlisted": [], "missing": [], "last_built_at": 9, "stats": {"compiles": 0}}
    assert calls.failures(fine, fine, 10) == []
    assert calls.failures(fine, fine, 8) == ["kernels built after call 8: 1, as 9"]
    again = {**fine, "entries": ["a", "b"]}
    assert calls.failures(fine, again, 10) == ["compiled by the second process: 1, as b"]
    assert calls.failures({**fine, "unlisted": ["c"]}, fine, 10) == [
        "in the folder, but not listed by explain: 1, as c"
    ]


@pytest.mark.slow
def test_calls_in_the_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    code = calls.main(["--device", "interpreter", "--calls", "24", "--mods", "alibi_causal"])
    assert code == 0, capsys.readouterr().out

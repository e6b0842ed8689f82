"""command_line: the commands of `python -m flexattn`, their output and their exit status."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flexattn.command_line import bench, doctor
from flexattn.command_line.arguments import TARGETS
from flexattn.command_line.bench import Work
from flexattn.command_line.doctor import CHECKS, Check, examine
from flexattn.command_line.main import main
from flexattn.command_line.named_mod import Shape, named_mod, shape_of
from flexattn.errors import ArgumentError
from flexattn.machine import target
from flexattn.machine.kernel_store import KernelStore, open_store
from flexattn.process.config import settings

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "command-line.md").read_text()
LINES = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
MODS = """
from neighbor import WIDTH
import torch

def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < WIDTH)

def of_heads(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) | (h + b == 1)

def rows(score, b, h, q_idx, kv_idx):
    return torch.softmax(score, -1)

def soft(score, b, h, q_idx, kv_idx, cap=20.0):
    return cap * torch.tanh(score / cap)

def make(width):
    return window

if __name__ == "__main__":
    raise SystemExit("it ran as a script")
"""


@pytest.fixture
def mods_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbor.py").write_text("WIDTH = 9\n")
    path = tmp_path / "mods_of_a_user.py"
    path.write_text(MODS)
    return str(path)


def usage_error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err


# The page


@pytest.mark.parametrize("line", LINES)
def test_the_commands_of_the_page_run(line: str, machine: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    if " show " in line:
        pytest.importorskip("matplotlib").use("Agg")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_mods.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    start, *words = shlex.split(line.removeprefix("python -m "))
    assert start == "flexattn"
    assert main(words) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("command", ["doctor", "explain", "show", "bench", "cache"])
def test_each_command_has_help_with_an_example(command: str, capsys) -> None:
    assert f"`{command}" in PAGE
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert re.search(rf"\n *python -m flexattn {command}( .*)?\n", capsys.readouterr().out)


def test_an_unknown_command_is_a_usage_error(capsys) -> None:
    assert "invalid choice: 'doktor'" in usage_error(capsys, "doktor")


def test_the_process_returns_the_status() -> None:
    done = subprocess.run([sys.executable, "-m", "flexattn", "explain", "nothing"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: mod: found 'nothing', expected FILE.py:MOD. Write for example mods.py:causal.\n"


# doctor


def test_doctor_finds_that_the_cpu_works(capsys) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for name in ("flexattn ", "torch ", "triton ", "gpu ", "cache "):
        assert re.search(f"^{name}", out, re.MULTILINE), name
    assert re.search(r"cpu +works: largest error \d", out)
    if not torch.cuda.is_available():
        assert re.search(r"Hopper kernels +no: torch finds no GPU", out)


def test_doctor_returns_1_if_an_engine_does_not_work(capsys, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "error_of", lambda check: 1.0)
    assert main(["doctor"]) == 1
    assert "WRONG: largest error 1.0e+00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "text"), [(float("nan"), "WRONG"), (RuntimeError("no\nmore"), "FAILS: RuntimeError: no")]
)
def test_what_is_wrong_with_an_engine_is_said(error: float | Exception, text: str, monkeypatch) -> None:
    def found(check: Check) -> float:
        if isinstance(error, Exception):
            raise error
        return error

    monkeypatch.setattr(doctor, "error_of", found)
    finding = examine(CHECKS[0])
    assert finding.failed and finding.text.startswith(text)


# explain


def test_explain_prints_graph_and_facts(mods_file: str, capsys) -> None:
    assert main(["explain", f"{mods_file}:window"]) == 0
    out = capsys.readouterr().out
    assert "def window(b, h, q_idx, kv_idx" in out and "keep    (q_idx >= kv_idx)" in out
    assert "kernels for" not in out


@pytest.mark.parametrize("name", ["window", "make(3)", "soft"])
def test_explain_with_a_target_prints_a_line_for_each_kernel(name: str, mods_file: str, capsys) -> None:
    assert main(["explain", f"{mods_file}:{name}", "--target", "sm_90"]) == 0
    out = capsys.readouterr().out
    assert "kernels for sm_90:" in out and "hopper_forward" in out and "query [1, 8, 4096, 64]" in out
    assert out.startswith("def ")


def test_explain_builds_masks_for_the_batches_and_heads_that_are_read(mods_file: str, capsys) -> None:
    words = [
        "explain",
        f"{mods_file}:of_heads",
        "--shape",
        "2,4,1,256,512,32",
        "--dtype",
        "float16",
        "--target",
        "sm_80",
    ]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "B=2, H=4, Q_LEN=256, KV_LEN=512" in out and "key [2, 1, 512, 32]" in out and "float16" in out


def test_explain_writes_all_stages(mods_file: str, tmp_path: Path, capsys) -> None:
    words = ["explain", f"{mods_file}:soft", "--target", "sm_90"]
    assert main([*words, "--full"]) == 0
    assert "-- source of hopper_forward" in capsys.readouterr().out
    assert main([*words, "--html", str(tmp_path / "call.html")]) == 0
    assert "source of hopper_forward" in (tmp_path / "call.html").read_text()


def test_a_mod_that_is_refused_gives_1(mods_file: str, capsys) -> None:
    assert main(["explain", f"{mods_file}:rows"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: score_mod rows: found softmax over the score at ") and "mods_of_a_user.py:12" in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("nope", "found 'nope' \\(name 'nope' is not defined\\), .* Functions there: window, of_heads"),
        ("make", "found make with 1 parameters, .* If make returns a mod, write make\\(...\\)"),
        ("torch.pi", "found torch.pi = 3.14.*, expected a function"),
        ("wi ndow", "found 'wi ndow'"),
    ],
)
def test_a_name_that_is_no_mod(words: str, text: str, mods_file: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        named_mod(f"{mods_file}:{words}")


@pytest.mark.parametrize("place", ["/no/such/file.py:mod", "no_such_module:mod"])
def test_a_place_that_is_no_file(place: str, capsys) -> None:
    assert main(["explain", place]) == 2
    assert "error: mod: found" in capsys.readouterr().err


def test_shapes(capsys) -> None:
    assert shape_of("1,2,3,4") == Shape(1, 2, 2, 3, 3, 4)
    assert shape_of("1,4,2,3,5,6") == Shape(1, 4, 2, 3, 5, 6)
    for text in ("1,2,3", "a,b,c,d", "1,2,0,4"):
        assert "expected B,H,S,D or B,Hq,Hkv,M,N,D" in usage_error(capsys, "explain", "x.py:y", "--shape", text)
    for text in ("nn", "int8", "float8_e4m3fn"):
        err = usage_error(capsys, "explain", "x.py:y", "--dtype", text)
        assert f"found '{text}', expected one of float16, bfloat16, float32, float64" in err


def test_the_last_line_of_a_summary_names_options(mods_file: str, capsys) -> None:
    for words in ((), ("--target", "sm_90")):
        assert main(["explain", f"{mods_file}:window", *words]) == 0
        out = capsys.readouterr().out
        assert out.endswith(
            "--full prints all stages and the sources of the kernels, --html FILE writes them to a page.\n"
        )
        assert "full()" not in out


def test_a_dtype_needs_a_call(mods_file: str, capsys) -> None:
    assert main(["explain", f"{mods_file}:window", "--dtype", "float16"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: dtype: found float16, expected a call") and "--shape" in err


def test_targets(mods_file: str, capsys) -> None:
    assert {f"sm_{arch}" for arch in target._SHARED_MEMORY} | set(target._LDS) <= set(TARGETS)
    assert all(target.named(name) is not None for name in TARGETS)
    for text in ("sm_12345", "gfx1", "sm_9", "90"):
        assert f"found '{text}', expected one of sm_75" in usage_error(capsys, "explain", "x.py:y", "--target", text)
    assert main(["explain", f"{mods_file}:window", "--target", "sm_90a"]) == 0


def test_a_page_that_cannot_be_written(mods_file: str, tmp_path: Path, capsys, monkeypatch) -> None:
    words = ["explain", f"{mods_file}:soft", "--html"]
    for path, text in ((tmp_path / "no" / "x.html", "expected a file in an existing folder"), (tmp_path, "the folder")):
        assert main([*words, str(path)]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: html: found ") and text in err
    (tmp_path / "old.html").touch()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert main([*words, str(tmp_path / "old.html")]) == 2
    assert "expected a file that you may write" in capsys.readouterr().err


def test_a_write_that_fails(mods_file: str, tmp_path: Path, capsys, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert main(["explain", f"{mods_file}:soft", "--html", str(tmp_path / "x.html")]) == 2
    assert "x.html' (No space left on device), expected a file that can be written" in capsys.readouterr().err


# show


def test_show_refuses_files_that_it_cannot_write(mods_file: str, tmp_path: Path, monkeypatch, capsys) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    for out, text in (("no/x.png", "an existing folder"), ("x.xyz", "one of .*png.* --out x.png"), ("x", "one of ")):
        assert main(["show", f"{mods_file}:window", "--out", out]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: out: found ") and re.search(text, err)
    assert not list(tmp_path.glob("x*"))


def test_show_without_matplotlib(mods_file: str, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["show", f"{mods_file}:window"]) == 1
    assert capsys.readouterr().err.startswith("error: show: found no matplotlib")


def test_show_draws_a_mod(mods_file: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    out = tmp_path / "window.png"
    assert main(["show", f"{mods_file}:window", "--shape", "1,1,300,64", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


# bench


def test_bench_prints_a_line_for_each_work(capsys) -> None:
    assert main(["bench", "--shape", "1,2,1,64,128,16", "--rounds", "1", "--device", "cpu", "--backward"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-len(bench.WORKS) :]] == list(bench.WORKS)
    assert "n/a: SDPA has no score_mod" in lines[-1] and re.search(
        r"full +[\d.]+ +[\d.]+ \([\d.]+x\)", "\n".join(lines)
    )


def test_bench_shows_results_that_differ_and_peers_that_fail(monkeypatch, capsys) -> None:
    def fails(*_: object) -> bench.Attend:
        raise RuntimeError

    monkeypatch.setitem(bench.PEERS, "sdpa", lambda work, shape, device: lambda q, k, v: q * 3 + 1)
    monkeypatch.setitem(bench.PEERS, "torch_flex", fails)
    words = [
        "bench",
        "--shape",
        "1,1,32,16",
        "--works",
        "full",
        "--peers",
        "flexattn,sdpa,torch_flex",
        "--device",
        "cpu",
    ]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "WRONG: differs by" in out and "error: RuntimeError" in out


@pytest.mark.parametrize("argument", ["--works", "--peers"])
def test_bench_refuses_unknown_names(argument: str, capsys) -> None:
    assert main(["bench", argument, "nothing"]) == 2
    assert f"error: {argument[2:]}: found 'nothing', expected one of" in capsys.readouterr().err


@pytest.mark.parametrize("rounds", ["0", "-3", "two"])
def test_bench_needs_a_round(rounds: str, capsys) -> None:
    assert f"found '{rounds}', expected a whole number >= 1" in usage_error(capsys, "bench", "--rounds", rounds)


def test_bench_names_devices_that_are_not_there(capsys, monkeypatch) -> None:
    for text in ("gpu", "mps", "meta"):
        assert f"found '{text}', expected cpu, cuda" in usage_error(capsys, "bench", "--device", text)
    for count, text in ((0, "no GPU\n"), (1, "1 GPU\n"), (2, "2 GPUs\n")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert f"found 'cuda:2', but torch finds {text}" in usage_error(capsys, "bench", "--device", "cuda:2")


def test_works_are_masks_or_scores() -> None:
    works = [make(Shape(1, 2, 2, 64, 64, 16), torch.device("cpu")) for make in bench.WORKS.values()]
    assert all(isinstance(work, Work) for work in works)


# cache


def fill(folder: Path) -> KernelStore:
    store = KernelStore(folder)
    header = "# mod bias, user.py:3\n# flexattn 0.1.0, triton 3.7.1, torch 2.13.0, sm_90\n"
    store.add(f"{1:032x}", {"forward_mine.py": header.encode(), "forward_mine.cubin": b"x" * 2**20})
    store.folder("triton")
    store.write("tiles.json", "{}")
    return store


def test_cache_lists_and_clears(machine: Path, capsys) -> None:
    store = fill(machine)
    assert main(["cache", "list"]) == 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d +1,024\.\d KiB  sm_90 +forward_mine\n", capsys.readouterr().out)
    assert main(["cache"]) == main([]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second and "1 kernels, 1.0 MiB in total" in first
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == f"{store.root}: removed 1 kernels, 1.0 MiB\n"
    assert {path.name for path in machine.iterdir()} == {"tiles.json"}
    assert main(["cache", "list"]) == 0
    assert capsys.readouterr().out == f"{store.root}: no kernels\n"


def test_cache_that_cannot_be_gives_1(monkeypatch, capsys) -> None:
    from flexattn.command_line import kernel_cache

    monkeypatch.setattr(kernel_cache, "open_store", lambda folder: None)
    for words in (["cache"], ["cache", "list"], ["cache", "clear"]):
        assert main(words) == 1
        assert "no kernels can be kept" in capsys.readouterr().out


@pytest.mark.parametrize(("folder", "reason"), [("/proc/none", "No such file"), ("open/a", "others can write there")])
def test_what_keeps_kernels_from_being_kept_is_said(
    folder: str, reason: str, machine: Path, monkeypatch, capsys
) -> None:
    (machine / "open").mkdir()
    (machine / "open").chmod(0o777)
    monkeypatch.setenv("FLEXATTN_CACHE_DIR", str(machine / folder))
    for command in ("cache", "doctor"):
        open_store.cache_clear()
        settings.cache_clear()
        assert main([command]) == 1
        out = capsys.readouterr().out
        assert reason in out and "Set FLEXATTN_CACHE_DIR to " in out

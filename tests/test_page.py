"""page: the HTML page of a mask has the mask's pairs, keeps to its limits, and draws them in Chromium."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from block_masks import bind, create, live_pairs, table_mask
from elsewhere import elsewhere, there
from test_gpu_float64 import lists_moved

from flexattn import BlockMask, mods
from flexattn.block_mask import page, plot, svg
from flexattn.errors import ArgumentError, IndexRangeError, MutationError

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def data_of(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(data)


def unpacked(text: str, dtype: str = "<i4") -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype)


def pairs_of(data: dict[str, Any]) -> np.ndarray:
    """Return int8 [M, N] as the page reads it: 1 for pairs that attend, 0 for others, -1 where it does not know."""
    (M, N), (tile_m, tile_n) = data["lengths"], data["tile"]
    rows, columns = (max(1, min(n, size)) for n, size in zip(data["lengths"], data["block"], strict=True))
    found = np.zeros((-(-M // rows) * rows, -(-N // columns) * columns), np.int8)
    ids, tiles = (
        unpacked(data["ids"]).cumsum(),
        unpacked(data["tiles"], "u1").reshape(-1, max(1, -(-tile_m * tile_n // 8))),
    )
    number = 0
    for kind, lists in data["lists"].items():
        counts, first, lengths = (unpacked(lists[name]).cumsum() for name in ("counts", "first", "lengths"))
        for i, (x, n) in enumerate(zip(first, lengths, strict=True)):
            row = int(np.searchsorted(counts, i, side="right"))
            for column in range(x, x + n):
                at = found[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
                at[:] = 1 if kind == "full" else -1
                if kind == "partial":
                    if number < len(ids):
                        bits = np.unpackbits(tiles[ids[number]])[: tile_m * tile_n].reshape(tile_m, tile_n)
                        at[:tile_m, :tile_n] = bits
                    number += 1
    return found[:M, :N]


MASKS: dict[str, Any] = {
    "table": lambda: create(table_mask(2), 3, 2, 70, 61, BLOCK_SIZE=(16, 8)),
    "odd blocks": lambda: create(table_mask(3), 3, 2, 70, 70, BLOCK_SIZE=(23, 7)),
    "causal": lambda: create(mods.causal, 3, 2, 90, 50, BLOCK_SIZE=16),
    "one block": lambda: create(mods.causal, 3, 2, 9, 20, BLOCK_SIZE=512),
    "a part": lambda: create(table_mask(2), 3, 2, 70, 70, BLOCK_SIZE=16)[:, :, 1:3],
    "a query": lambda: create(mods.sliding_window(20), 3, 2, 1, 300, BLOCK_SIZE=16),
    "by hand": lambda: BlockMask.from_blocks(torch.eye(4, dtype=torch.bool).expand(3, 2, 4, 4), None, (50, 60), 16),
}


@pytest.mark.parametrize("name", list(MASKS))
@pytest.mark.parametrize("at", [(0, 0), (2, 1)])
def test_the_page_has_all_pairs(name: str, at: tuple[int, int], tmp_path: Path) -> None:
    mask = MASKS[name]()
    mask.html(tmp_path / "mask.html", *at)
    data = data_of(tmp_path / "mask.html")
    assert np.array_equal(pairs_of(data), live_pairs(mask)[at].numpy())
    assert data["head"] == list(at) and repr(mask).splitlines()[0] in data["summary"]
    partial = int((mask._rows_at(*at)[0].count()).sum())
    assert data["note"] == f"This page has the pairs of {partial:,} of {partial:,} partial blocks."


@pytest.mark.parametrize("lengths", [(0, 9), (9, 0)])
def test_masks_of_nothing(lengths: tuple[int, int], tmp_path: Path) -> None:
    create(mods.causal, None, None, *lengths).html(tmp_path / "mask.html")
    assert pairs_of(data_of(tmp_path / "mask.html")).shape == lengths


def test_equal_blocks_share_their_bits(tmp_path: Path) -> None:
    create(mods.causal, None, None, 2**16, 2**16).html(tmp_path / "mask.html")
    data = data_of(tmp_path / "mask.html")
    assert len(unpacked(data["tiles"], "u1")) == 128 * 128 // 8 and len(unpacked(data["ids"])) == 512


def test_a_million_tokens_take_little_space(tmp_path: Path) -> None:
    documents = torch.randint(400, (2**20,), generator=torch.Generator().manual_seed(0)).sort().values
    mask = create(mods.document_causal(documents), None, None, 2**20, 2**20)
    mask.html(tmp_path / "mask.html", max_pairs=2**24)
    assert (tmp_path / "mask.html").stat().st_size < 100_000
    note = data_of(tmp_path / "mask.html")["note"]
    assert note.startswith("This page has the pairs of 1,024 of ")
    assert note.endswith(" partial blocks. At most 16,777,216 pairs are evaluated (max_pairs).")


@pytest.mark.parametrize(
    ("name", "limit", "text"),
    [
        ("_MOST_BYTES", 100, "The bits of different partial blocks take at most 100 bytes."),
        ("_MOST_PER_BLOCK", 100, "Blocks of more than 100 pairs have none."),
    ],
)
def test_limits_of_bits(name: str, limit: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, name, limit)
    mask = MASKS["table"]()
    mask.html(tmp_path / "mask.html", 1, 1)
    data = data_of(tmp_path / "mask.html")
    assert text in data["note"]
    found, expected = pairs_of(data), live_pairs(mask)[1, 1].numpy()
    assert np.array_equal(found[found >= 0], expected[found >= 0]) and (found < 0).any()


@pytest.mark.parametrize("cells", [1, 2**20])
def test_many_runs_are_joined(cells: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_MOST_RUNS", 30)
    monkeypatch.setattr(page, "_CELLS", cells)
    mask = create(mods.sliding_window(25), 3, 2, 70, 61, BLOCK_SIZE=2)
    mask.html(tmp_path / "mask.html", 2, 1)
    data = data_of(tmp_path / "mask.html")
    size = data["block"][0] // 2
    assert size in (2, 4) and f"It joins {size} x {size} blocks into one" in data["note"]
    found, expected = pairs_of(data), live_pairs(mask)[2, 1].numpy()
    assert np.array_equal(found[found >= 0], expected[found >= 0])
    assert np.unique(found).tolist() == [-1, 0, 1]


@pytest.mark.parametrize("most_runs", [1, 2**20])
def test_masks_of_another_device(most_runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page and the pictures are those of the same mask on the CPU."""
    monkeypatch.setattr(page, "_MOST_RUNS", most_runs * 10)
    mask = create(mods.sliding_window(25), None, None, 70, 61, BLOCK_SIZE=8)
    place = ((70, 61), (8, 8))

    def drawn(mask: BlockMask) -> tuple[str, str, list[int]]:
        rows = mask._rows_at(0, 0)
        image, _ = plot.image_of_pairs(bind(mask), (0, 0), *rows, *place, (9, 9))
        text = page.html(bind(mask), (0, 0), *rows, *place, "summary", 2**20)
        return text, svg.html(*rows, 8, "summary", ""), image.flatten().tolist()

    expected = drawn(mask)
    with elsewhere():
        assert drawn(lists_moved(mask, there)) == expected


def test_names_are_text(tmp_path: Path) -> None:
    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    mask_mod.__name__ = "</script><script>alert(1)</script>"
    create(mask_mod, None, None, 9, 9).html(tmp_path / "mask.html")
    assert mask_mod.__name__ in data_of(tmp_path / "mask.html")["summary"]
    assert "alert(1)</script>" not in (tmp_path / "mask.html").read_text()


def test_the_page_needs_no_network() -> None:
    text = page._TEMPLATE.read_text()
    assert "http" not in text.replace("http-equiv", "") and "import(" not in text and "fetch(" not in text


def test_errors(tmp_path: Path) -> None:
    limits = torch.tensor([5, 6])
    mask = create(mods.padding(limits), 2, None, 8, 8)
    for max_pairs in (-1, 1.0, True):
        with pytest.raises(ArgumentError, match="max_pairs: found"):
            mask.html(tmp_path / "mask.html", max_pairs=max_pairs)  # type: ignore[arg-type]
    with pytest.raises(IndexRangeError, match="b: found 2"):
        mask.html(tmp_path / "mask.html", 2)
    with pytest.raises(OSError):
        mask.html(tmp_path / "none" / "mask.html")
    limits += 1
    with pytest.raises(MutationError):
        mask.html(tmp_path / "mask.html")
    assert not list(tmp_path.iterdir())


# In Chromium. A script at the end of the page waits until it is drawn, and writes what it finds into the page.

_FRAMES = """<head>
<script>window.requestAnimationFrame = (f) => setTimeout(f, 16);</script>"""  # with --dump-dom none is painted
_WATCH = """
<script>
const frames = (n) => new Promise((done) => (n ? requestAnimationFrame(() => frames(n - 1).then(done)) : done()));
async function watch() {
  while (!("ready" in document.documentElement.dataset)) await new Promise((done) => setTimeout(done, 10));
  await frames(3);
  const answer = await (async () => { BODY })();
  parent.postMessage(JSON.stringify(answer), "*");
}
watch();
</script>
</body>"""


# A frame may be as narrow as a phone. A window may not.
_HOST = """<!doctype html>
<body style="margin: 0">
<iframe src="SOURCE" style="border: 0; width: Wpx; height: Hpx"></iframe>
<script>addEventListener("message", ({ data }) => {
  const answer = document.createElement("pre");
  answer.id = "answer";
  answer.textContent = data;
  document.body.append(answer);
});</script></body>"""


def in_chromium(path: Path, body: str, size: tuple[int, int] = (1280, 800), address: str = "") -> Any:
    """Run JavaScript in the page, and return what it returns."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    watched = path.with_name("watched.html")
    text = path.read_text(encoding="utf-8").replace("<head>", _FRAMES, 1)
    watched.write_text(text.replace("</body>", _WATCH.replace("BODY", body)), encoding="utf-8")
    host = path.with_name("host.html")
    values = {"SOURCE": f"{watched.as_uri()}{address}", "Wpx": f"{size[0]}px", "Hpx": f"{size[1]}px"}
    host.write_text(re.sub("|".join(values), lambda found: values[found[0]], _HOST))
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={path.with_name('profile')}", "--window-size=1400,900", "--virtual-time-budget=20000",
        "--dump-dom", host.as_uri(),
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    found = re.findall(r'<pre id="answer">(.*?)</pre>', run.stdout, re.DOTALL)
    assert found, f"{run.stdout[-2000:]}\n{run.stderr[-2000:]}"
    return json.loads(found[0].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.mark.parametrize("name", ["table", "odd blocks"])
def test_chromium_reads_and_draws_each_pair(name: str, tmp_path: Path) -> None:
    mask = MASKS[name]()
    mask.html(tmp_path / "mask.html", 2, 1)
    # The color in the middle of each pair that is drawn, and what the page says about it.
    pairs, colours, box = in_chromium(
        tmp_path / "mask.html",
        """
        const pairs = [], colours = [];
        for (let q = 0; q < M; q++) for (let k = 0; k < N; k++) {
          const [kind, attends] = pair(q, k);
          pairs.push(attends);
          const x = box.left + (k + 0.5 - box.k) * box.x, y = box.top + (q + 0.5 - box.q) * box.y;
          colours.push([...paint.getImageData(Math.floor(x), Math.floor(y), 1, 1).data].slice(0, 3));
        }
        return [pairs, colours, box];
        """,
    )
    expected = live_pairs(mask)[2, 1]
    assert torch.equal(torch.tensor(pairs).view(expected.shape), expected)
    assert min(box["x"], box["y"]) > 5 and (box["q"], box["k"]) == (0, 0)
    rows, columns = mask.BLOCK_SIZE
    partial, full = (x[2, 1].repeat_interleave(rows, 0).repeat_interleave(columns, 1) for x in mask._blocks())
    kinds = (full * 3 + partial)[: expected.shape[0], : expected.shape[1]] + (
        partial[: expected.shape[0], : expected.shape[1]] & expected
    )
    palette = torch.tensor([[255, 255, 255], [251, 231, 195], [230, 159, 0], [0, 114, 178]])
    assert (torch.tensor(colours).view(*expected.shape, 3) - palette[kinds.long()]).abs().max() <= 2


_LAYOUT = """
const parts = [...document.querySelectorAll("h1, button, input, label, canvas, #legend li, #place, #note")];
const rect = (e) => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
const boxes = ["header", "main", "footer"].map((name) => rect(document.querySelector(name)));
return { width: innerWidth, height: innerHeight, scroll: document.documentElement.scrollWidth, boxes,
  parts: parts.map((e) => [e.id || e.tagName, ...rect(e)]), box, place: el("place").textContent };
"""


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_nothing_is_clipped_or_overlaps(size: tuple[int, int], tmp_path: Path) -> None:
    documents = torch.arange(2**20) // 3000
    mask = create(mods.document_causal(documents), None, None, 2**20, 2**20)
    mask.html(tmp_path / "mask.html", max_pairs=2**20)
    found = in_chromium(tmp_path / "mask.html", _LAYOUT, size)
    assert found["width"] == size[0] and found["scroll"] <= size[0]
    header, main, footer = found["boxes"]
    assert header[3] <= main[1] and main[3] <= footer[1] and footer[3] <= found["height"] + 0.5
    assert main[3] - main[1] > 300
    for name, left, top, right, bottom in found["parts"]:
        assert left >= 0 and right <= size[0] and top >= 0 and bottom <= found["height"] + 0.5, name
    assert found["place"].startswith("Drag to move")


def test_zooming_from_blocks_to_pairs(tmp_path: Path) -> None:
    documents = torch.arange(2**20) // 3000
    mask = create(mods.document_causal(documents), None, None, 2**20, 2**20)
    mask.html(tmp_path / "mask.html")
    found = in_chromium(
        tmp_path / "mask.html",
        """
        const steps = [{ ...box }];
        const step = async (act) => { act(); await frames(3); steps.push({ ...box, hash: location.hash }); };
        await step(() => el("in").click());
        await step(() => canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -500, clientX: 640, clientY: 400 })));
        el("q").value = "600,001";
        el("k").value = "600000";
        await step(() => el("go").requestSubmit());
        steps[3].place = el("place").textContent;
        await step(() => el("fit").click());
        return steps;
        """,
        address="#q=1000000&k=1000000&zoom=3",
    )
    first, zoomed, wheel, pair, whole = found
    assert first["k"] < 1_000_000 < first["k"] + first["width"] / first["x"]
    assert zoomed["x"] == pytest.approx(2 * first["x"]) and wheel["x"] == pytest.approx(4 * zoomed["x"])
    assert (pair["x"], pair["y"]) == pytest.approx((24, 24)) and pair["q"] < 600_001 < pair["q"] + pair["height"] / 24
    assert pair["place"] == "query 600,001, key 600,000 attends: partial block (4,687, 4,687)"
    assert re.fullmatch(r"#q=60000\d&k=60000\d&zoom=[\d.]+", pair["hash"])
    assert (whole["q"], whole["k"]) == (0, 0) and whole["width"] == pytest.approx(2**20 * whole["x"])

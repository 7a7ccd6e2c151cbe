"""Folders of checkpoints that are damaged, mixed or malicious: an error that names the file, or the right content."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_cg as fcg
from functional_cg import sharding
from tests.sharding.law import batches, rank_of
from tests.sharding.programs import PROGRAMS, Setting
from tests.sharding.ranks import on_ranks

PROGRAM = "average"
FILES = ("rank-00000.bin", "rank-00001.bin", "index.json")
# What a pickle does that somebody loads.
EXPLODING = b"cos\nsystem\n(S'touch exploded'\ntR."

SCALARS = (
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.text(max_size=3) | st.just("../../outside/secret")
)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=2) | st.dictionaries(st.text(max_size=2), v, max_size=2)
)
WHERE = st.floats(0, 1, exclude_max=True)

EDITS = st.one_of(
    st.tuples(st.just("flip"), st.sampled_from(FILES), WHERE, st.integers(1, 255)),
    st.tuples(st.sampled_from(("cut", "blank")), st.sampled_from(FILES), WHERE),
    st.tuples(st.just("grow"), st.sampled_from(FILES), st.binary(min_size=1, max_size=9)),
    st.tuples(
        st.sampled_from(("delete", "mix", "link", "fifo", "directory", "pickle")), st.sampled_from(FILES)
    ),
    st.tuples(st.just("metadata")),
    st.tuples(st.just("forge"), st.integers(0, 2**16), VALUES),
    st.tuples(st.sampled_from(("link to a checkpoint", "link to a rest", "file for a folder"))),
)


def steps_saved(folder: str, ranks: int) -> dict[int, dict[str, Tensor]]:
    """Train on ranks, save after each of two steps; the whole leaves of both, on rank 0."""
    state = PROGRAMS[PROGRAM].state(Setting({"data": ranks}, 3).zero("cpu"), "cpu")
    step, batch_of = (
        fcg.graph_step(PROGRAMS[PROGRAM].step, lowering="aten"),
        batches(PROGRAM, "cpu", rank_of()),
    )
    kept = {}
    with fcg.checkpoints(folder) as saved:
        for call in range(2):
            state, _ = step(state, batch_of(call))
            saved.save(state)
            kept[call + 1] = dict(sharding.state_dict(state))
    return kept


def places(content: Any) -> list[tuple[Any, Any]]:
    """All values in JSON, as containers and keys."""
    pairs = content.items() if isinstance(content, dict) else enumerate(content)
    found = []
    for key, value in list(pairs):
        found.append((content, key))
        if isinstance(value, (dict, list)):
            found += places(value)
    return found


def forge(path: Path, number: int, value: Any) -> None:
    """Change a value of an index, and its checksum: by somebody who knows the format."""
    content = json.loads(path.read_text())["content"]
    container, key = (found := places(content))[number % len(found)]
    container[key] = value
    text = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps({"checksum": hashlib.sha256(text).hexdigest()[:32], "content": content}))


def edit(folder: Path, outside: Path, kind: str, *rest: Any) -> None:
    """Do to the second checkpoint in a folder what an accident or an attacker would."""
    first, second = folder / "000001-step-1", folder / "000002-step-2"
    path = second / rest[0] if rest and isinstance(rest[0], str) else second / "index.json"
    there = path.is_file() and not path.is_symlink()
    content = path.read_bytes() if there else b""
    if kind in ("delete", "link", "fifo", "directory"):
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
    if kind == "flip" and content:
        place = int(rest[1] * len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ rest[2]]) + content[place + 1 :])
    elif kind == "cut" and there:
        path.write_bytes(content[: int(rest[1] * len(content))])
    elif kind == "blank" and there:
        path.write_bytes(bytes(len(content)))
    elif kind == "grow" and there:
        path.write_bytes(content + rest[1])
    elif kind == "mix" and there:
        path.write_bytes((first / path.name).read_bytes())
    elif kind == "link":
        path.symlink_to(outside / "secret")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "pickle" and there:
        path.write_bytes(EXPLODING)
    elif kind == "metadata":
        for parent in (folder, second):
            (parent / ".metadata").write_bytes(EXPLODING)
    elif kind == "forge" and there:
        try:
            forge(path, *rest)
        except (ValueError, KeyError, TypeError):
            return  # damaged by an edit before
    elif kind == "link to a checkpoint":
        (folder / "000000-step-0").symlink_to(outside)
        (folder / "000009-step-9").symlink_to(outside)
    elif kind == "link to a rest":
        (folder / ".0123456789abcdef.tmp").symlink_to(outside)
    elif kind == "file for a folder":
        (folder / "000003-step-2").write_bytes(b"")
        (folder / ".0123456789abcdee.tmp").write_bytes(b"")


def seen(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def check(
    source: Path, kept: Mapping[int, Mapping[str, Tensor]], state: Any, edits: list[tuple[Any, ...]]
) -> str:
    """Edit a copy of a folder, load from it and save into it; return what happened."""
    with tempfile.TemporaryDirectory() as top:
        folder, outside = Path(top, "run"), Path(top, "outside")
        shutil.copytree(source, folder)
        outside.mkdir()
        (outside / "secret").write_bytes(b"outside")
        (outside / "index.json").write_bytes((source / "000001-step-1" / "index.json").read_bytes())
        links: Counter[str] = Counter(one[0] for one in edits)
        for one in edits:
            if one[0].startswith(("link to", "file for")) and links[one[0]] > 1:
                links[one[0]] -= 1
                continue
            edit(folder, outside, *one)
        before, saved = seen(outside), fcg.checkpoints(folder, keep=1)
        try:
            state = saved.load(state, step=2)
            found, result = fcg.state_dict(state), "loaded"
        except (OSError, ValueError) as error:
            result = (
                type(error).__name__ if str(folder) in str(error) else f"does not name the file: {error!r}"
            )
        else:
            forged = any(kind == "forge" for kind, *_ in edits)
            whole = [all(found[name].equal(leaf) for name, leaf in kept[step].items()) for step in (1, 2)]
            assert forged or any(whole), "other content"
        assert not result.startswith("does not"), result
        saved.save(state, step=3, wait=True)
        saved.close()
        assert saved.steps() == [3]
        assert seen(outside) == before, "something outside was written"
        assert not list(Path(top).rglob("exploded"))
        assert not Path("exploded").exists()
        return result


def run(number: int, *, ranks: int = 2, **options: Any) -> Counter[str]:
    """Try as many edited folders, which so many ranks have written."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as source:
        kept = on_ranks(ranks, steps_saved, source, ranks)[0] if ranks > 1 else steps_saved(source, 1)
        state = PROGRAMS[PROGRAM].state(None, "cpu")

        @settings(
            max_examples=number,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            **options,
        )
        @given(st.lists(EDITS, min_size=1, max_size=3))
        def law(edits: list[tuple[Any, ...]]) -> None:
            counts[check(Path(source), kept, fcg.fork(state), edits)] += 1

        tried: Callable[[], None] = law
        tried()
    return counts

"""Malformed files given to `dflow-train prepare`: a clear sentence, or a counted reject."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pytest
from conversations import assistant, user
from pyarrow import parquet

from dflow_lightning.__main__ import main
from dflow_lightning.data.prepared import open_prepared, read_manifest

GOOD = {"prompt": "Hi", "answer": "Hello there."}
OTHER = {"prompt": "How?", "answer": "Thank you."}


def lines(*rows) -> bytes:
    return b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows)


def between(*rows) -> bytes:
    """Bad rows among good ones."""
    return lines(GOOD, *rows, OTHER)


def talk(*messages) -> dict:
    return {"messages": [*messages]}


# Files of which nothing can be used, and the sentence.
REFUSED = {
    "empty.jsonl": (b"", "is empty; it needs at least one row"),
    "blank.jsonl": (b"\n  \n\r\n", "is empty; it needs at least one row"),
    "cut.json": (b'[{"prompt": "p", "answer": "a b"}, {"pro', "element 2 of the array is broken"),
    "no_array_end.json": (b'[{"prompt": "p", "answer": "a b"},', "element 2 of the array"),
    "utf16.jsonl": (json.dumps(GOOD).encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
    "latin1.json": (b'[{"prompt": "\xe9"}]', "is not UTF-8 text"),
    "packed.jsonl": (b"\x1f\x8b\x08\x00", "cannot be read (Truncated compressed stream)"),
    "table.csv": (b"prompt,answer\n", "has the suffix '.csv'; give a file named .jsonl"),
    "no.parquet": (lines(GOOD), "is no Parquet file; name it by its format"),
    "damaged.parquet": (b"PAR1" + b"x" * 40 + b"PAR1", "is a damaged Parquet file"),
    "whole_array.jsonl": (lines([GOOD, OTHER]), "1 of 1 rows"),
    "all_of_another_shape.jsonl": (lines({"text": "p"}, {"text": "q"}), "'unknown shape'"),
}
# Rows that are left out, each for its reason; the file's other two rows are used.
REJECTED = {
    "truncated line": (b'{"prompt": "p", "ans', "not JSON"),
    "line of 50 MB": (b'{"prompt": "' + b"x" * 50_000_000 + b'"}', "too long"),
    "mixed types": (b"[1, 2]", "not an object"),
    "null content": (talk(user("p"), assistant(None)), "no content"),
    "missing role": (talk({"content": "p"}, assistant("a b")), "no role"),
    "wrong order of roles": (talk(assistant("a b"), user("p")), "order of roles"),
    "invalid UTF-8": (b'{"prompt": "\xff\xfe", "answer": "a b"}', "not UTF-8"),
    "numeric answer": ({"prompt": "p", "answer": 5}, "not text"),
    "empty answer": ({"prompt": "p", "answer": " "}, "empty answer"),
    "empty conversation": (talk(), "no messages"),
    "control characters": ({"prompt": "p\x00", "answer": "a b"}, "control characters"),
    "image": (talk(user([{"type": "image_url"}]), assistant("a b")), "not text"),
    "no answer": ({"prompt": "p"}, "no answer"),
    "duplicate": (GOOD, "duplicate"),
    "two shapes": (GOOD | talk(user("x"), assistant("y z")), "several shapes"),
}


@pytest.fixture
def prepare(tmp_path, capsys, tokenizer_dir):
    """Keep the answers of a file; exit status and standard error."""

    def run(path, *options):
        command = ["prepare", "--data", str(path), "--target", str(tokenizer_dir)]
        command += ["--out", str(tmp_path / "out"), "--keep_answers", *options]
        status = main(command)
        return status, capsys.readouterr().err

    return run


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_cannot_be_used(prepare, tmp_path, name):
    content, sentence = REFUSED[name]
    path = tmp_path / name
    path.write_bytes(content)
    status, err = prepare(path)
    assert status == 2
    assert err.startswith("error: data: ")
    assert sentence in err
    assert str(path) in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("name", REJECTED)
def test_rows_that_cannot_be_used(prepare, tmp_path, name):
    row, reason = REJECTED[name]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(between(row))
    if reason != "duplicate":  # which is no mistake
        status, err = prepare(path)
        assert status == 2
        assert f"1 of 3 rows of {path} are rejected" in err
        assert repr(reason) in err
    status, err = prepare(path, "--max_reject_share", "0.4")
    assert status == 0, err
    (listed,) = map(json.loads, (tmp_path / "out/rejects.jsonl").read_text().splitlines())
    assert (listed["line"], listed["reason"]) == (2, reason)
    counts = read_manifest(tmp_path / "out")["counts"]
    assert counts["source_rows"] == 3
    assert counts["rejects"] == {reason: 1}
    assert open_prepared(tmp_path / "out")["id"] == ["rows.jsonl:1", "rows.jsonl:3"]


def test_duplicate_ids(prepare, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(GOOD | {"id": 1}, OTHER | {"id": "1"}))
    assert prepare(path, "--max_reject_share", "0.5")[0] == 0
    assert read_manifest(tmp_path / "out")["counts"]["rejects"] == {"duplicate id": 1}


def test_marks_and_line_ends_of_windows_are_no_mistake(prepare, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + between(b"").replace(b"\n", b"\r\n"))
    assert prepare(path)[0] == 0
    assert open_prepared(tmp_path / "out")["id"] == ["rows.jsonl:1", "rows.jsonl:3"]


def test_parquet_with_nested_columns(prepare, tmp_path):
    path = tmp_path / "rows.parquet"
    rows = [talk(user("p"), assistant("a b")), talk(user("q"), assistant("c d")), talk(user(None))]
    parquet.write_table(pa.Table.from_pylist(rows), path)
    assert prepare(path, "--max_reject_share", "0.4")[0] == 0
    assert read_manifest(tmp_path / "out")["counts"]["rejects"] == {"no content": 1}


def test_what_is_no_file(prepare, tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder").mkdir()
    for path, sentence in {
        tmp_path / "folder": "is a directory; give one file in it",
        tmp_path / "nowhere.jsonl": "does not exist; give a JSONL, JSON or Parquet file",
        tmp_path / "pipe.jsonl": "is not a regular file; save the rows to one",
    }.items():
        status, err = prepare(path)
        assert (status, err) == (2, f"error: data: {path} {sentence}\n")


def test_a_file_that_may_not_be_read(prepare, tmp_path, monkeypatch):
    """The error is made here, since root may read everything."""
    path, really_open = tmp_path / "rows.jsonl", Path.open
    path.write_bytes(between())

    def refuse(self, mode="r", *args, **options):
        if self == path:
            raise PermissionError(13, "Permission denied")
        return really_open(self, mode, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    status, err = prepare(path)
    assert status == 2
    assert f"{path} cannot be read (Permission denied); give a readable file" in err


def test_a_folder_that_may_not_be_written(prepare, tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(between())
    monkeypatch.setattr(os, "access", lambda *_: False)
    status, err = prepare(path)
    assert status == 2
    assert err.startswith("error: out: ")
    assert "not a writable folder" in err

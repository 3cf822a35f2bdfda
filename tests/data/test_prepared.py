"""The prepared folder: what is written is what is read, and damage is said."""

import json

import pytest

from dflow_lightning.data.prepared import (
    PreparedRow,
    PreparedWriter,
    check_unchanged,
    count_shared,
    finish,
    is_prepared,
    open_prepared,
)
from dflow_lightning.errors import InputError


def row(number: int) -> PreparedRow:
    ids = list(range(number, number + 3 + number % 4))
    mask = [False, *[True] * (len(ids) - 1)]
    return PreparedRow(f"row-{number}", "chat", ids, mask, number % 2 == 0, number - 2**62)


def save(folder, rows, rows_per_file=4):
    folder.mkdir()
    writer = PreparedWriter(folder, rows_per_file)
    for one in rows:
        writer.write(one)
    finish(folder, {"target": "t"}, writer.close())
    return folder


def test_rows_come_back_in_order_over_several_files(tmp_path):
    rows = [row(n) for n in range(10)]
    folder = save(tmp_path / "set", rows)
    assert is_prepared(folder)
    assert [path.name for path in sorted(folder.glob("*.arrow"))] == [
        f"data-0000{n}.arrow" for n in range(3)
    ]
    found = open_prepared(folder)
    assert [PreparedRow(**found[i]) for i in range(len(found))] == rows
    check_unchanged(folder)


def test_bytes_depend_on_the_rows_alone(tmp_path):
    a, b = (save(tmp_path / name, [row(n) for n in range(6)]) for name in "ab")
    for path in a.iterdir():
        assert path.read_bytes() == (b / path.name).read_bytes()


def test_a_set_without_rows(tmp_path):
    assert len(open_prepared(save(tmp_path / "none", []))) == 0


def test_shared_prompts_are_counted(tmp_path):
    a = save(tmp_path / "a", [row(n) for n in range(6)])
    b = save(tmp_path / "b", [row(n) for n in (9, 5, 4, 11)])
    assert count_shared(a, b) == 2
    assert count_shared(b, a) == 2


def damage(folder, change) -> str:
    change(folder)
    with pytest.raises(InputError) as error:
        open_prepared(folder)
    return str(error.value)


def edit(**values):
    def change(folder):
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda f: (f / "manifest.json").unlink(), "holds no manifest.json"),
        (lambda f: (f / "manifest.json").write_text("{"), "manifest.json is damaged"),
        (edit(format=9), "is of format 9 and this version reads 1"),
        (edit(files=[{"name": 1}]), "manifest.json is damaged"),
        (lambda f: (f / "data-00001.arrow").unlink(), "data-00001.arrow has no bytes instead of"),
        (lambda f: (f / "data-00001.arrow").write_bytes(b"x"), "data-00001.arrow has 1 bytes"),
    ],
)
def test_damage_is_said(tmp_path, change, sentence):
    folder = save(tmp_path / "set", [row(n) for n in range(6)])
    assert sentence in damage(folder, change)


def test_a_changed_byte_has_another_checksum(tmp_path):
    folder = save(tmp_path / "set", [row(n) for n in range(6)])
    path = folder / "data-00000.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"the checksum of .*data-00000\.arrow"):
        check_unchanged(folder)

"""Files are written at once or not at all, through links and devices, and wrong paths are found before the work."""

import errno
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from pols_jax import files
from pols_jax.errors import ConfigError, FileError
from pols_jax.files import (
    check_directory,
    check_space,
    check_writable,
    make_directory,
    read_bytes,
    write_arrays,
    write_bytes,
    write_json,
    write_text,
)


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_text("")
    write_text(tmp_path / "ours", "text")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert (tmp_path / "ours").read_text() == "text"
    assert len(list(tmp_path.iterdir())) == 2


def test_the_permissions_of_a_file_stay(tmp_path):
    path = tmp_path / "table.md"
    path.write_text("old")
    path.chmod(0o640)
    write_text(path, "new")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o640)


def test_a_link_stays_and_its_target_is_replaced_at_once(tmp_path):
    (tmp_path / "far").mkdir()
    target, link, chain = tmp_path / "far" / "target", tmp_path / "link", tmp_path / "chain"
    target.write_text("old")
    link.symlink_to("far/target")
    chain.symlink_to("link")
    before = target.stat().st_ino
    write_text(chain, "new")
    assert chain.is_symlink()
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert target.stat().st_ino != before, "replaced, not overwritten"
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["target"]


def test_a_dangling_link_gets_its_target(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    check_writable(tmp_path / "link")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "target").read_text() == "new"


def test_a_loop_of_links_is_an_error_and_not_a_hang(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match="Too many levels of symbolic links"):
        check_writable(tmp_path / "a")
    with pytest.raises(FileError, match="Too many levels of symbolic links"):
        write_text(tmp_path / "a", "text")


def test_a_device_is_written_to_and_never_replaced(tmp_path):
    check_writable(Path(os.devnull))
    write_json(os.devnull, {"a": 1})
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    (tmp_path / "link").symlink_to(os.devnull)
    write_json(tmp_path / "link", {"a": 1})
    assert (tmp_path / "link").is_symlink()
    if os.getuid() == 0 and Path("/dev").stat().st_dev != tmp_path.stat().st_dev:
        own = tmp_path / "null"
        try:
            os.mknod(own, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        except PermissionError:
            return
        write_json(own, {"a": 1})
        assert stat.S_ISCHR(own.stat().st_mode)


def test_a_pipe_gets_what_is_written(tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_bytes(pipe, b"through")
    reader.join(timeout=10)
    assert got == [b"through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("place", ["/dev/stdout", "/proc/self/fd/1", "/dev/fd/1", "link"])
def test_standard_output_that_goes_to_a_file_has_everything_in_order(tmp_path, place):
    if place == "link":
        (tmp_path / "link").symlink_to("/dev/stdout")
        place = tmp_path / "link"
    program = (
        "import sys; sys.path.insert(0, '.'); from pols_jax.files import check_writable, write_text\n"
        f"check_writable({str(place)!r}); print('before'); write_text({str(place)!r}, 'written\\n'); print('after')"
    )
    with (tmp_path / "out").open("w") as out:
        root = Path(__file__).parents[1]
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True, cwd=root, timeout=120)
    assert (tmp_path / "out").read_text() == "before\nwritten\nafter\n"


@pytest.mark.parametrize("old", [None, "old"])
@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch, old, where):
    path = tmp_path / "record.json"
    if old is not None:
        path.write_text(old)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, where, full)
    with pytest.raises(
        FileError, match=r"record\.json could not be written \(No space left on device\)"
    ) as raised:
        write_json(path, {"new": 1})
    assert raised.value.exit_code == 1
    assert "intact" not in str(raised.value)
    assert [p.read_text() for p in tmp_path.iterdir()] == ([] if old is None else [old])


def test_a_file_that_cannot_be_replaced_but_can_be_written_is_overwritten(tmp_path, monkeypatch):
    """As a single file that a container mounts."""
    path = tmp_path / "record.json"
    path.write_text("old")

    def mounted(*_):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(files.os, "replace", mounted)
    write_text(path, "new")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["new"]


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path):
    path = tmp_path / "record.json"
    contents = [json.dumps({"text": letter * 200_000}) for letter in "ab"]
    write_text(path, contents[0])
    done = threading.Event()

    def write():
        for i in range(30):
            write_text(path, contents[i % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(path.read_text())
    writer.join()
    assert seen <= set(contents)


def test_numbers_and_names_that_json_does_not_have_are_written_so_that_it_can_be_read(tmp_path):
    write_json(tmp_path / "a.json", {"x": [float("nan"), 1.5, float("-inf")], "name": "caf\u00e9 \udcff"})
    assert json.loads((tmp_path / "a.json").read_bytes()) == {
        "x": [None, 1.5, None],
        "name": "caf\u00e9 \udcff",
    }
    write_text(tmp_path / "a.csv", "caf\u00e9 \udcff")
    assert (tmp_path / "a.csv").read_text(encoding="utf-8") == "caf\u00e9 \\udcff"


def test_arrays_come_back(tmp_path):
    write_arrays(tmp_path / "a.npz", {"a": np.arange(5), "b": np.array("text")})
    with np.load(tmp_path / "a.npz") as arrays:
        assert arrays["a"].tolist() == [0, 1, 2, 3, 4]
        assert str(arrays["b"]) == "text"


def test_nothing_is_written_where_nothing_is_wanted():
    for write in (write_text, write_json, write_bytes):
        write(None, "")
    check_writable(None)
    check_directory(None)
    make_directory(None)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no/such/table.md", "no/such is not a directory"),
        (".", "it is a directory"),
        ("file/table.md", "file is not a directory"),
        ("x" * 300, "File name too long"),
        ("nul\0byte", "embedded null"),
        ("dangling", "is not a directory"),
    ],
)
def test_a_path_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, path, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone" / "table.md")
    with pytest.raises(ConfigError, match=f"cannot be written: .*{why}"):
        check_writable(Path(path))
    with pytest.raises(FileError, match="could not be written"):
        write_text(path, "text")


def test_permissions_are_looked_at_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "read_only.md").write_text("old")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "read_only" not in str(path) and access(path, mode))
    with pytest.raises(ConfigError, match="permission denied"):
        check_writable(tmp_path / "read_only.md")
    with pytest.raises(FileError, match="Permission denied"):
        write_text(tmp_path / "read_only.md", "new")
    assert (tmp_path / "read_only.md").read_text() == "old"


class Disk:
    """What statvfs says."""

    f_blocks, f_bavail, f_frsize, f_flag = 1000, 0, 4096, 0


@pytest.mark.parametrize(
    ("changes", "why"), [({}, "the disk is full"), ({"f_flag": os.ST_RDONLY}, "the file system is read-only")]
)
def test_full_and_read_only_disks_are_found_before_the_work(tmp_path, monkeypatch, changes, why):
    disk = type("Disk", (Disk,), changes)
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    with pytest.raises(ConfigError, match=why):
        check_writable(tmp_path / "table.md")
    with pytest.raises(ConfigError, match=why):
        check_directory(tmp_path / "new" / "figures")
    with pytest.raises(ConfigError, match=r"needs 5\.0 kB, and its disk has 0 bytes left; free some space"):
        check_space(tmp_path / "run", 5000)


def test_checking_a_directory_creates_nothing(tmp_path):
    check_directory(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    for wrong in ("file", "file/below", "dangling/below"):
        with pytest.raises(ConfigError, match="is not a directory"):
            make_directory(tmp_path / wrong)


@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "missing"])
def test_only_regular_files_are_read_and_nothing_waits(tmp_path, kind):
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="No such file" if kind == "missing" else "not a regular file"):
        read_bytes(path)

"""Step directories: which one a run goes on from, and that no kill leaves half of one for ever."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from megarlhf.checkpoint import checksums, steps
from megarlhf.config import UserError

FILES = 20


def write(path, content: str, count: int = FILES):
    path.mkdir(parents=True)
    for i in range(count):
        (path / f"file{i}").write_text(content)
    (path / "state.json").write_text('{"step": 1}')
    return checksums.write(path, {})


def save(directory, step: int, content: str = "") -> None:
    final = steps.path_of(directory, step)
    partial = final.with_name(final.name + steps.PARTIAL)
    own = write(partial, content or str(step))
    steps.publish(partial, final, own)


def test_where_a_run_goes_on(tmp_path):
    assert steps.latest(tmp_path / "nothing") is None and steps.latest(tmp_path) is None
    for step in (9, 10):
        save(tmp_path, step)
    (tmp_path / "step_00000011.partial").mkdir()
    (tmp_path / "step_00000012").mkdir()  # no state.json
    assert steps.latest(tmp_path).name == "step_00000010"
    (tmp_path / "latest").write_text("step_00000009")  # by hand
    assert steps.latest(tmp_path).name == "step_00000009"
    (tmp_path / "latest").unlink()
    assert steps.latest(tmp_path).name == "step_00000010"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "names '', which is no step directory"),
        (b"\n\n", "names ''"),
        (b"../../etc", "which is no step directory"),
        (b"\xff\xfe\x00", "cannot be read (not text)"),
        (b"step_00000012\n", "names 'step_00000012', which is not a complete checkpoint"),
        (b"step_00000009\n" + b"0" * 64 + b"\n", "its second line is not the hash in"),
        (None, "cannot be read (Is a directory)"),
    ],
)
def test_damaged_latest(tmp_path, content, expected):
    save(tmp_path, 9)
    (tmp_path / "latest").unlink()
    if content is None:
        (tmp_path / "latest").mkdir()
    else:
        (tmp_path / "latest").write_bytes(content)
    with pytest.raises(UserError) as error:
        steps.latest(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / 'latest'}: ") and expected in str(error.value)


@pytest.mark.parametrize("content", ["", "no JSON", "[]", "{}", '{"step": "3"}', '{"step": true}', "[" * 100_000])
def test_damaged_state(tmp_path, content):
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(UserError, match=r"state.json: missing or damaged \(it .*\); resume from another"):
        steps.read_state(tmp_path)


def killed(work, draw: random.Random, most: float) -> None:
    """`work` in a process of its own, killed within `most` seconds if it takes so long."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(draw.uniform(0, most))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def assert_whole(directory):
    """What has the name of a complete directory is one, and after a sweep there is nothing else."""
    steps.sweep(directory)
    current = steps.latest(directory)
    for path in {*steps.complete(directory), current}:
        assert checksums.damage(path) is None
    names = {path.name for path in directory.iterdir()}
    assert names - {"latest", "latest.partial"} == {path.name for path in {*steps.complete(directory), current}}
    return current


def test_kills_while_removing_and_replacing(tmp_path):
    """Whatever moment a kill comes at: at least one whole directory, of one content, and nothing left but whole ones.
    Steps go up and come again, as in a run that somebody went back with; the newest two are kept."""
    draw = random.Random(3)
    save(tmp_path, 3, "first")
    done = 0
    for attempt in range(40):

        def work(attempt=attempt):
            for step in (3, 4, 5, 3):
                save(tmp_path, step, f"attempt {attempt}")
                steps.retire(steps.path_of(tmp_path, step), keep=1)

        killed(work, draw, 0.05)
        debris = [path.name for path in tmp_path.iterdir() if "." in path.name]
        done += bool(debris)
        current = assert_whole(tmp_path)
        assert current is not None
        assert len({(current / f"file{i}").read_text() for i in range(FILES)}) == 1
    assert done > 5  # kills did come in the middle


def test_a_directory_half_removed_is_not_taken_for_a_whole_one(tmp_path):
    draw = random.Random(4)
    for step in range(1, 12):
        write(steps.path_of(tmp_path, step), str(step), count=300)
    write(steps.path_of(tmp_path, 12), "12", count=2)
    while len(steps.complete(tmp_path)) > 1:
        killed(lambda: steps.retire(steps.path_of(tmp_path, 12), keep=1), draw, 0.02)
        for path in steps.complete(tmp_path):
            assert checksums.damage(path, small=True) is None
    steps.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000012"]


def test_checksums_are_of_every_byte(tmp_path):
    """Of checksums.json too, wherever it stands."""
    write(tmp_path / "step", "content", count=2)
    path = tmp_path / "step" / "checksums.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        for flip in (1, 32, 128):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
            assert str(path) in checksums.damage(tmp_path / "step"), (place, flip)
    path.write_bytes(whole)
    assert checksums.damage(tmp_path / "step") is None
    (tmp_path / "step" / "file1").unlink()
    assert f"{tmp_path / 'step' / 'file1'}: is missing" in checksums.damage(tmp_path / "step")

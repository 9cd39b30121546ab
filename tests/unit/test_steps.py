"""Step directories: which one a run goes on from, and that no kill leaves half of one for ever."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys

import pytest

from megarlhf.checkpoint import checksums, steps
from megarlhf.config import UserError

FILES = 2


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


def killed(work, moment: int, modules=(steps,)) -> bool:
    """`work` in a process of its own, which is killed before the `moment`-th line of `modules` that it runs; whether it
    had ended before."""
    files = {module.__file__ for module in modules}
    pid = os.fork()
    if pid == 0:
        left = moment

        def trace(frame, event, _):
            nonlocal left
            if frame.f_code.co_filename not in files:
                return None
            left -= event == "line"
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL)
    return status == 0


def assert_whole(directory):
    """What has the name of a complete directory is one, and after a sweep there is nothing else."""
    steps.sweep(directory)
    current = steps.latest(directory)
    for path in {*steps.complete(directory), current}:
        assert checksums.damage(path) is None
    names = {path.name for path in directory.iterdir()}
    assert names - {"latest", "latest.partial"} == {path.name for path in {*steps.complete(directory), current}}
    return current


def test_a_kill_while_a_step_is_replaced(tmp_path):
    """Whatever moment it comes at, a whole directory is there to go on from, of one content, even where the step that
    is saved again is the only one; and the next save succeeds."""
    before = tmp_path / "before"
    save(before, 3, "old")
    own = write(before / "step_00000003.partial", "new")
    seen = set()
    for moment in itertools.count(1):
        directory = shutil.copytree(before, tmp_path / str(moment))
        final = steps.path_of(directory, 3)
        ended = killed(
            lambda directory=directory, final=final: steps.publish(directory / "step_00000003.partial", final, own),
            moment,
        )
        current = assert_whole(directory)
        contents = {(current / f"file{i}").read_text() for i in range(FILES)}
        assert contents in ({"old"}, {"new"})
        seen |= contents
        if ended:
            break
        save(directory, 3, "newer")
        assert assert_whole(directory) == final and (final / "file0").read_text() == "newer"
    assert seen == {"old", "new"} and moment > 15


def test_a_step_that_was_put_aside_gets_its_name_back(tmp_path):
    """A kill came just before the new one got the name; and just after, then the old one goes."""
    for step in (3, 4):
        save(tmp_path, step, "old")
        os.replace(steps.path_of(tmp_path, step), tmp_path / f"step_{step:08d}.replaced")
    save(tmp_path, 3, "new")
    save(tmp_path / "else", 3, "old")
    os.replace(tmp_path / "else" / "step_00000003", tmp_path / "step_00000003.replaced")
    steps.sweep(tmp_path)
    assert [(path.name, (path / "file0").read_text()) for path in steps.complete(tmp_path)] == [
        ("step_00000003", "new"),
        ("step_00000004", "old"),
    ]
    assert not list(tmp_path.glob("*.*"))


def test_a_kill_while_steps_are_removed(tmp_path):
    """No directory that is half removed is taken for a whole one, or stays."""
    before = tmp_path / "before"
    for step in (1, 2, 3):
        save(before, step)
    for moment in itertools.count(1, 5):
        directory = shutil.copytree(before, tmp_path / str(moment))
        newest = steps.path_of(directory, 3)
        ended = killed(lambda newest=newest: steps.retire(newest, keep=1), moment, (steps, shutil))
        assert assert_whole(directory) == newest
        if ended:
            assert steps.complete(directory) == [newest]
            break
    assert moment > 50


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

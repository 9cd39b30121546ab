"""The sandbox of `verify: code`: correct programs pass, and whatever a program does instead of being correct fails,
changes nothing on the host and leaves no process."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megarlhf.config import UserError
from megarlhf.experience import sandbox
from megarlhf.experience.sandbox import SandboxConfig, judge
from tests.ranks import ROOT
from tests.scoring import no_namespaces

LIMITS = SandboxConfig(seconds=60.0, processes=4)
QUICK = SandboxConfig(seconds=1.0, processes=4)  # for what fails in any case
SLEEP = "98765.4321"  # the argument of `sleep` by which a process that was left is found


REASON = no_namespaces()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def left(but: int = 0) -> list[str]:
    """Processes of the sandbox that this checkout started, and what they started; without those of another process of
    pytest (`-n 2`)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in (os.getpid(), but) and not is_anothers(int(entry.name)):
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if SLEEP in line or (sandbox.START in line and str(ROOT) in line):
                found.append(f"{entry.name}: {line}")
    return found


def stays(seconds: float = 20.0) -> list[str]:
    """What is left after `seconds`: a machine that halted for a while may still have to remove what was killed."""
    until = time.monotonic() + seconds
    while left() and time.monotonic() < until:
        time.sleep(0.1)
    return left()


def is_anothers(process: int) -> bool:
    """Whether another process of pytest has started it and still runs."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return False
    above = set()
    while process > 1:
        try:
            status = (Path("/proc") / str(process) / "stat").read_text()
        except OSError:
            return False
        process = int(status.rpartition(")")[2].split()[1])  # its parent
        above.add(process)
    return os.getppid() in above and os.getpid() not in above


def verdicts(programs: dict[str, str], tests: list[str], limits: SandboxConfig) -> dict[str, bool]:
    return dict(zip(programs, judge([(code, tests) for code in programs.values()], limits), strict=True))


CORRECT = {
    "plain": ("def f(x): return x + 1", ["assert f(1) == 2", "assert f(-1) == 0\nassert f(2**70) == 2**70 + 1"]),
    "data": (
        "def f(x): return x",
        [
            "for x in (None, True, 1.5, float('inf'), 'é\\ud800', b'\\0', 2j, [1, (2, 3)], {'a': [1]}, {(1, 2): {3}},"
            " frozenset([1])):\n    y = f(x)\n    assert y == x and type(y) is type(x), x",
            "x = f(float('nan'))\nassert x != x",
            "from math import isclose\nassert isclose(f(0.1) + f(0.2), 0.3)",
        ],
    ),
    "arguments are changed in place": (
        "def f(x, *, by): x.sort(key=by)\ndef g(d): d['a'] = 1",
        ["x = [3, 1, 2]\nassert f(x, by=lambda y: -y) is None and x == [3, 2, 1]",
         "d = {}\ng(d)\nassert d == {'a': 1}"],
    ),
    "a class": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
        "    def __add__(self, o): return P(self.x + o.x)\n    def __len__(self): return self.x\n"
        "    def twice(self): self.x *= 2",
        ["p = P(1) + P(2)\nassert p.x == 3 and p == P(3) and p != P(4) and len(p) == 3 and repr(p) == 'P(x=3)'",
         "p = P(1)\np.twice()\np.x += 1\nassert p.x == 3"],
    ),
    "a generator": ("def f(n): yield from range(n)", ["assert f(3) and list(f(3)) == [0, 1, 2] and sum(f(4)) == 6"]),
    "exceptions": (
        "class E(ValueError): pass\ndef f(x):\n    if x < 0: raise E('negative')\n    return x",
        ["try:\n    f(-1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'negative'"],
    ),
    "functions as arguments": (
        "def twice(g): return lambda x: g(g(x))", ["assert twice(lambda x: x * 3)(2) == 18"],
    ),
    "check(candidate)": ("def f(x): return x", ["def check(candidate):\n    assert candidate(3) == 3", "check(f)"]),
    "a script's ending does not run": ("def f(): return 1\nif __name__ == '__main__': input()", ["assert f() == 1"]),
    "modules of the tests are theirs": ("import math\ndef f(): return 4", ["assert math.sqrt(16) == f()"]),
    "threads and processes within the limit": (
        "import threading, subprocess\ndef f():\n    t = threading.Thread(target=print)\n    t.start()\n    t.join()\n"
        "    return subprocess.run(['echo', 'a'], capture_output=True, text=True).stdout",
        ["assert f() == 'a\\n'"],
    ),
    "files in its own /tmp": (
        "def f():\n    with open('/tmp/a', 'w') as file: file.write('x')\n    return open('a').read()",
        ["assert f() == 'x'"],
    ),
    "all names of NumPy": (
        "from numpy import *\nfrom numpy import sqrt as root\ndef f(x): return root(array(x)), float32(2)",
        ["assert f([4, 9]) == ([2, 3], 2)"],
    ),
    "a class that is a context": (
        "class C:\n    def __enter__(self): return [1]\n    def __exit__(self, *e): self.left = e[0] is not None",
        ["c = C()\nwith c as x: assert x == [1]\nassert not c.left",
         "c = C()\ntry:\n    with c: raise KeyError\nexcept KeyError: assert c.left\nelse: assert False"],
    ),
    "numpy": ("import numpy as np\ndef f(x): return np.sum(x), np.array(x)", ["assert f([1, 2]) == (3, [1, 2])"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRECT)
def test_correct_programs_pass(name):
    code, tests = CORRECT[name]
    assert judge([(code, tests), (code, [*tests, "assert False"])], LIMITS) == [True, False]


WRONG = "import math\ndef f(x): return 0\n"  # 2 and 3 are asked for
FORGED = {
    "wrong": "",
    "an object that looks like 2": "class A:\n    def __len__(s): return 2\n    def __repr__(s): return '2'\n"
    "def f(x): return A()",
    "os._exit": "import os; os._exit(0)",
    "os._exit with the status of success": "import os; os._exit(40)",
    "os._exit in the call": "import os\ndef f(x): os._exit(40)",
    "sys.exit": "import sys; sys.exit(0)",
    "sys.exit in the call": "import sys\ndef f(x): sys.exit(40)",
    "an atexit function": "import atexit, os; atexit.register(lambda: os._exit(40))",
    "prints": "print('PASSED'); print('40'); import sys; sys.stderr.write('PASSED')",
    "AssertionError": "import builtins; builtins.AssertionError = type('E', (), {})",
    "an object equal to everything": "class A:\n    def __eq__(s, o): return True\n    def __bool__(s): return True\n"
    "    def __getattr__(s, n): return s\n    __sub__ = __abs__ = __lt__ = lambda s, *o: True\ndef f(x): return A()",
    "a difference of 0": "class A:\n"
    "    __add__ = __sub__ = __mul__ = __truediv__ = __neg__ = lambda s, *o: 0.0\ndef f(x): return A()",
    "a difference that is a handle": "class A:\n    __sub__ = __neg__ = __abs__ = __round__ = lambda s, *o: s\n"
    "    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __contains__ = __bool__ = lambda s, *o: True\n"
    "    __float__ = __int__ = __index__ = __len__ = lambda s: 0\n    def __iter__(s): return iter(())\n"
    "def f(x): return A()",
    "a context that swallows": "class A:\n    def __enter__(s): return s\n    def __exit__(s, *e): return True\n"
    "def f(x): return A()",
    "a context that raises": "class A:\n    def __enter__(s): return s\n    def __exit__(s, *e): raise KeyError\n"
    "def f(x): return A()",
    "an iteration that ends": "def f(x): raise StopIteration",
    "an int equal to everything": "class A(int):\n    def __eq__(s, o): return True\n    __hash__ = None\n"
    "def f(x): return A(7)",
    "built-in functions": "def abs(x): return 0\ndef all(x): return True\ndef isinstance(*x): return True",
    "the module math": "import sys, types\nm = types.ModuleType('math')\nm.isclose = lambda *a: True\n"
    "sys.modules['math'] = m\nimport math\nopen('/tmp/math.py', 'w').write('isclose = lambda *a: True')",
    "frames": "import sys\nframe = sys._getframe()\nwhile frame:\n"
    "    frame.f_globals.update(PASSED=40, FAILED=40), frame.f_locals.update(status=40)\n    frame = frame.f_back\n"
    "sys.modules['megarlhf.experience.jail'].FAILED = 40",
    "all descriptors": "import os, struct\nfor d in range(64):\n    try: os.write(d, struct.pack('<Q', 4) + b'true')\n"
    "    except OSError: pass",
    "closed descriptors": "import os; os.closerange(0, 64)",
    "a message of 8 EiB": "import os, struct\nfor d in range(3, 64):\n    try: os.write(d, struct.pack('<Q', 2**63))\n"
    "    except OSError: pass\ndef f(x):\n    while True: pass",
    "answers of nonsense": "import sys\nP = sys.modules['megarlhf.experience.apart'].Peer\n"
    "P.answer = lambda self, m: self.send(['value', ['mine', [], {}], None, None])",
    "calls back": "import sys\nP = sys.modules['megarlhf.experience.apart'].Peer\n"
    "P.answer = lambda self, m: self.send(['do', 'getattr', ['t', ['yours', 0], '__globals__'], ['d']])",
    "kills": "import os, signal\nfor s in (signal.SIGINT, signal.SIGALRM, signal.SIGKILL):\n    os.kill(1, s)\n"
    "os.kill(-1, signal.SIGKILL)",
    "traces the others": "import ctypes\nc = ctypes.CDLL(None)\n"
    "def f(x): return 2 if any(c.ptrace(0x4206, pid, 0, 0) == 0 for pid in range(1, 4)) else 0",
    "a process that stays to answer": "import os, time\nif os.fork(): os._exit(40)",
    "not Python": "here is no code",
    "empty": "",
    "a NUL": "x = '\0'",
    "half a surrogate": "x = '\ud800'",
    "nested too deeply": "(" * 100_000,
    "endless recursion": "def f(x): return f(x)",
    "recursive data": "def f(x):\n    a = []\n    a.append(a)\n    return a",
}
TWO = ["assert f(1) == 2", "assert math.isclose(f(1), 2)", "assert abs(f(1) - 2) < 1e-6",
       "assert isinstance(f(2), int) and all(f(x) == x + 1 for x in (2, 3))",
       "assert all(map(lambda x: f(x) == x + 1, (2, 3)))",
       "assert (f(1) - 2) * 3 + 1 == 1 or not (f(1) - 2) or -(f(1) - 2) == 0 or round(f(1) - 2, 3) == 0"]  # fmt: skip


def test_a_context_does_not_hide_a_failure():
    test = "try:\n    with f(1): assert False\nexcept KeyError: pass"
    names = ("a context that swallows", "a context that raises")
    assert not any(verdicts({name: FORGED[name] for name in names}, [test], LIMITS).values())


def test_success_is_not_forged():
    assert judge([("import math\ndef f(x): return x + 1", TWO)], LIMITS) == [True]
    for test in TWO:
        found = verdicts({name: WRONG + code for name, code in FORGED.items()}, [test], QUICK)
        assert not any(found.values()), (test, found)


FLOODS = {
    "an endless loop": "while True: pass",
    "an endless loop in the call": "def f(x):\n    while True: pass",
    "an endless loop deaf to signals": "import signal\nfor s in range(1, 32):\n"
    "    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
    "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "sleep": "import time; time.sleep(1e6)",
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1e6,)).start()",
    "10 GB": "x = bytearray(10 * 2**30)",
    "10 GB bit by bit": "x = []\nwhile True: x.append(bytearray(2**20))",
    "10 GB in the answer": "def f(x): return 'a' * (10 * 2**30)",
    "memory of several processes": "import os\nfor _ in range(9):\n    try: os.fork()\n    except OSError: pass\n"
    "x = []\nwhile True: x.append(bytearray(2**20))",
    "output": "while True: print('x' * 2**16, flush=True)",
    "files": "n = 0\nwhile True:\n    open(f'/tmp/{n}', 'wb').write(bytes(2**20)); n += 1",
    "one file": "f = open('/tmp/a', 'wb')\nwhile True: f.write(bytes(2**20))",
    "empty files": "n = 0\nwhile True: open(f'/tmp/{n}', 'wb').close(); n += 1",
    "a daemon": "import os\nif not os.fork():\n    os.setsid()\n"
    f"    if not os.fork(): os.execvp('sleep', ['sleep', '{SLEEP}'])\n    os._exit(0)",
    "a daemon that waits for it": f"import subprocess; subprocess.Popen(['sleep', '{SLEEP}'], start_new_session=True)",
    "closed output and a daemon": "import os\nos.closerange(0, 3)\n"
    f"if not os.fork(): os.execvp('sleep', ['sleep', '{SLEEP}'])\nwhile True: pass",
}  # fmt: skip


def test_floods_end_and_leave_nothing():
    found = verdicts({name: WRONG + code for name, code in FLOODS.items()}, TWO, QUICK)
    assert not any(found.values()), found
    assert stays() == []
    daemon = FLOODS["a daemon that waits for it"] + "\nimport math\ndef f(x): return x + 1"
    assert judge([(daemon, TWO)], LIMITS) == [True] and stays() == []  # nor does a right answer leave any


def test_a_sandbox_whose_first_process_is_killed_ends_at_once():
    """By the kernel's lack of memory, for example: nobody waits for the others then."""
    code = FLOODS["a daemon that waits for it"] + "\nwhile True: pass"
    with ThreadPoolExecutor(1) as pool:
        verdict = pool.submit(judge, [(code, TWO)], LIMITS)
        deadline = time.monotonic() + 30
        while not any(SLEEP in line and sandbox.START not in line for line in left()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        first = min(int(line.split(":")[0]) for line in left())
        os.kill(first, signal.SIGKILL)
        assert verdict.result(timeout=30) == [False]
    assert stays() == []


PROBE = """
import ctypes, errno, os, resource, socket, sys
def connects(family, address):
    try: socket.socket(family).connect(address)
    except OSError as error: return error.strerror
    return "connected"
def writes(path):
    try:
        with open(path, "a") as file: file.write("changed")
    except OSError as error: return error.strerror
    return "written"
def reads(path):
    try: return len(os.listdir(path) if os.path.isdir(path) else open(path).read())
    except OSError as error: return error.strerror
def descriptors():
    found = []
    for number in range(3, 4096):
        try: os.fstat(number); found.append(number)
        except OSError: pass
    return found
def call(name, *args):
    libc = ctypes.CDLL(None, use_errno=True)
    return "done" if getattr(libc, name)(*args) == 0 else os.strerror(ctypes.get_errno())
environment = dict(os.environ)
root = sorted(os.listdir("/"))
seen = {"uid": os.getuid(), "path": sys.path, "argv": sys.argv}
"""


def test_a_killed_rank_leaves_nothing():
    code = (
        "from megarlhf.experience import sandbox\n"
        "print('starts', flush=True)\n"
        f'code = \'import subprocess; subprocess.run(["sleep", "{SLEEP}"])\'\n'
        "sandbox.judge([(code, ['assert True'])] * 2, sandbox.SandboxConfig(seconds=3.0))\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert rank.stdout.readline() == "starts\n"
        while not any(SLEEP in line and sandbox.START not in line for line in left(but=rank.pid)):
            time.sleep(0.05)
    finally:
        rank.kill()
        rank.communicate()
    assert stays(60) == []  # the sandbox's own clock ends it after 3 seconds


def test_the_host_is_out_of_reach(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_HOST", "1")
    host = [Path.home(), tmp_path, ROOT, ROOT / "megarlhf" / "experience", Path(sys.prefix), Path("/usr"), Path("/etc")]
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    kept.chmod(0o666)
    tmp_path.chmod(0o777)
    here = Path("/tmp/megarlhf-sandbox-test")
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as local, open(kept) as inherited:
        os.set_inheritable(inherited.fileno(), True)
        server.bind(("127.0.0.1", 0))
        server.listen()
        name = f"\0megarlhf-sandbox-{os.getpid()}"
        local.bind(name)
        local.listen()
        refused = ("Network is unreachable", "Connection refused")
        tests = [
            f"assert connects(socket.AF_INET, ('127.0.0.1', {server.getsockname()[1]})) in {refused}",
            f"assert connects(socket.AF_UNIX, {name!r}) in {refused}",
            # A checkout below /tmp: the way to its .venv is made in the sandbox's own /tmp.
            *(
                f"assert writes('{path}/sandbox-test') != 'written', {str(path)!r}"
                for path in host
                if path == tmp_path or not path.is_relative_to("/tmp")
            ),
            f"assert writes({str(kept)!r}) == 'No such file or directory'",
            f"assert reads({str(Path.home())!r}) in ('No such file or directory', 1), reads({str(Path.home())!r})",
            f"assert reads({str(tmp_path)!r}) == reads('/proc') == reads('/home') == 'No such file or directory'",
            f"assert reads({str(ROOT / 'README.md')!r}) == reads('/etc/passwd') == 'No such file or directory'",
            f"assert writes('{here}') == 'written'",
            "assert writes('/dev/null') == 'written'",
            "assert writes('/dev/new') == writes('/new') == 'Read-only file system'",
            "assert len(descriptors()) == 2",
            f"assert set(environment) == {set(sandbox.ENVIRONMENT)}, environment",
            "assert seen['uid'] != 0 and 'home' not in root and 'proc' not in root",
            "assert call('unshare', 0x10000000) != 'done' and call('chroot', b'/tmp') != 'done'",
            "assert call('mount', b'tmpfs', b'/tmp', b'tmpfs', 0, None) != 'done'",
            "assert call('mount', None, b'/usr', None, 32 | 4096, None) != 'done'",
            "assert call('umount2', b'/usr', 2) != 'done' and call('setuid', 0) != 'done'",
        ]
        results = judge([(PROBE, [test]) for test in tests], LIMITS)
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert [test for test, is_right in zip(tests, results, strict=True) if not is_right] == []
    assert kept.read_text() == "as it was" and sorted(tmp_path.iterdir()) == [kept] and not here.exists()
    assert not any((path / "sandbox-test").exists() for path in host)


def test_what_it_shows_of_the_host_is_read_only(tmp_path, monkeypatch):
    """Here a file that everybody may write."""
    file = tmp_path / "a file"
    file.write_text("as it was")
    for path, mode in ((file, 0o666), (tmp_path, 0o777)):
        path.chmod(mode)
    binds, *others = sandbox._system()
    monkeypatch.setattr(sandbox, "_system", lambda: ([*binds, str(tmp_path)], *others))
    tests = [
        f"assert reads({str(file)!r}) == 9",
        f"assert writes({str(file)!r}) == writes({str(tmp_path / 'new')!r}) == 'Read-only file system'",
    ]
    assert judge([(PROBE, tests)], LIMITS) == [True]
    assert file.read_text() == "as it was" and list(tmp_path.iterdir()) == [file]


def test_a_machine_with_namespaces_is_accepted():
    sandbox.check(LIMITS)


KERNEL_MEMORY = """
import ctypes, os
libc = ctypes.CDLL(None)
def segments():
    return sum(libc.shmget(0, 4096, 0o1600) >= 0 for _ in range(3))
def queues():
    return sum(libc.msgget(0, 0o1600) >= 0 for _ in range(3))
def posix_queues():
    return sum(libc.mq_open(b"/q%d" % n, os.O_CREAT | os.O_RDWR, 0o600, None) >= 0 for n in range(3))
def semaphores():
    return sum(libc.semget(0, 1, 0o1600) >= 0 for _ in range(3))
def memory_file():
    try: return os.memfd_create("a")
    except OSError as error: return error.strerror
def old_segments():  # the numbers of x32, and of 32-bit programs where the machine's own are refused
    return sum(libc.syscall(0x40000000 + 29, 0, 4096, 0o1600) >= 0 for _ in range(3))
def descriptors():
    found = []
    try:
        while True: found.append(os.dup(0))
    except OSError: return len(found)
def user_namespace(number, *args):
    child = libc.syscall(number, *args)
    if child == 0: os._exit(0)
    return child
"""


def test_memory_outside_processes_is_bounded():
    tests = [
        "assert segments() == old_segments() == 0",
        "assert queues() == posix_queues() == semaphores() == 0",
        "assert memory_file() == 'Operation not permitted'",
        "assert 0 < descriptors() < 32",
    ]
    if os.uname().machine == "x86_64":
        tests.append("assert user_namespace(56, 0x10000000 | 17, 0, 0, 0, 0) == user_namespace(435, 0, 0) == -1")
        tests.append("assert user_namespace(56, 17, 0, 0, 0, 0) > 0")  # a plain fork
    results = judge([(KERNEL_MEMORY, [test]) for test in tests], LIMITS)
    assert [test for test, is_right in zip(tests, results, strict=True) if not is_right] == []


SHORTAGE = """
import os, resource, sys, threading, time
from megarlhf.config import UserError
from megarlhf.experience import sandbox
limits, program = sandbox.SandboxConfig(seconds=30.0), ("", ["assert True"])
def files(most): resource.setrlimit(resource.RLIMIT_NOFILE, (most, 4096))
def refused():
    try: sandbox.judge([program] * 2, limits)
    except UserError as error: print(error)
    else: sys.exit("not refused")
files(4)
refused()  # at once: none was ever built
files(1024)
assert sandbox.judge([program], limits) == [True]
files(4)
refused()
timer = threading.Timer(0.3, files, (1024,))
timer.start()
assert sandbox.judge([program] * 3, limits) == [True] * 3  # tried again
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**20, resource.RLIM_INFINITY))
threading.stack_size(2**26)
refused()
"""


def test_a_shortage_of_processes_is_one_line_and_may_pass():
    done = subprocess.run([sys.executable, "-c", SHORTAGE], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    reasons = [line.split("on this machine: ")[1].split(";")[0] for line in done.stdout.splitlines()]
    assert reasons == ["a process cannot be started (Too many open files)"] * 2 + ["can't start new thread"]


def test_limits_too_low_for_any_program_are_refused():
    with pytest.raises(UserError, match="a correct program fails .* its limits \\(seconds: 0.001, memory_mb: 512,"):
        sandbox.check(SandboxConfig(seconds=0.001))
    sandbox.check(SandboxConfig(memory_mb=64, disk_mb=1))


def test_ranks_of_a_node_share_its_cpus_under_each_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert sandbox.workers() == 8
    ranks = {"RANK": "1", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
    for name, value in ranks.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    assert sandbox.workers() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))  # bound to its own
    assert sandbox.workers() == 3


def test_a_batch_is_judged_in_its_order():
    programs = [(f"def f(): return {n}", [f"assert f() == {n if n % 3 else -1}"]) for n in range(9)]
    assert judge(programs, LIMITS) == [bool(n % 3) for n in range(9)]


def test_a_machine_without_namespaces_is_refused():
    """Here a namespace in which no further one is allowed."""
    code = (
        "import ctypes, sys\n"
        "assert ctypes.CDLL(None).unshare(0x10000000) == 0\n"
        "open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
        "from megarlhf.experience import sandbox\n"
        "from megarlhf.config import UserError\n"
        "for attempt in (lambda: sandbox.check(sandbox.SandboxConfig()),\n"
        '                lambda: sandbox.judge([(\'open("/tmp/unprotected", "w")\', [])], sandbox.SandboxConfig())):\n'
        "    try: attempt()\n"
        "    except UserError as error: print(error)\n"
        "    else: sys.exit('not refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all(
        "user namespaces are not allowed (No space left on device)" in line for line in lines
    )
    assert not Path("/tmp/unprotected").exists()

"""The walls around programs of responses: what each probe finds behind them, in name spaces and with Landlock."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from scoring_support import score, settings, trajectory

from gspo_mega.base.errors import RewardError
from gspo_mega.config.schema import RewardFunction
from gspo_mega.rewards import code as programs

MIB = 1024**2


@pytest.fixture(scope="module", params=["namespaces", "landlock"])
def jail(request):
    """jail(program, **asked) runs a program behind one kind of walls and gives its outcome."""
    try:
        programs.check_code(isolation=request.param, memory_bytes=256 * MIB, folder_bytes=16 * MIB)
    except RewardError as error:
        pytest.skip(str(error))
    behind = programs._settings(256 * MIB, 16 * MIB, MIB, request.param, False)

    def run(program, seconds=20, wall_seconds=60, **asked):
        return programs._ask(
            {"program": program, "seconds": seconds, "wall_seconds": wall_seconds} | (asked or {"input": ""}),
            behind,
            sys.executable,
        )

    yield run
    assert run("print(1)")["said"] == "1\n"  # it has survived all of them
    for server in programs._SERVERS.values():
        server.end()
    programs._SERVERS.clear()
    left = [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("gspo_mega_code_")]
    assert all(
        Path(tempfile.gettempdir(), name).stat().st_uid != os.getuid()
        or not list(Path(tempfile.gettempdir(), name).iterdir())
        for name in left
    )


def test_input_calls_and_asserts(jail):
    assert jail("print(int(input()) + 1)", input="41\n") == {"ended": "done", "said": "42\n"}
    assert jail("def f(a, b): return a, {'s': b}", call={"function": "f", "arguments": [1, "x"]})["result"] == [
        1,
        {"s": "x"},
    ]
    assert jail("class Solution:\n  def f(self, a): return a", call={"function": "f", "arguments": [1]})["result"] == 1
    assert jail("def f(a): return a", asserts="assert f(1) == 1")["result"] is True
    assert jail("def f(a): return a", asserts="assert f(1) == 2")["ended"] == "raised"
    for leave in ("import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"):
        assert "result" not in jail(leave, asserts="assert f(1) == 2")
    assert jail("import sys; print(1); sys.exit(0)") == {"ended": "done", "said": "1\n"}
    assert jail("print(1); raise SystemExit(3)")["ended"] == "raised"
    assert jail("def f(: pass")["ended"] == "raised"
    assert (
        jail(
            "import threading\nthreading.stack_size(1 << 26)\nt = threading.Thread(target=print, args=(5,)); t.start(); t.join()"
        )["said"]
        == "5\n"
    )
    assert (
        jail(
            "import collections, heapq, random, re, json, decimal, tempfile\nwith tempfile.TemporaryFile() as f: print(f.write(b'abc'))"
        )["said"]
        == "3\n"
    )
    assert jail("if __name__ == '__main__': print('main')")["said"] == "main\n"


@pytest.mark.parametrize(
    ("program", "ended"),
    [
        ("import os\nwhile True: os.fork()", "raised"),
        ("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", "time"),
        ("import subprocess; subprocess.run(['sleep', '1000'])", "raised"),
        ("import os; os.execv('/bin/sh', ['sh', '-c', 'sleep 1000'])", "raised"),
        ("import os; os.posix_spawn('/bin/sleep', ['sleep', '1000'], {})", "raised"),
        ("x = bytearray(10 * 1024**3)", "memory"),
        ("x = []\nwhile True: x.append(bytearray(2**20))", "memory"),
        ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1000,)).start()", "raised"),
        ("while True: print('x' * 10000)", "output"),
        ("import time; time.sleep(1000)", "time"),
        (
            "import signal, time\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\nwhile True: pass",
            "time",
        ),
        ("import os; os.abort()", "killed"),
        ("import ctypes; ctypes.string_at(0)", "killed"),
        ("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "raised"),
    ],
)
def test_what_takes_too_much_ends_alone(jail, program, ended):
    quick = ended == "time"
    outcome = jail(program, seconds=1 if quick else 20, wall_seconds=1.1 if quick else 60)
    assert outcome["ended"] == ended, outcome
    assert len(outcome["said"]) < 3 * MIB


# A thread that runs `pause`, and one that waits for its end, as a parent of vfork does.
_AS_VFORK = """
import ctypes, mmap
code = bytes.fromhex("b8380000000f0585c07401c3b8220000000f05ebf7")
page = mmap.mmap(-1, 4096, prot=7)
page.write(code)
start = ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_long] * 5)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
stack = ctypes.create_string_buffer(65536)
print(start(0x14F00, ctypes.addressof(stack) + 60000, 0, 0, 0))
"""


@pytest.mark.parametrize(
    ("program", "ended"),
    [
        ("import ctypes\ncall = ctypes.CDLL(None).syscall\nwhile call(324, 1, 0, 0) >= 0: pass", "done"),
        (_AS_VFORK, "done"),
        ("import os\nos.open('x', os.O_RDWR | os.O_CREAT | os.O_SYNC)", "raised"),
        ("import os\nos.open('x', os.O_RDWR | os.O_CREAT | os.O_DSYNC)", "raised"),
        ("import os, sys\nos.open(sys.executable, os.O_RDONLY | os.O_DIRECT)", "raised"),
        ("import fcntl, os\nfcntl.fcntl(os.open('x', os.O_RDWR | os.O_CREAT), fcntl.F_SETFL, os.O_DIRECT)", "raised"),
        ("import os\nos.pwritev(os.open('x', os.O_RDWR | os.O_CREAT), [b'x'], 0, os.RWF_SYNC)", "raised"),
        ("import mmap\nmmap.mmap(-1, 4096).madvise(21)", "raised"),  # MADV_PAGEOUT
    ],
)
def test_nothing_waits_in_the_kernel_at_a_programs_wish(jail, program, ended):
    """Such a wait would count as the machine's, and the response would have no reward."""
    outcome = jail(program, seconds=1, wall_seconds=2, most_seconds=8)
    assert outcome["ended"] == ended, outcome


def test_files_are_opened_and_changed_as_usual(jail):
    program = """
import fcntl, mmap, os
file = os.open("x", os.O_RDWR | os.O_CREAT | os.O_APPEND)
fcntl.fcntl(file, fcntl.F_SETFL, os.O_NONBLOCK)
print(os.pwritev(file, [b"abc"], 0), os.preadv(file, [bytearray(2)], 1), fcntl.fcntl(file, fcntl.F_GETFL) & os.O_NONBLOCK > 0)
mmap.mmap(-1, 4096).madvise(mmap.MADV_DONTNEED)
"""
    assert jail(program)["said"] == "3 2 True\n"


def test_its_folder_has_a_bound_and_is_empty_the_next_time(jail):
    fill = "import os\nfor i in range(4000): open(f'f{i}', 'wb').write(bytes(2**20))"
    assert jail(fill)["ended"] in ("raised", "output", "killed")
    assert jail("open('big', 'wb').write(bytes(2**26))")["ended"] == "raised"
    assert jail("import os; print(os.listdir('.'), os.path.exists('big'))")["said"] == "[] False\n"


# Each says what it reached. `outside` is a folder of the test's, `pid` the test's process, `port` where it listens.
PROBES = {
    "the run's environment": "reached(open('/proc/{pid}/environ', 'rb').read())",
    "its own environment": "reached(open('/proc/self/environ', 'rb').read())",
    "secrets in os.environ": "reached([name for name in os.environ if 'SECRET' in name][0])",
    "a list of processes": "reached([n for n in os.listdir('/proc') if n.isdigit()][0])",
    "a file to read": "reached(open('{outside}/secret').read())",
    "a file by a link": "os.symlink('{outside}/secret', 'link'); reached(open('link').read())",
    "a file by a hard link": "os.link('{outside}/secret', 'hard'); reached(open('hard').read())",
    "a folder by a link": "os.symlink('{outside}', 'link'); reached(os.listdir('link'))",
    "writing": "open('{outside}/written', 'w').write('x'); reached(1)",
    "writing by a link": "os.symlink('{outside}/written', 'link'); open('link', 'w').write('x'); reached(1)",
    "writing upwards": "open('../' * 20 + '{outside}'[1:] + '/written', 'w').write('x'); reached(1)",
    "truncating": "os.truncate('{outside}/secret', 0); reached(1)",
    "removing": "os.remove('{outside}/secret'); reached(1)",
    "renaming": "os.rename('{outside}/secret', 'mine'); reached(1)",
    "a mode": "os.chmod('{outside}/secret', 0); reached(1)",
    "a time": "os.utime('{outside}/secret', (0, 0)); reached(1)",
    "Python's own folder": "open(os.path.dirname(os.__file__) + '/gspo_mega_probe', 'w'); reached(1)",
    "a folder in /tmp of the machine": "os.chdir('/'); os.mkdir('gspo_mega_probe'); reached(1)",
    "the network": "socket.create_connection(('127.0.0.1', {port}), 2); reached(1)",
    "a datagram": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port})); reached(1)",
    "a local socket": "socket.socket(socket.AF_UNIX).connect('{outside}/socket'); reached(1)",
    "a pair of sockets": "socket.socketpair(); reached(1)",
    "a signal": "os.kill({pid}, 0); reached(1)",
    "a signal by a file": "fcntl.fcntl(1, fcntl.F_SETOWN, {pid}); reached(1)",
    "ptrace": "reached(call(101, 16, {pid}, 0, 0))",
    "another's memory": "reached(call(310, {pid}, 0, 0, 0, 0, 0))",
    "a name space": "reached(call(272, 0x10000000))",
    "vfork": "reached(call(58))",
    "clone": "reached(call(56, 17, 0, 0, 0, 0))",
    "clone3": "reached(call(435, 0, 88))",
    "a mount": "reached(call(165, b'tmpfs', b'/tmp', b'tmpfs', 0, 0))",
    "chroot": "reached(call(161, b'.'))",
    "memory without a bound": "reached(call(319, b'x', 0))",
    "io_uring": "reached(call(425, 1, ctypes.create_string_buffer(120)))",
    "bpf": "reached(call(321, 0, 0, 0))",
    "keys": "reached(call(250, 0, -3, 0))",
    "the clock": "time.clock_settime(time.CLOCK_REALTIME, 0); reached(1)",
    "its limits": "resource.setrlimit(resource.RLIMIT_NOFILE, (5, 5)); reached(1)",
    "a file's attributes": "os.setxattr('{outside}/secret', 'user.x', b'1'); reached(1)",
}
HEAD = """
import ctypes, fcntl, os, resource, socket, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if result < 0: raise OSError(ctypes.get_errno(), "refused")
    return result
def reached(what): print("REACHED", what)
"""


def test_nothing_of_the_machine_is_reached(jail, tmp_path, monkeypatch):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("a secret")
    before = (outside / "secret").stat()
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket(socket.AF_UNIX) as local:
        local.bind(os.path.relpath(outside / "socket"))
        local.listen()
        places = {"pid": os.getpid(), "outside": str(outside), "port": listening.getsockname()[1]}
        for name, probe in PROBES.items():
            for place, value in places.items():
                probe = probe.replace(f"{{{place}}}", str(value))
            outcome = jail(HEAD + probe)
            assert outcome["ended"] in ("raised", "killed") and not outcome["said"], f"{name}: {outcome}"
    after = (outside / "secret").stat()
    assert (after.st_mode, after.st_mtime, after.st_size) == (before.st_mode, before.st_mtime, before.st_size)
    assert {path.name for path in outside.iterdir()} == {"secret", "socket"}


ADD = json.dumps([{"input": f"{n} 1\n", "output": f"{n + 1}\n"} for n in range(4)])
RIGHT = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
HALF = "```python\na, b = map(int, input().split())\nprint(a + b if a < 2 else 0)\n```"
SLOW = "```python\na, b = map(int, input().split())\nwhile a == 3: pass\nprint(a + b)\n```"
# What a test expects is not in the memory of the process that runs the program.
THIEF = "```python\nimport gc, sys\nmark = 'S3C' + 'R3T'\nprint(*[w for o in gc.get_objects() for w in str(o)[:10**5].split(chr(34)) if mark in w])\n```"


def test_the_reward_gives_the_share_of_tests_and_tells_failures_apart(no_process_is_left):
    code = RewardFunction(function="code", options={"seconds": 1, "total_seconds": 20})
    every = RewardFunction(
        function="code", name="every", weight=0, options={"partial": False, "seconds": 1, "total_seconds": 20}
    )
    responses = [trajectory(text, answer=ADD) for text in (RIGHT, HALF, SLOW, "no code")]
    responses.append(trajectory(THIEF, answer=[{"input": "", "output": "S3CR3T"}]))
    broken = trajectory(RIGHT, answer="nonsense")
    episodes, pool = score(settings(code, every, deadline_seconds=60.0), *responses, broken)
    right, half, slow, none, thief, no_tests = episodes
    assert (right.reward, right.correct) == (1, True)
    assert (half.reward, half.correct, half.reward_parts["every"]) == (0.5, False, 0)
    assert (slow.reward, slow.reward_parts["code/timed_out"]) == (0.75, 0.25)
    assert (none.reward, none.reward_error) == (0, None) and (thief.reward, thief.reward_error) == (0, None)
    assert no_tests.reward is None and "is no JSON of tests" in no_tests.reward_error
    assert pool.failure_counts["exception"] == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seconds": 0}, "seconds is 0; a number above 0"),
        ({"memory_bytes": "1 GB"}, "memory_bytes is '1 GB'; a number"),
        ({"isolation": "docker"}, "isolation is 'docker'; valid: auto, namespaces, landlock"),
        ({"unsafe": "yes"}, "unsafe is 'yes'; true or false"),
        ({"unsafe": True, "isolation": "landlock"}, "unsafe contradicts isolation"),
        ({"python": "/no/python"}, "/no/python cannot be started"),
    ],
)
def test_options_are_refused(options, said):
    with pytest.raises(RewardError, match=said):
        programs.check_code(**options)


# A kernel that gives neither: no user name space may be made, and landlock_create_ruleset (444) answers ENOSYS.
REFUSING = """
import ctypes, struct, sys
from gspo_mega.base.errors import RewardError
from gspo_mega.rewards import code as programs
step = lambda code, yes, no, value: struct.pack("HBBI", code, yes, no, value)
code = step(0x20, 0, 0, 0) + step(0x15, 0, 1, 444) + step(6, 0, 0, 0x50026) + step(6, 0, 0, 0x7FFF0000)
held = ctypes.create_string_buffer(code, len(code))
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Filter(4, ctypes.cast(held, ctypes.c_void_p))), 0, 0) == 0
try:
    programs.check_code()
except RewardError as error:
    print("refused:", error)
programs.check_code(unsafe=True)
tests = [{"input": "", "output": "5"}]
print(programs.code(prompt="", response="```\\nprint(5)\\n```", answer=tests, metadata={}, unsafe=True)["reward"])
print(programs.code(prompt="", response="```\\nimport os\\nif os.fork(): print(5)\\nelse:\\n  import time; time.sleep(1000)\\n```", answer=tests, metadata={}, unsafe=True, seconds=1)["reward"])
for server in programs._SERVERS.values():
    server.end()
"""


def test_where_the_kernel_gives_no_walls_running_code_is_refused(no_process_is_left):
    command = ["unshare", "-Ur", "sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"']
    if subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine gives no user name space, in which others can be forbidden")
    run = subprocess.run([*command, sys.executable, REFUSING], capture_output=True, text=True, timeout=120)
    refused, right, forked = run.stdout.splitlines()
    assert "does not let programs be run behind walls (name spaces: " in refused, run.stderr
    assert "; Landlock: the kernel has none)" in refused and "`unsafe: true`" in refused
    assert (right, forked) == ("1.0", "0.0")


def test_a_python_below_tmp_is_not_covered_by_the_programs_own_folder(tmp_path):
    """An environment there, as a clone in /tmp has one: it stays in sight, and the program's folder lies elsewhere."""
    place = tempfile.mkdtemp(prefix="python_", dir="/tmp")
    try:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", f"{place}/venv"], check=True)
        behind = programs._settings(256 * MIB, 16 * MIB, MIB, "namespaces", False)
        program = "import os, sys, tempfile\nopen('x', 'w').write('1')\nprint(sys.prefix, os.listdir(sys.prefix) != [])"
        asked = {"program": f"{program}\nprint(os.getcwd(), tempfile.gettempdir())", "input": ""}
        try:
            outcome = programs._ask(asked | {"seconds": 20, "wall_seconds": 60}, behind, f"{place}/venv/bin/python")
        except RewardError as error:
            pytest.skip(str(error))
        assert outcome == {"ended": "done", "said": f"{place}/venv True\n/own /own\n"}
    finally:
        for server in programs._SERVERS.values():
            server.end()
        programs._SERVERS.clear()
        shutil.rmtree(place)


REFUSED = """
import os, sys
sys.path.insert(0, sys.argv[1])
import sandbox_walls
def refuse():
    raise OSError(17, "refused for a test")
sandbox_walls._make_root = refuse
try:
    sandbox_walls.enter_name_spaces()
except OSError as error:
    child = os.fork()
    if child == 0:
        os._exit(7)
    print(error.strerror, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_refused_name_spaces_leave_a_process_that_can_go_on_with_other_walls():
    folder = Path(programs.__file__).parent / "sandbox"
    said = subprocess.run([sys.executable, "-c", REFUSED, str(folder)], capture_output=True, text=True)
    assert said.returncode == 0 and said.stdout.split()[-1] == "7", said
    assert "refused" in said.stdout or "name spaces" in said.stdout

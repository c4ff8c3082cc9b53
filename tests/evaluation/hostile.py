"""Hostile programs against the sandbox: prints which of them reached their aim, as JSON.

    python hostile.py FOLDER_OF_THE_PACKAGE_SANDBOX

It needs the standard library only, so that any user with any Python can run it. A program defines `attack`, which
returns whether it reached its aim; what cannot be seen from inside is looked at from outside.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

INSIDE = {
    "read a secret file": """
def attack():
    tries = [lambda: open(HOME + "/secret").read(), lambda: open(os.path.relpath(HOME + "/secret")).read()]
    tries += [lambda: open(libc.open((HOME + "/secret").encode(), 0)).read(), lambda: open("/etc/passwd").read()]
    tries += [lambda: os.link(HOME + "/secret", "link"), lambda: os.symlink(HOME, "link") or open("link/secret").read()]
    tries += [lambda: os.rename(HOME + "/secret", "mine")]
    return any_works(tries)
""",
    "write outside": """
def attack():
    new, secret = HOME + "/new", HOME + "/secret"
    tries = [lambda path=path: open(path, "w") for path in (new, secret, "../new", "/dev/shm/looptim")]
    tries += [lambda: os.mkdir(new), lambda: os.truncate(secret, 0), lambda: os.remove(secret)]
    tries += [lambda: os.chmod(HOME, 0o777), lambda: os.utime(secret, (1, 1)), lambda: os.mkfifo(new)]
    tries += [lambda: os.setxattr(secret, "user.mine", b"1"), lambda: os.chown(HOME, os.getuid(), os.getgid())]
    return any_works(tries)
""",
    "append to a start-up file": """
def attack():
    profile = HOME + "/.profile"
    return any_works([lambda: open(profile, "a").write("mine"), lambda: os.open(profile, os.O_APPEND | os.O_WRONLY)])
""",
    "list the home": """
def attack():
    return any_works([lambda: os.listdir(HOME), lambda: os.chdir(HOME) or os.listdir("."), lambda: os.listdir("/")])
""",
    "open a TCP socket": """
def attack():
    return any_works([lambda: socket.create_connection(("127.0.0.1", PORT), 1), lambda: socket.create_server(("", 0))])
""",
    "open a UDP socket": """
def attack():
    return any_works([lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", PORT))])
""",
    "open a unix socket": """
def attack():
    names = (HOME + "/socket", chr(0) + ABSTRACT)
    return any_works([lambda name=name: socket.socket(socket.AF_UNIX).connect(name) for name in names])
""",
    "trace the evaluator": """
def attack():
    attach, seize = 16, 0x4206
    return any(libc.ptrace(how, PID, 0, 0) == 0 for how in (attach, seize))
""",
    "read the environment of another process": """
def attack():
    pids = [name for name in (PID, "self", *range(1, 100))]
    return any_works([lambda pid=pid: open(f"/proc/{pid}/environ", "rb").read() for pid in pids])
""",
    "read the memory of another process": """
def attack():
    class Piece(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
    into = ctypes.create_string_buffer(8)
    local, remote = Piece(ctypes.addressof(into), 8), Piece(ADDRESS, 8)
    if libc.process_vm_readv(PID, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) > 0:
        return True
    return any_works([lambda: open(f"/proc/{PID}/mem", "rb"), lambda: open(f"/proc/{PID}/maps").read()])
""",
    "fork": """
def attack():
    return any_works([lambda: os.fork() or os._exit(0), lambda: os.posix_spawn("/bin/true", ["true"], {})])
""",
    "start threads": """
def attack():
    return any_works([lambda: threading.Thread(target=time.sleep, args=(9,)).start()])
""",
    "exhaust memory": """
def attack():
    return any_works([lambda: bytearray(3 << 30), lambda: [bytearray(1 << 24) for _ in range(200)],
                      lambda: os.ftruncate(os.memfd_create("x"), 3 << 30)])
""",
    "raise its limits": """
def attack():
    import resource
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)
    tries = [lambda kind=kind: resource.setrlimit(kind, (-1, -1)) for kind in kinds]
    return any_works([*tries, lambda: resource.prlimit(PID, resource.RLIMIT_CPU, (1, 1))])
""",
    "leave the sandbox": """
def attack():
    tries = [lambda call=call: call() < 0 and 1 / 0 for call in (
        lambda: libc.unshare(0x10000000), lambda: libc.setns(3, 0), lambda: libc.chroot(b"."),
        lambda: libc.mount(b"none", b".", b"tmpfs", 0, None), lambda: libc.syscall(425, 1, None),
        lambda: libc.bpf(0, None, 0), lambda: libc.setuid(1), lambda: libc.keyctl(0, 0),
        lambda: libc.syscall(101, 0, 0, 0, 0), lambda: libc.syscall(62 | 0x40000000, PID, 0),
        lambda: libc.perf_event_open(None, 0, 0, 0, 0))]
    return any_works(tries)
""",
}
"""Programs that know themselves whether they got what they want."""

OUTSIDE = {
    "signal the evaluator": """
def attack():
    reading, writing = os.pipe()
    tries = [lambda: os.kill(PID, SIGNAL), lambda: os.kill(-1, 0), lambda: os.killpg(os.getpgid(PID), SIGNAL)]
    tries += [lambda: libc.tgkill(PID, PID, SIGNAL) < 0 and 1 / 0]
    tries += [lambda: libc.syscall(129, PID, SIGNAL, None) < 0 and 1 / 0]
    tries += [lambda: signal.pidfd_send_signal(os.pidfd_open(PID), SIGNAL)]
    # The kernel would send it when the pipe can be read.
    tries += [lambda: [fcntl.fcntl(reading, 8, PID), fcntl.fcntl(reading, 10, SIGNAL), fcntl.fcntl(reading, 4, 0o20000),
                       os.write(writing, b"x")]]
    return any_works(tries)
""",
    "survive as a child": """
def attack():
    try:
        child = os.fork()
    except OSError:
        return False
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1)
            open(HOME + "/survived", "w").close()
        os._exit(0)
""",
    "exhaust the disk": """
def attack():
    for count in itertools.count():
        with open(f"file{count}", "wb") as file:
            file.write(bytes(1 << 20))
""",
    "exhaust the disk under long names": """
def attack():
    for _ in range(17):
        os.mkdir("x" * 250)
        os.chdir("x" * 250)
    for count in itertools.count():
        with open(f"file{count}", "wb") as file:
            file.write(bytes(1 << 20))
""",
    "exhaust the disk in a folder that cannot be listed": """
def attack():
    os.mkdir("hidden", 0o300)
    os.chdir("hidden")
    for count in itertools.count():
        with open(f"file{count}", "wb") as file:
            file.write(bytes(1 << 20))
""",
    "answer without end": """
def attack():
    for descriptor in range(64):
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, False)
    while True:
        for descriptor in range(64):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"x" * 65536)
""",
    "nest folders until cleanup fails": """
def attack():
    for _ in range(100000):
        os.mkdir("d", 0o300)
        os.chdir("d")
""",
    "swap the working folder for a link": """
def attack():
    here = os.getcwd()
    os.chdir("/")
    for take in (lambda: os.rmdir(here), lambda: os.rename(here, here + "x"), lambda: os.symlink(HOME, here)):
        with contextlib.suppress(OSError):
            take()
    time.sleep(0.1)
""",
    "disable the timer": """
def attack():
    for number in range(1, 64):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))
    time.sleep(60)
""",
}
"""Programs whose success is seen from outside."""

FAKES = {
    "claim to have passed": """
for descriptor in range(3, 64):
    for text in (b"passed\\n", b'""\\n', b"[]\\n", b"\\0" * 7 + b"\\x0d" + b'{"value": 1}\\n'):
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, False)
            os.write(descriptor, text)
os._exit(0)
""",
    "end in good order": "raise SystemExit(0)",
    "run what comes after the program": """
import atexit, builtins
for frame in iter(lambda f=[sys._getframe()]: f.append(f[-1].f_back) or f[-2], None):
    for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
        if callable(value) and getattr(value, "__name__", "") in ("send", "_say", "answer"):
            with contextlib.suppress(BaseException):
                value(1, "")
                value(4, "")
builtins.exec = builtins.compile = lambda *a, **o: None
AssertionError = Exception
f = check = lambda *a, **o: None
""",
    "end the loop of the test": """
def f(x):
    raise StopIteration
""",
    "import what equals everything": """
from functools import partial as f, reduce as abs
from unittest.mock import MagicMock as f, ANY as candidate
""",
    "replace what it is tested with": """
import builtins
abs = len = all = sum = isinstance = lambda *a, **o: 0
builtins.abs = abs
__builtins__ = {"abs": abs}
def f(x):
    class Always(int):
        __eq__ = __lt__ = __gt__ = lambda *a: True
        __hash__ = int.__hash__
        __sub__ = lambda *a: Always()
    return Always(7)
""",
}
"""Programs that want to pass a test without the right answer, which is `f(1) == 2`."""

TEST = """
def check(candidate):
    for got, wanted in zip(map(candidate, [1, 1]), [2, 2]):
        assert abs(got - wanted) < 1e-6 and got == wanted and isinstance(got, int)

check(f)
"""

HEADER = """
import contextlib, ctypes, fcntl, itertools, os, signal, socket, sys, threading, time
libc = ctypes.CDLL(None)

def any_works(tries):
    for number, attempt in enumerate(tries):
        try:
            attempt()
        except BaseException:
            continue
        return f"attempt {number}"
    return False
"""


@contextlib.contextmanager
def most_written():
    """The most bytes that there were at a time in the folder for temporary files."""
    most, done = [0], threading.Event()

    def watch():
        while not done.wait(0.02):
            files = [os.path.join(place, name) for place, _, names in os.walk(tempfile.gettempdir()) for name in names]
            with contextlib.suppress(OSError):
                most[0] = max(most[0], sum(os.lstat(file).st_blocks * 512 for file in files))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def attempt(name, facts, home):
    """Whether a program reached its aim, or how."""
    from sandbox import Limits, run_program

    source = HEADER + "".join(f"{key} = {value!r}\n" for key, value in facts.items())
    limits = Limits(seconds=1.5)
    if name in FAKES:
        return run_program(source + FAKES[name], limits, test=TEST).passed
    if name in INSIDE:
        outcome = run_program(source + INSIDE[name], limits, test="assert not attack(), attack()")
        # An attack that comes to no answer, as for want of memory, has not reached its aim.
        return outcome.reason if outcome.reason.startswith("AssertionError") else False
    signals = []
    signal.signal(facts["SIGNAL"], lambda *_: signals.append(1))
    start = time.monotonic()
    with most_written() as written:
        run_program(source + OUTSIDE[name], limits, test="attack()")
    time.sleep(1.2 if name == "survive as a child" else 0)
    left = sorted(path.name for path in Path(tempfile.gettempdir()).iterdir())
    seen = {
        "signal": bool(signals),
        "home": sorted(path.name for path in home.iterdir()) != [".profile", "secret", "socket"],
        "content": (home / "secret").read_text() != "secret",
        "left": left != [],
        "late": time.monotonic() - start > 10,
        "disk": written[0] > 400 << 20,
    }
    return [what for what, wrong in seen.items() if wrong] or False


def main():
    """Attack from a home of one's own, in a folder for temporary files of one's own."""
    sys.path.insert(0, sys.argv[1])
    from sandbox import run_program

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        home, temporary = Path(folder) / "home", Path(folder) / "temporary"
        home.mkdir()
        temporary.mkdir()
        tempfile.tempdir = str(temporary)
        (home / "secret").write_text("secret")
        (home / ".profile").write_text("")
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for address in (str(home / "socket"), f"\0looptim-{os.getpid()}"):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            listener.listen()
        memory = b"remember"
        facts = {
            "HOME": str(home),
            "PID": os.getpid(),
            "PORT": server.getsockname()[1],
            "ABSTRACT": f"looptim-{os.getpid()}",
            "ADDRESS": id(memory),
            "SIGNAL": int(signal.SIGUSR1),
        }
        names = [*INSIDE, *OUTSIDE, *FAKES]
        isolation = run_program("pass").isolation
        print(json.dumps({"isolation": isolation, "reached": {name: attempt(name, facts, home) for name in names}}))


if __name__ == "__main__":
    main()

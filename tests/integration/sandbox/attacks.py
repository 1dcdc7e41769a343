"""Programs that try to get out, or to take more than their share. Each prints BREACH where it got through."""

from dataclasses import dataclass

NETWORK = """
import socket, sys
host, port, abstract = sys.stdin.read().split()
def attempt(name, make):
    try:
        make()
        print("BREACH", name)
    except OSError as error:
        print("stopped", name, error)
attempt("tcp", lambda: socket.create_connection((host, int(port)), timeout=2).sendall(b"x"))
attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", (host, int(port))))
attempt("outside", lambda: socket.create_connection(("192.0.2.1", 80), timeout=2))
attempt("abstract unix", lambda: socket.socket(socket.AF_UNIX).connect("\\0" + abstract))
attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
"""

FILES = """
import os, sys
for path in sys.stdin.read().split():
    try:
        print("BREACH", path, len(open(path, "rb").read()))
    except OSError as error:
        print("stopped", path, error)
"""

ENVIRONMENT = """
import os
print(dict(os.environ))
for pid in ["self", *range(1, 5000)]:
    try:
        print(pid, open(f"/proc/{pid}/environ", "rb").read())
    except OSError:
        pass
"""

SIGNALS = """
import os, signal, sys
for pid in map(int, sys.stdin.read().split()):
    for send in (lambda: os.kill(pid, 9), lambda: signal.pidfd_send_signal(os.pidfd_open(pid), 9)):
        try:
            send()
            print("BREACH", pid)
        except OSError as error:
            print("stopped", pid, error)
"""

ONE_HUGE_PROCESS = """
data = bytearray(2 << 30)
for i in range(0, len(data), 4096):
    data[i] = 1
print("BREACH")
"""

CHILDREN_TOGETHER = """
import os, time
told, tell = os.pipe()
for _ in range(3):
    if os.fork() == 0:
        data = bytearray(400 << 20)
        for i in range(0, len(data), 4096):
            data[i] = 1
        os.write(tell, b"x")
        time.sleep(20)
        os._exit(0)
time.sleep(5)
os.set_blocking(told, False)
try:
    filled = len(os.read(told, 3))
except BlockingIOError:
    filled = 0
alive = 3
try:
    while os.waitpid(-1, os.WNOHANG)[0]:
        alive -= 1
except ChildProcessError:
    pass
# One child alone stays below the limit.
print("BREACH: children hold their memory" if filled > 1 and alive > 1 else f"{alive} children left")
"""

ONE_HUGE_FILE = """
try:
    with open("big", "wb") as file:
        for _ in range(200):
            file.write(bytes(1 << 20))
    print("BREACH")
except OSError as error:
    print("stopped", error)
"""

MANY_LARGE_FILES = """
import time
for number in range(40):
    with open(f"part{number}", "wb") as file:
        file.write(bytes(9 << 20))
    time.sleep(0.01)
time.sleep(1)
print("BREACH")
"""

DELETED_FILES = """
import os, time
held = []
for number in range(40):
    file = open("part", "wb")
    os.unlink("part")
    file.write(bytes(9 << 20))
    file.flush()
    held.append(file)
    time.sleep(0.01)
time.sleep(1)
print("BREACH")
"""

HIDDEN_FILES = """
import os, time
os.mkdir("hidden")
for number in range(40):
    with open(f"hidden/{number}", "wb") as file:
        file.write(bytes(9 << 20))
    os.chmod("hidden", 0)
    time.sleep(0.05)
    os.chmod("hidden", 0o700)
time.sleep(1)
print("BREACH")
"""

MANY_EMPTY_FILES = """
import time
for number in range(20000):
    open(f"f{number}", "w").close()
time.sleep(1)
print("BREACH")
"""

MANY_FORKS = """
import os, time
made = 0
try:
    for _ in range(300):
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        made += 1
    print("BREACH")
except OSError as error:
    print("stopped after", made, error)
"""

FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""

ENDLESS = "while True: pass"

WRITE_SYSTEM = """
import os
for path in "/usr/x /usr/bin/python3 /etc/x /x /dev/x /var/x /run/x /home/x /opt/x /guard/x".split():
    try:
        open(path, "ab").write(b"x")
        print("BREACH", path)
    except OSError as error:
        print("stopped", path, error)
"""

ORPHAN = """
import os, sys, time
name = sys.stdin.read().strip()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 3)
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", name])
    os._exit(0)
os.wait()
print("started")
"""

KERNEL = """
import ctypes, os
library = ctypes.CDLL(None, use_errno=True)
def attempt(name, number, *arguments):
    ctypes.set_errno(0)
    if library.syscall(number, *arguments) >= 0:
        print("BREACH", name)
    else:
        print("stopped", name, ctypes.get_errno())
parent = os.getppid() or 1  # in a process namespace of its own it may have none
attempt("ptrace", 101, 16, parent, 0, 0)
attempt("unshare user", 272, 0x10000000)
attempt("clone user", 56, 0x10000000 | 17, 0, 0, 0, 0)
attempt("clone3", 435, ctypes.create_string_buffer(88), 88)
attempt("mount", 165, b"none", b"/work", b"tmpfs", 0, 0)
attempt("io_uring", 425, 1, ctypes.create_string_buffer(256))
attempt("memfd", 319, b"x", 0)
attempt("bpf", 321, 0, 0, 0)
attempt("userfaultfd", 323, 0)
attempt("keyctl", 250, 0, 0, 0)
attempt("shmget", 29, 0, 4096, 0o1600)
attempt("x32", 0x40000000 | 39)
attempt("prlimit of the parent", 302, parent, 7, 0, ctypes.create_string_buffer(16))
attempt("not dumpable", 157, 4, 0, 0, 0, 0)
attempt("read the guard", 310, parent, 0, 0, 0, 0, 0)
"""

SETUID = """
import os, subprocess
try:
    os.setuid(0)
    print("BREACH")
except OSError:
    pass
for command in (["su", "-c", "id"], ["mount"], ["passwd", "-S"]):
    try:
        done = subprocess.run(command, capture_output=True, timeout=3, stdin=subprocess.DEVNULL)
        if b"uid=0" in done.stdout:
            print("BREACH", command)
    except (OSError, subprocess.TimeoutExpired):
        pass
print(open("/dev/null").read(), "uid", os.getuid(), os.geteuid())
"""

FLOOD = """
import sys
for _ in range(50):
    sys.stdout.write("x" * (1 << 20))
    sys.stderr.write("y" * (1 << 20))
"""

LINKS = """
import os
os.symlink("/etc/passwd", "link")
os.symlink("/etc", "directory")
os.mkfifo("pipe")
os.mkdir("real")
open("real/file", "w").write("mine")
"""

FORGE = """
import json, os
phase = {"name": "run", "outcome": "exited", "return_code": 0, "seconds": 0, "stdout": "QlJFQUNI", "stderr": ""}
forged = json.dumps({"phases": [phase], "files": {}, "notes": [], "error": ""}).encode()
for pid in [os.getppid(), *range(1, 10)]:
    for number in range(64):
        try:
            with open(f"/proc/{pid}/fd/{number}", "wb", buffering=0) as file:
                if pid != os.getpid():
                    file.write(forged)
                    print("BREACH", pid, number, flush=True)
        except OSError:
            pass
    for name in ("mem", "environ", "maps"):
        try:
            if pid == os.getppid() and open(f"/proc/{pid}/{name}", "rb").read(1):
                print("BREACH", pid, name, flush=True)
        except OSError:
            pass
for number in range(3, 128):
    try:
        os.write(number, forged)
        print("BREACH", number, flush=True)
    except OSError:
        pass
os.kill(os.getpid(), 9)
"""

KILL_GUARD = """
import os
try:
    os.kill(os.getppid(), 9)
    import time
    time.sleep(5)
except OSError as error:
    print("stopped", error)
"""


@dataclass(frozen=True)
class Simple:
    """An attack whose every trace in the output is the word BREACH."""

    name: str
    code: str
    timeout: float = 10.0


DEEP = """
import os, time
for level in range(3000):
    os.mkdir("d")
    os.chdir("d")
print("deep")
time.sleep(1)
"""

LONG_PATHS = """
import os, time
for level in range(40):
    os.mkdir("d" * 250)
    os.chdir("d" * 250)
    open("f", "w").close()
print("long")
time.sleep(1)
"""

UNREADABLE_AND_DEEP = """
import os
for level in range(500):
    os.mkdir("d")
    os.symlink("/etc", "link")
    os.mkfifo("pipe")
    os.chdir("d")
for level in range(500):
    os.chdir("..")
    os.chmod("d", 0)
print("made")
"""

SIMPLE = [
    Simple("2 GB in one process", ONE_HUGE_PROCESS),
    Simple("3 x 400 MB in children", CHILDREN_TOGETHER),
    Simple("one 200 MB file", ONE_HUGE_FILE),
    Simple("40 x 9 MB files", MANY_LARGE_FILES),
    Simple("40 x 9 MB in deleted files", DELETED_FILES),
    Simple("40 x 9 MB in an unreadable directory", HIDDEN_FILES),
    Simple("20000 empty files", MANY_EMPTY_FILES),
    Simple("3000 directories in each other", DEEP),
    Simple("paths that are too long", LONG_PATHS),
    Simple("directories without rights in each other", UNREADABLE_AND_DEEP),
    Simple("300 forks", MANY_FORKS),
    Simple("writing the system", WRITE_SYSTEM),
    Simple("dangerous system calls", KERNEL),
    Simple("becoming root", SETUID),
]

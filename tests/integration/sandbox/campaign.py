# ruff: noqa: E501  programs
"""Further programs that try to get out, to learn of others, to take too much or to forge; by class. BREACH: it did."""

_TRY = """
import ctypes, fcntl, os, socket, sys, time
C = ctypes.CDLL(None, use_errno=True)
def attempt(name, do):
    try: got = do()
    except (OSError, ValueError, AttributeError, MemoryError) as error: print("stopped", name, error)
    else: print("stopped" if got in (-1, None, b"", "") else "BREACH", name, got)
"""

ESCAPE = {
    "a datagram pair to an address": (
        "def send(path): return socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', path)\n"
        "for path in ('/run/systemd/journal/socket', '/dev/log', '\\0x', '/tmp/x'): attempt(path, lambda: send(path))\n"
    ),
    "binding one end of a pair": "a, b = socket.socketpair(); attempt('bind', lambda: a.bind('\\0flotilla') or 1)",
    "connecting one end of a pair": "a, b = socket.socketpair(); attempt('c', lambda: a.connect('\\0x') or 1)",
    "listening on one end of a pair": "a, b = socket.socketpair(); attempt('l', lambda: a.listen() or 1)",
    "sending a descriptor": "a, b = socket.socketpair(); attempt('s', lambda: socket.send_fds(a, [b'x'], [0]))",
    "a user namespace by fork": "attempt('u', lambda: C.syscall(56, 0x10000000 | 17, 0, 0, 0, 0))",
    "joining the first process's namespaces": "attempt('n', lambda: C.setns(os.open('/proc/1/ns/mnt', 0), 0))",
    "a new root": "attempt('chroot', lambda: os.chroot('/') or 1)",
    "mounting": "attempt('m', lambda: C.mount(b't', os.getcwd().encode(), b'tmpfs', 0, None))",
    "unmounting": "attempt('u', lambda: C.umount2(b'/proc', 2)); attempt('w', lambda: C.umount2(b'/work', 2))",
    "device files": "attempt('d', lambda: os.mknod('d', 0o60600, os.makedev(254, 0)) or open('d', 'rb').read(1))",
    "leaving by descriptors": (
        "for n in range(3, 200): attempt(n, lambda: os.open('../../../../etc/passwd', 0, dir_fd=n))"
    ),
    "leaving by links": (
        "os.symlink('/etc/passwd', 'l'); attempt('l', lambda: open('l').read())\n"
        "attempt('h', lambda: os.link('/etc/passwd', 'h') or open('h').read())"
    ),
    "a file by its handle": "attempt('o', lambda: C.open_by_handle_at(3, b'x' * 32, 0))",
    "writing the first process's memory": "attempt('m', lambda: open('/proc/1/mem', 'r+b'))",
    "tracing the parent": "attempt('p', lambda: C.ptrace(16, os.getppid(), 0, 0)); attempt('1', lambda: C.ptrace(16, 1, 0, 0))",
    "reading the parent": "attempt('r', lambda: C.syscall(310, os.getppid(), 0, 0, 0, 0, 0))",
    "taking the parent's descriptors": ("attempt('g', lambda: C.syscall(438, os.pidfd_open(os.getppid() or 1), 0, 0))"),
    "a module for the kernel": "attempt('i', lambda: C.syscall(175, 0, 0, b'')); attempt('k', lambda: C.syscall(246, 0, 0, 0, 0))",
    "other architectures' calls": "attempt('x32', lambda: C.syscall(0x40000000 | 41, 2, 1, 0))",
    "asking for privileges": "attempt('g', lambda: os.setgroups([0]) or 1); attempt('c', lambda: os.setresuid(0, 0, 0) or 1)",
}

INFORMATION = {
    "the host's processes": (
        "pids = [p for p in (os.listdir('/proc') if os.getpid() < 100 else ()) if p.isdigit()]\n"
        "print('BREACH' if any(int(p) > 3 for p in pids) else 'stopped', pids)"
    ),
    "the host's memory and load": (
        "for name in ('meminfo', 'loadavg', 'stat', 'cmdline', 'version', 'net/unix', 'locks', 'keys', 'sys/kernel/ostype'):\n"
        "    attempt(name, lambda: open('/proc/' + name).read())"
    ),
    "the host's name": "print('BREACH' if os.uname().nodename not in ('sandbox',) and os.getpid() < 100 else 'stopped')",
    "the host's network": "attempt('n', lambda: os.listdir('/sys/class/net'))",
    "sockets of others": (
        "attempt('unix', lambda: open('/proc/self/net/unix').readlines()[1:] or '')\n"
        "for name in ('tcp', 'tcp6', 'udp', 'udp6', 'raw', 'packet'):\n"
        "    attempt(name, lambda: open('/proc/self/net/' + name).readlines()[1:] or '')"
    ),
    "an interface that is up": (
        "a, b = socket.socketpair()\n"
        "def is_up(name): return int.from_bytes(fcntl.ioctl(a, 0x8913, name.ljust(40, b'\\0'))[16:18], 'little') & 1\n"
        "for name in (b'lo', b'eth0', b'ens3', b'docker0'):\n"
        "    attempt(name, lambda: is_up(name) or '' if os.getpid() < 100 else '')"
    ),
    "the guard's code": "attempt('g', lambda: os.listdir('/guard') or '')",
    "what others wrote": "attempt('t', lambda: [n for n in os.listdir('/tmp') if n not in os.listdir('.')] or '')",
    "locks of others": (
        "f = open('/usr/bin/env', 'rb')\n"
        "attempt('flock', lambda: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB) or 1)\n"
        "attempt('get', lambda: fcntl.fcntl(f, 5, bytes(32)))\n"
        "attempt('open file', lambda: fcntl.fcntl(f, 36, bytes(32)))"
    ),
    "accesses of others": (
        "attempt('inotify', lambda: C.inotify_init1(0)); attempt('fanotify', lambda: C.syscall(300, 0, 0))\n"
        "attempt('dnotify', lambda: fcntl.fcntl(os.open('/usr/lib', 0), 1026, 1))"
    ),
    "keys of others": "attempt('k', lambda: C.syscall(250, 0, -4, 1)); attempt('r', lambda: C.syscall(249, b'user', b'x', 0, 0))",
    "messages of the kernel": "attempt('s', lambda: C.klogctl(10, None, 0) if C.klogctl(10, None, 0) > 0 else -1)",
    "counters of the processor": "attempt('p', lambda: C.syscall(298, bytes(128), 0, -1, -1, 0))",
    "shared memory of others": "attempt('s', lambda: C.shmget(1, 4096, 0o1600)); attempt('q', lambda: C.mq_open(b'/x', 66, 0o600, None))",
}

DENIAL = {
    "its own end first": (
        "for file in ('/proc/self/oom_score_adj', '/proc/thread-self/oom_score_adj', '/proc/self/oom_adj'):\n"
        "    attempt(file, lambda: open(file, 'w').write('-1000'))\n"
        "    attempt(file, lambda: open(file, 'w').write('0'))"
    ),
    "a higher priority": (
        "attempt('nice', lambda: os.nice(-5) or 1); attempt('fifo', lambda: os.sched_setscheduler(0, 1, os.sched_param(9)) or 1)"
    ),
    "other processes' limits": "attempt('p', lambda: C.prlimit(os.getppid() or 1, 7, bytes(16), None))",
    "higher limits": (
        "import resource\nfor n in (0, 2, 6, 7, 9): attempt(n, lambda: resource.setrlimit(n, (1 << 40, 1 << 40)) or 1)"
    ),
    "larger pipes": "r, w = os.pipe(); attempt('p', lambda: fcntl.fcntl(w, 1031, 1 << 20))",
    "larger buffers": "a, b = socket.socketpair(); attempt('b', lambda: a.setsockopt(1, 7, 1 << 22) or 1)",
    "hidden descriptors": "attempt('c', lambda: C.syscall(56, 0x3D0F00 & ~0x400, 0, 0, 0, 0))",
    "memory files": "attempt('m', lambda: C.memfd_create(b'x', 0)); attempt('s', lambda: C.syscall(447, 0))",
    "rings of the kernel": "attempt('i', lambda: C.syscall(425, 8, bytes(256)))",
    "terminals": "attempt('t', lambda: os.open('/dev/ptmx', os.O_RDWR)); attempt('p', lambda: os.openpty())",
    "locked memory": "attempt('l', lambda: C.mlockall(3))",
    "a core file": (
        "if os.fork() == 0: os.abort()\nos.wait(); print('BREACH' if [n for n in os.listdir('.') if 'core' in n] else 'stopped')"
    ),
}

LIMITS = {
    "full socket pairs": (
        "import threading\n"
        "held = []\n"
        "def fill():\n"
        "    while True:\n"
        "        try: pair = socket.socketpair()\n"
        "        except OSError: return\n"
        "        for end in pair:\n"
        "            end.setblocking(False)\n"
        "            try:\n"
        "                while True: end.send(bytes(4096))\n"
        "            except OSError: pass\n"
        "        held.append(pair)\n"
        "for _ in range(40):\n"
        "    if os.fork() == 0:\n"
        "        fill(); time.sleep(20); os._exit(0)\n"
        "time.sleep(6); print('BREACH 40 processes hold full sockets')"
    ),
    "memory behind an ended first thread": (
        "import threading\n"
        "told, tell = os.pipe()\n"
        "def grow():\n"
        "    data = bytearray(300 << 20)\n"
        "    for i in range(0, len(data), 4096): data[i] = 1\n"
        "    os.write(tell, b'x'); time.sleep(20)\n"
        "for _ in range(4):\n"
        "    if os.fork() == 0:\n"
        "        threading.Thread(target=grow).start()\n"
        "        C.syscall(60, 0)\n"
        "for n in range(4): os.read(told, 1)\n"
        "time.sleep(1); print('BREACH 4 processes hold 1.2 GB')"
    ),
    "deleted files that are mapped": (
        "import mmap\n"
        "maps = []\n"
        "try:\n"
        "    for n in range(30):\n"
        "        with open('f', 'w+b') as f:\n"
        "            os.unlink('f'); f.write(bytes(9 << 20)); f.flush(); maps.append(mmap.mmap(f.fileno(), 0))\n"
        "        time.sleep(0.01)\n"
        "    time.sleep(1); print('BREACH 270 MB of deleted files')\n"
        "except OSError as error: print('stopped', error)"
    ),
    "shared memory": (
        "try:\n"
        "    with open('/dev/shm/x', 'wb') as f:\n"
        "        for _ in range(40): f.write(bytes(1 << 20))\n"
        "    print('BREACH')\n"
        "except OSError as error: print('stopped', error)"
    ),
    "a sparse file": "attempt('s', lambda: os.truncate(open('f', 'wb').name, 1 << 40) or 1)",
    "a large allocation": "attempt('f', lambda: os.posix_fallocate(os.open('f', 66, 0o600), 0, 1 << 30) or 1)",
    "many mappings": (
        "page = 4096\n"
        "C.mmap.restype = ctypes.c_void_p\n"
        "for _ in range(50):\n"
        "    if os.fork() == 0:\n"
        "        for n in range(60000): C.mmap(None, page, 1 + (n & 1), 34, -1, 0)\n"
        "        time.sleep(20); os._exit(0)\n"
        "time.sleep(6); print('BREACH' if os.getpid() < 0 else 'stopped')"
    ),
    "many threads": (
        "import threading\n"
        "try:\n"
        "    for _ in range(300): threading.Thread(target=time.sleep, args=(5,), daemon=True).start()\n"
        "    print('BREACH', flush=True); os._exit(0)\n"
        "except RuntimeError as error: print('stopped', error, flush=True); os._exit(0)"
    ),
    "many descriptors": "attempt('d', lambda: [os.dup(0) for _ in range(200)])",
    "processor time of children": (
        "for _ in range(8):\n    if os.fork() == 0:\n        while True: pass\ntime.sleep(60); print('BREACH')"
    ),
}

FORGERY = {
    "an answer on every descriptor": (
        "for n in range(3, 500):\n    attempt(n, lambda: os.write(n, b'{\"phases\": []}'))"
    ),
    "an answer to the first process": ("for n in range(64): attempt(n, lambda: open(f'/proc/1/fd/{n}', 'wb'))"),
    "the file that is run next": "open('main.py', 'w').write('print(1)'); print('done', flush=True); os.kill(os.getpid(), 9)",
    "another's answer": (
        "for pid in range(1, 300):\n"
        "    if pid == os.getpid() or not os.path.exists(f'/proc/{pid}'): continue\n"
        "    for n in range(8): attempt((pid, n), lambda: open(f'/proc/{pid}/fd/{n}', 'wb'))"
    ),
}

PROGRAMS = {
    f"{kind}: {name}": _TRY + code
    for kind, programs in {
        "escape": ESCAPE,
        "information": INFORMATION,
        "denial": DENIAL,
        "limits": LIMITS,
        "forgery": FORGERY,
    }.items()
    for name, code in programs.items()
}
SLOW = {name for name in PROGRAMS if name.startswith("limits: ")}

"""Programs that try to leave something in the interpreter that they were forked from, or to reach it."""

POISONS = {
    "builtins": "import builtins; builtins.print = builtins.len = lambda *a, **k: 0; builtins.poison = 1",
    "modules": "import sys, types; sys.modules['json'] = sys.modules['math'] = types.ModuleType('poison')",
    "functions of modules": "import os, io, codecs; os.getcwd = os.path.join = io.open = codecs.open = lambda *a: ''",
    "import system": "import sys; sys.meta_path[:] = []; sys.path_hooks[:] = []; sys.path_importer_cache.clear()",
    "path": "import sys; sys.path[:] = ['/poison']; sys.argv[:] = ['p']; sys.flags; sys.dont_write_bytecode = False",
    "hooks": "import sys; sys.excepthook = sys.unraisablehook = lambda *a: 0; sys.setrecursionlimit(50)",
    "tracing": "import sys; sys.settrace(lambda *a: None); sys.setprofile(lambda *a: None)",
    "fork hooks": "import os; os.register_at_fork(before=lambda: 1 / 0, after_in_child=lambda: os._exit(0))",
    "exit functions": "import atexit, os; atexit.register(os._exit, 0)",
    "environment": "import os; os.environ.clear(); os.environ['PYTHONPATH'] = '/p'; os.putenv('LD_PRELOAD', '/p')",
    "constants": (
        "import ctypes\nfor value in (5, True, None, '', (), b''):\n    ctypes.memset(id(value), 0x41, 16)\n"
    ),
    "own memory": "import ctypes; ctypes.memset(id(print) & ~0xFFFF, 0x41, 1 << 16)",
    "collector": "import gc; gc.disable(); gc.callbacks.append(print); gc.unfreeze(); gc.set_threshold(1)",
    "signals": (
        "import signal\n"
        "for n in range(1, 64):\n"
        "    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64)); signal.setitimer(signal.ITIMER_REAL, 0.01)\n"
    ),
    "directory and mask": "import os; os.mkdir('d'); os.chdir('d'); os.umask(0o777)",
    "descriptors": (
        "import os\n"
        "for n in range(3, 120):\n"
        "    try: os.dup2(0, n, inheritable=True)\n"
        "    except OSError: pass\n"
        "for n in range(3): os.close(n)\n"
    ),
    "writing to what is open": (
        "import os\n"
        "for n in range(3, 300):\n"
        "    for forged in (b'done', b'ready', b'r'):\n"
        "        try: os.write(n, forged); os._exit(77)\n"
        "        except OSError: pass\n"
    ),
    "limits": (
        "import resource\n"
        "for which in range(16):\n"
        "    try: resource.setrlimit(which, (0, 0))\n"
        "    except (OSError, ValueError): pass\n"
    ),
    "process properties": (
        "import ctypes\n"
        "for option, value in ((1, 9), (36, 1), (29, 10**9), (38, 1), (22, 1), (59, 0)):\n"
        "    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)\n"
    ),
    "threads": "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "a daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\n",
    "killing everybody": "import os; os.kill(-1, 9)",
    "killing the first": "import os\nfor n in (9, 15, 11, 19, 1): os.kill(1, n)\n",
    "killing the parent": "import os; os.kill(os.getppid(), 9)",
    "stopping the parent": "import os; os.kill(os.getppid(), 19)",
    "killing the group": "import os; os.killpg(0, 9)",
    "killing neighbours": (
        "import os\n"
        "for pid in range(1, 4194304 if os.path.exists('/proc/self') else 40000, 1):\n"
        "    if pid > 300 and os.path.exists('/proc/self'): break\n"
        "    try:\n"
        "        if pid != os.getpid(): os.kill(pid, 19)\n"
        "    except OSError: pass\n"
    ),
    "memory of the first": (
        "import os\n"
        "for pid in (1, os.getppid()):\n"
        "    for name in ('mem', 'fd/0', 'fd/3', 'fd/4', 'cwd/x', 'root/work/x', 'oom_score_adj'):\n"
        "        try: open(f'/proc/{pid}/{name}', 'r+b').close(); os._exit(77)\n"
        "        except OSError: pass\n"
    ),
    "the guard's code": (
        "import glob, os\n"
        "for path in glob.glob('/guard/**', recursive=True) + glob.glob('/tmp/flotilla-sandbox-*/code/**'):\n"
        "    try: open(path, 'ab').close(); os._exit(77)\n"
        "    except OSError: pass\n"
    ),
    "network": (
        "import fcntl, os, socket, struct\n"
        "pairs = [socket.socketpair() for _ in range(20)]\n"
        "address = struct.pack('=HH4s8x', 2, 0, bytes([10, 0, 0, 1]))\n"
        "for request, value in (\n"
        "    (0x8914, struct.pack('=h22x', 0x41)), (0x8916, address), (0x891C, address),\n"
        "    (0x8922, struct.pack('=i20x', 99)),\n"
        "    (0x8923, b'poison'.ljust(24, b'\\0')), (0x8924, struct.pack('=H22x', 772)), (0x8943, bytes(24)),\n"
        "    (0x89A0, b''), (0x89A2, b''), (0x890B, bytes(24)), (0x8955, bytes(24)), (0x89F1, bytes(24)),\n"
        "):\n"
        "    for name in (b'lo', b'poison'):\n"
        "        try: fcntl.ioctl(pairs[0][0], request, name.ljust(16, b'\\0') + value); os._exit(77)\n"
        "        except OSError: pass\n"
        "for family, kind in ((1, 1), (1, 2), (2, 1), (2, 2), (10, 1), (16, 3), (17, 3), (38, 5), (40, 1)):\n"
        "    try: socket.socket(family, kind); os._exit(77)\n"
        "    except OSError: pass\n"
        "for end in pairs[1]:\n"
        "    for do in (lambda: end.bind('\\0poison'), lambda: end.listen()):\n"
        "        try: do(); os._exit(77)\n"
        "        except OSError: pass\n"
    ),
    "objects of the kernel": (
        "import ctypes, os\n"
        "C = ctypes.CDLL(None)\n"
        "made = [C.shmget(1, 4096, 0o1666), C.semget(1, 1, 0o1666), C.msgget(1, 0o1666)]\n"
        "made += [C.syscall(240, b'p', 66, 0o666, 0)]\n"
        "made += [C.syscall(248, b'user', b'p', b'x', 1, -4), C.sethostname(b'poison', 6), C.unshare(0x10000000)]\n"
        "made += [C.setns(os.open('/proc/self/ns/user', 0), 0)] if os.path.exists('/proc/self') else []\n"
        "if any(number >= 0 for number in made): os._exit(77)\n"
        "for name in ('uid_map', 'gid_map', 'setgroups', 'projid_map'):\n"
        "    try: os.write(os.open('/proc/self/' + name, os.O_WRONLY), b'0 0 1'); os._exit(77)\n"
        "    except OSError: pass\n"
    ),
    "shared memory": "import os\nif os.path.isdir('/dev/shm'): open('/dev/shm/poison', 'w').write('x')",
    "no memory": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "deep recursion": "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "abort": "import os; os.abort()",
    "a crash": "import ctypes; ctypes.string_at(0)",
    "sudden end": "import os; os._exit(3)",
}
"""By what they change. Exit code 77: it got through to something of the server's."""

CHECK = """
import builtins, ctypes, fcntl, gc, hashlib, os, resource, signal, socket, stat, sys, threading
def descriptors():
    found = []
    for number in range(1024):
        try: found.append((number, stat.S_IFMT(os.fstat(number).st_mode)))
        except OSError: pass
    return found
def network():
    found = {}
    for name in ("unix", "dev", "route", "if_inet6", "ipv6_route", "arp", "tcp", "udp", "raw", "packet", "netlink"):
        try: lines = open("/proc/self/net/" + name).readlines()
        except OSError: lines = ["none"]
        found[name] = lines[1:] if name == "dev" else len(lines)
    pair = socket.socketpair()
    for request in (0x8912, 0x8913, 0x8915, 0x8927):
        try: found[request] = fcntl.ioctl(pair[0], request, b"lo" + bytes(38)).hex()
        except OSError as error: found[request] = str(error)
    return found
state = {
    "modules": sorted(sys.modules),
    "builtins": sorted((name, type(value).__name__) for name, value in vars(builtins).items()),
    "sys": [sys.path, sys.argv, str(sys.flags), len(sys.meta_path), len(sys.path_hooks), sys.getrecursionlimit()],
    "hooks": [sys.excepthook is sys.__excepthook__, sys.gettrace(), sys.getprofile()],
    "environment": dict(os.environ),
    "descriptors": descriptors(),
    "signals": [str(signal.getsignal(number)) for number in range(1, 64)],
    "mask": [str(signal.pthread_sigmask(signal.SIG_BLOCK, ())), signal.getitimer(signal.ITIMER_REAL)],
    "limits": [resource.getrlimit(number) for number in range(16)],
    "collector": [gc.isenabled(), gc.get_threshold(), len(gc.callbacks)],
    "directory": [os.getcwd(), os.listdir("."), os.umask(0)],
    "shared": os.listdir("/dev/shm") if os.getpid() < 100 else None,
    "network": network() if os.getpid() < 100 else None,
    "host": os.uname().nodename,
    "objects": [ctypes.CDLL(None).shmctl(0, 14, bytes(256)), ctypes.CDLL(None).semctl(0, 0, 19, bytes(256))],
    "constants": [5 + 5, True, None, "", (), b"", hashlib.sha256(b"x").hexdigest()],
    "threads": threading.active_count(),
    "processes": len([name for name in os.listdir("/proc") if name.isdigit()]) if os.getpid() < 100 else 0,
}
import json
print(json.dumps(state, default=str))
"""
"""Prints all of an interpreter's state that a program before it could have changed."""

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
    "shared memory": "import os\nif os.path.isdir('/dev/shm'): open('/dev/shm/poison', 'w').write('x')",
    "no memory": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "deep recursion": "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "abort": "import os; os.abort()",
    "a crash": "import ctypes; ctypes.string_at(0)",
    "sudden end": "import os; os._exit(3)",
}
"""By what they change. Exit code 77: it got through to something of the server's."""

CHECK = """
import builtins, gc, hashlib, os, resource, signal, stat, sys, threading
def descriptors():
    found = []
    for number in range(1024):
        try: found.append((number, stat.S_IFMT(os.fstat(number).st_mode)))
        except OSError: pass
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
    "constants": [5 + 5, True, None, "", (), b"", hashlib.sha256(b"x").hexdigest()],
    "threads": threading.active_count(),
    "processes": len([name for name in os.listdir("/proc") if name.isdigit()]) if os.getpid() < 100 else 0,
}
import json
print(json.dumps(state, default=str))
"""
"""Prints all of an interpreter's state that a program before it could have changed."""

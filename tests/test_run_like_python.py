"""`nan-detector run PROGRAM` against `python PROGRAM`: the same output, errors and exit status, for any program.

None of these programs imports torch: what is compared is how a program is run, which has to hold before any training.
"""

from __future__ import annotations

import os
import py_compile
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src"

PROBE = '''
"""What a program sees of itself."""
import builtins, os, sys
main = sys.modules["__main__"]
assert main.__dict__ is globals() and __builtins__ is builtins
for name in sorted(set(vars(main)) - {"builtins", "os", "sys", "main", "name"}):
    value = vars(main)[name]
    print(name, type(value).__name__ if name in ("__builtins__", "__loader__") else repr(value))
print(sys.argv, sys.path[0], os.getcwd(), "torch" in sys.modules, len(sys.path))
'''

#: Programs of one file, by what they are about.
PROGRAMS = {
    "sees_itself": PROBE,
    "exits_with_a_number": "import sys; sys.exit(7)",
    "exits_with_a_large_number": "import sys; sys.exit(258)",
    "exits_with_a_text": "import sys; sys.exit('that was it')",
    "exits_with_nothing": "raise SystemExit",
    "exits_with_true": "raise SystemExit(True)",
    "exits_with_a_tuple": "raise SystemExit((1, 'x'))",
    "raises": "def f():\n    raise ValueError('no')\nf()",
    "raises_from": "try:\n    {}['x']\nexcept KeyError as e:\n    raise RuntimeError('y') from e",
    "raises_in_between": "try:\n    {}['x']\nexcept KeyError as e:\n    raise RuntimeError('y')",
    "raises_a_group": "import sys\nif sys.version_info >= (3, 11):\n    raise ExceptionGroup('g', [ValueError(1)])",
    "is_no_python": "x = = 1",
    "is_in_latin_1": "# -*- coding: latin-1 -*-\nprint(ascii('ä'))",
    "has_an_excepthook": "import sys\nsys.excepthook = lambda k, e, t: print('hook', k, e, t.tb_lineno)\n1 / 0",
    "has_an_excepthook_that_exits": "import sys\nsys.excepthook = lambda *a: sys.exit(9)\n1 / 0",
    "has_an_excepthook_that_fails": "import sys\ndef hook(*a):\n    raise KeyError('x')\nsys.excepthook = hook\n1 / 0",
    "is_interrupted": "import atexit\natexit.register(print, 'bye')\nraise KeyboardInterrupt",
    "is_interrupted_by_a_signal": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass",
    "handles_an_interrupt": (
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    while True: pass\n"
        "except KeyboardInterrupt:\n    print('saved')"
    ),
    "is_terminated": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nwhile True: pass",
    "leaves_at_once": "import os, atexit\natexit.register(print, 'never')\nprint('x', flush=True)\nos._exit(5)",
    "has_things_to_do_at_exit": (
        "import atexit, sys\nclass A: pass\ndef bye(): print(A, __name__, sys.argv, sys.modules['__main__'].A is A)\n"
        "atexit.register(bye)\nprint('end')"
    ),
    "has_things_to_do_after_an_error": "import atexit\natexit.register(lambda: print('bye'))\nraise ValueError(1)",
    "leaves_a_thread_behind": (
        "import threading, time, atexit\natexit.register(print, 'exit')\n"
        "def work():\n    time.sleep(0.2)\n    print(threading.main_thread() is threading.current_thread())\n"
        "threading.Thread(target=work).start()\nprint('end')"
    ),
    "leaves_a_daemon_behind": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint('end')"
    ),
    "fails_in_a_thread": (
        "import threading\ndef work():\n    raise ValueError('in a thread')\n"
        "t = threading.Thread(target=work, name='t'); t.start(); t.join()"
    ),
    "pickles_its_own_classes": (
        "import pickle, dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\n"
        "data = pickle.dumps(P(3)); print(b'__main__' in data, pickle.loads(data))"
    ),
    "is_traced": (
        "import sys\nseen = []\ndef trace(frame, event, arg):\n    seen.append((frame.f_code.co_name, event))\n"
        "def f(): return 1\nsys.settrace(trace)\nf()\nsys.settrace(None)\nprint(seen)"
    ),
    "looks_at_its_frames": (
        "import inspect\ndef f(): return inspect.stack()[1].function, inspect.getsource(f)\nprint(f())"
    ),
    "runs_another_by_runpy": (
        "import runpy, sys\nsys.argv = ['other.py', 'x']\n"
        "print(runpy.run_path('other.py', run_name='__main__')['value'], __name__)"
    ),
    "starts_itself_again": (
        "import subprocess, sys\nif len(sys.argv) == 1:\n"
        "    print(subprocess.run([sys.executable, sys.argv[0], 'again'], capture_output=True, text=True))\n"
        "else:\n    print('again', __file__)"
    ),
    "is_a_notebook": (  # as nbconvert writes one
        "#!/usr/bin/env python\n# coding: utf-8\n\n# # A title\n\n# In[1]:\n\n\nimport os\n\n\n# In[2]:\n\n\n"
        "get = lambda: 3\nget()\n\n\n# In[ ]:\n\n\nprint(get())\n"
    ),
    "closes_its_streams": "import sys\nprint('x')\nsys.stderr.close()\nsys.exit(3)",
    "warns": "import warnings\nwarnings.warn('careful')\nwarnings.warn('old', DeprecationWarning)",
    "forks": (
        "import os, sys\npid = os.fork()\nif pid == 0:\n    sys.exit(4)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    ),
    **{
        f"has_{method}_children": (
            "import multiprocessing as mp, sys\n"
            "class Box:\n    def __init__(self, x): self.x = x\n"
            "def work(box):\n    return box.x + 1, __name__, sys.argv[1:], type(box).__module__\n"
            "def fail():\n    sys.exit(6)\n"
            "if __name__ == '__main__':\n"
            f"    context = mp.get_context('{method}')\n"
            "    with context.Pool(1) as pool:\n        print(pool.map(work, [Box(1), Box(2)]))\n"
            "    p = context.Process(target=fail); p.start(); p.join(); print(p.exitcode)\n"
        )
        for method in ("fork", "spawn", "forkserver")
    },
}


def run(folder: Path, *argv: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    return done.returncode, done.stdout, done.stderr


def same(folder: Path, *argv: str) -> tuple[int, str, str]:
    """What `python ARGV` gives; `nan-detector run ARGV` gives the same."""
    code, out, err = run(folder, *argv)
    watched = run(folder, "-m", "nan_detector", "run", *argv)
    # Python shows how `-m` is done; the program's own frames are all that anybody wants to see.
    err = re.sub(r'  File "<frozen runpy>", .*\n', "", err)
    assert tuple(map(_without_addresses, watched)) == (code, _without_addresses(out), _without_addresses(err))
    return code, out, err


def _without_addresses(value: int | str) -> int | str:
    return re.sub(" at 0x[0-9a-f]+", "", value) if isinstance(value, str) else value


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_script(name: str, tmp_path: Path):
    (tmp_path / "program.py").write_text(PROGRAMS[name], encoding="latin-1" if "latin" in name else "utf-8")
    (tmp_path / "other.py").write_text("import sys\nvalue = (__name__, sys.argv)")
    code, out, err = same(tmp_path, "program.py")
    assert out or err or code or name in ("exits_with_nothing",)


@pytest.mark.parametrize("name", ["sees_itself", "raises", "exits_with_a_text", "is_interrupted"])
def test_a_module(name: str, tmp_path: Path):
    (tmp_path / "program.py").write_text(PROGRAMS[name])
    same(tmp_path, "-m", "program", "--an", "argument")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_a_module(method: str, tmp_path: Path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text("import sys; print('package', sys.argv[0], __name__, flush=True)")
    (tmp_path / "pkg/program.py").write_text("from . import __name__ as package\n" + PROGRAMS[f"has_{method}_children"])
    code, out, _ = same(tmp_path, "-m", "pkg.program")
    assert code == 0 and "package -m pkg" in out


def test_a_package(tmp_path: Path):
    (tmp_path / "pkg/sub").mkdir(parents=True)
    (tmp_path / "pkg/__init__.py").write_text("value = 1")
    (tmp_path / "pkg/sub/__init__.py").write_text("")
    (tmp_path / "pkg/sub/__main__.py").write_text(f"from .. import value\nfrom . import __name__ as own\n{PROBE}")
    _, out, _ = same(tmp_path, "-m", "pkg.sub", "x")
    assert "'pkg.sub'" in out


def test_a_script_elsewhere(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/program.py").write_text(f"import neighbour\n{PROBE}")
    (tmp_path / "sub/neighbour.py").write_text("")
    same(tmp_path, "sub/program.py", "x", "--watch", "no", "-m")
    same(tmp_path, "./sub/../sub/program.py")
    same(tmp_path, str(tmp_path / "sub/program.py"))
    (tmp_path / "link.py").symlink_to(tmp_path / "sub/program.py")
    _, out, _ = same(tmp_path, "link.py")
    assert "link.py" in out and str(tmp_path / "sub ") in out


def test_a_folder_an_archive_and_bytecode(tmp_path: Path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app/__main__.py").write_text(f"import neighbour\n{PROBE}")
    (tmp_path / "app/neighbour.py").write_text("")
    same(tmp_path, "app", "x")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        for name in ("__main__.py", "neighbour.py"):
            archive.write(tmp_path / "app" / name, name)
    same(tmp_path, "app.zip", "x")
    py_compile.compile(str(tmp_path / "app/__main__.py"), cfile=str(tmp_path / "app/program.pyc"))
    same(tmp_path, "app/program.pyc", "x")


def test_a_package_that_fails_on_the_way_is_the_programs_own_failure(tmp_path: Path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text("import nothing_of_this_name")
    (tmp_path / "pkg/program.py").write_text("")
    code, out, err = run(tmp_path, "-m", "nan_detector", "run", "-m", "pkg.program")
    assert (code, out) == (1, "")
    assert err == (
        "Traceback (most recent call last):\n"
        f'  File "{tmp_path}/pkg/__init__.py", line 1, in <module>\n'
        "    import nothing_of_this_name\n"
        "ModuleNotFoundError: No module named 'nothing_of_this_name'\n"
    )


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("nope", "-m 'nope': there is no module of that name in {here} or on sys.path."),
        ("nope.below", "-m 'nope.below': there is no module of that name in {here} or on sys.path."),
        ("pkg", "-m 'pkg' is a package without a __main__.py: name a module in it."),
        ("train.py", "-m 'train.py': there is no module of that name in {here} or on sys.path. Leave -m away to run "
         "the file train.py."),
        ("..", "-m '..' is no module's full name: give one such as package.module."),
        ("", "-m '' is no module's full name: give one such as package.module."),
        ("pkg..x", "-m 'pkg..x': there is no module of that name in {here} or on sys.path."),
    ],
)  # fmt: skip
def test_a_module_that_is_not_there(name: str, line: str, tmp_path: Path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "train.py").write_text("")
    (tmp_path / "pkg/__init__.py").write_text("")
    code, out, err = run(tmp_path, "-m", "nan_detector", "run", "-m", name)
    assert (code, out) == (2, "")
    assert err == f"nan-detector: {line.format(here=tmp_path)}\n"


def test_nothing_is_written_where_nothing_trains(tmp_path: Path):
    (tmp_path / "program.py").write_text("print(1)")
    same(tmp_path, "program.py")
    assert [p.name for p in tmp_path.iterdir()] == ["program.py"]

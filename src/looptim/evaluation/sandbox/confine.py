"""What a process does to itself before it runs a program: limits, namespaces, Landlock, seccomp; needs no privilege.

References: landlock(7), seccomp(2), user_namespaces(7).
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import struct
import sys
import sysconfig
from pathlib import Path
from typing import Any

from . import syscalls

CONTAINED = frozenset({"landlock", "seccomp"})
"""Without these a program could read what its user can read, reach the network, or leave a process behind."""

_libc: Any = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


def confine(limits: dict[str, float]) -> list[str]:
    """Confine this process to the current folder for good, and return by which means that was possible."""
    _die_with_parent()
    means = {"limits": lambda: _limit(limits), "namespaces": _leave, "landlock": _landlock, "seccomp": _seccomp}
    return [name for name, apply in means.items() if apply()]


def _die_with_parent() -> None:
    if sys.platform == "linux":
        set_parent_death_signal, kill = 1, 9
        _libc.prctl(set_parent_death_signal, kill, 0, 0, 0)


def _limit(limits: dict[str, float]) -> bool:
    import resource

    def at_most(kind: int, value: float) -> None:
        _, hard = resource.getrlimit(kind)
        value = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
        resource.setrlimit(kind, (value, value))

    at_most(resource.RLIMIT_CORE, 0)
    at_most(resource.RLIMIT_FSIZE, limits["file_size"])
    at_most(resource.RLIMIT_NOFILE, 64)
    at_most(resource.RLIMIT_CPU, math.ceil(limits["seconds"]) + 2)
    # No process or thread besides this one; root is not bound by it.
    at_most(resource.RLIMIT_NPROC, 0)
    # macOS knows the limit and refuses it.
    if sys.platform != "darwin":
        at_most(resource.RLIMIT_AS, limits["memory"])
    return True


def _leave() -> bool:
    """Into namespaces with no network, no other's shared memory, and no power over this system, where that may be."""
    new_user, new_network, new_ipc = 0x10000000, 0x40000000, 0x08000000
    return sys.platform == "linux" and _libc.unshare(new_user | new_network | new_ipc) == 0


# Rights over files: execute, write, read, list; the rest is about making and removing them.
_WRITE, _READ, _LIST = 1 << 1, 1 << 2, 1 << 3
_REMOVE_FOLDER, _REMOVE_FILE, _MAKE_FOLDER, _MAKE_FILE = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_RENAME, _TRUNCATE = 1 << 13, 1 << 14
_OWN = _WRITE | _READ | _LIST | _REMOVE_FOLDER | _REMOVE_FILE | _MAKE_FOLDER | _MAKE_FILE | _RENAME | _TRUNCATE
_CREATE, _ADD, _RESTRICT = 444, 445, 446


def _landlock() -> bool:
    """Let files be read in Python's libraries and used in the current folder, and nothing else be reached."""
    if sys.platform != "linux":
        return False
    version = _libc.syscall(_CREATE, None, 0, 1)
    if version < 1:
        return False
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    # From version 4 on also TCP, from 6 on abstract sockets and signals to processes outside.
    attributes = struct.pack("=QQQ", files, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _libc.syscall(_CREATE, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    rules = dict.fromkeys(_libraries(), _READ | _LIST)
    rules |= {"/dev/null": _READ | _WRITE | _TRUNCATE, "/dev/zero": _READ, "/dev/urandom": _READ, ".": _OWN}
    for path, rights in rules.items():
        if os.path.exists(path):
            _add_rule(ruleset, path, rights & files)
    return _no_new_privileges() and _libc.syscall(_RESTRICT, ruleset, 0) == 0


def _libraries() -> list[str]:
    """Where an import may have to read: Python, its packages, and the libraries they are linked with."""
    python = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    system = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo"]
    return list(dict.fromkeys([*python, sysconfig.get_config_var("LIBDIR") or "/usr/lib", *system]))


def _add_rule(ruleset: int, path: str, rights: int) -> None:
    if not Path(path).is_dir():
        rights &= _READ | _WRITE | _TRUNCATE
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        path_beneath = 1
        _libc.syscall(_ADD, ruleset, path_beneath, struct.pack("=Qi", rights, handle), 0)
    finally:
        os.close(handle)


def _no_new_privileges() -> bool:
    set_no_new_privileges = 38
    return _libc.prctl(set_no_new_privileges, 1, 0, 0, 0) == 0


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))


def _seccomp() -> bool:
    """Refuse every system call that computing does not need, and those that reach another process."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in syscalls.ARCHITECTURES or sys.maxsize < 2**32:
        return False
    set_seccomp, mode_filter = 22, 2
    code = syscalls.program(machine, os.getpid())
    filter = _Filter(len(code) // 8, code)
    return _no_new_privileges() and _libc.prctl(set_seccomp, mode_filter, ctypes.byref(filter), 0, 0) == 0

"""The system calls that a program may make, as a seccomp filter: it computes, and works on files it could open."""

from __future__ import annotations

import errno
import struct

# Name, number on x86_64, number on aarch64 (- where there is none).
_FREE = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, close 3 57, lseek 8 62,
open 2 -, openat 257 56, creat 85 -, stat 4 -, lstat 6 -, fstat 5 80, newfstatat 262 79, statx 332 291,
access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, statfs 137 43, fstatfs 138 44,
getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, umask 95 166,
mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276,
ftruncate 77 46, fsync 74 82, fdatasync 75 83, fadvise64 221 223, sendfile 40 71, copy_file_range 326 285,
dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72,
mmap 9 222, munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233, brk 12 214,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137,
rt_sigsuspend 130 133, sigaltstack 131 132, pause 34 -, alarm 37 -, setitimer 38 103, getitimer 36 102,
restart_syscall 219 128, nanosleep 35 101, clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114,
gettimeofday 96 169, time 201 -, times 100 153, getrusage 98 165, sysinfo 99 179, uname 63 160, getcpu 309 168,
sched_yield 24 124, sched_getaffinity 204 123, getpid 39 172, getppid 110 173, gettid 186 178, getpgrp 111 -,
getpgid 121 155, getsid 124 156, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177,
getresuid 118 148, getresgid 120 150, getgroups 115 158, getrlimit 97 163, futex 202 98, set_robust_list 273 99,
set_tid_address 218 96, rseq 334 293, membarrier 324 283, arch_prctl 158 -, getrandom 318 278, exit 60 93,
exit_group 231 94
"""
_GUARDED = "kill 62 129, tgkill 234 131, prlimit64 302 261, fcntl 72 25, ioctl 16 29"

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""What a machine is called, and what its calls are marked with."""

# Of fcntl: F_SETOWN, F_SETSIG and F_SETOWN_EX let the kernel send signals to another process.
_SENDING = (8, 10, 15)

_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NUMBER, _MARK, _ARGUMENTS = 0, 4, 16


def numbers(machine: str) -> tuple[dict[str, int], dict[str, int]]:
    """The calls that are free and those that depend on their arguments, by name.

    >>> numbers("x86_64")[1]["kill"], numbers("aarch64")[1]["kill"]
    (62, 129)
    """
    column = 1 + list(ARCHITECTURES).index(machine)

    def read(table: str) -> dict[str, int]:
        rows = [row.split() for row in table.split(",")]
        return {row[0]: int(row[column]) for row in rows if row[column] != "-"}

    return read(_FREE), read(_GUARDED)


def program(machine: str, pid: int) -> bytes:
    """The filter, in the kernel's classic BPF, for the process `pid`; what it does not name fails with EPERM."""
    free, guarded = numbers(machine)
    refuse = [_step(_RETURN, _ERROR | errno.EPERM)]
    steps = [_step(_LOAD, _MARK), _step(_EQUAL, ARCHITECTURES[machine], 1, 0), *refuse, _step(_LOAD, _NUMBER)]
    for number in free.values():
        steps += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _ALLOW)]
    bodies = {
        # Signals go to the process itself alone, as abort() sends them.
        "kill": _only_if({0: pid}),
        "tgkill": _only_if({0: pid}),
        # Limits may be read, of the process itself, and not set.
        "prlimit64": _only_if({0: 0, 2: 0}),
        "fcntl": [_step(_LOAD, _ARGUMENTS + 8), *_unless(_SENDING), _step(_RETURN, _ALLOW)],
        # As for a file that is no terminal: asking is common and harmless, the rest of it is not.
        "ioctl": [_step(_RETURN, _ERROR | errno.ENOTTY)],
    }
    for name, body in bodies.items():
        steps += [_step(_EQUAL, guarded[name], 0, len(body)), *body]
    return b"".join([*steps, *refuse])


def _step(code: int, value: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jump_true, jump_false, value)


def _only_if(arguments: dict[int, int]) -> list[bytes]:
    """Allowed if the given arguments have the given values, in both halves of their 64 bits."""
    body: list[bytes] = []
    for index, value in arguments.items():
        for half, wanted in ((0, value), (4, 0)):
            body += [_step(_LOAD, _ARGUMENTS + 8 * index + half), _step(_EQUAL, wanted, 1, 0)]
            body += [_step(_RETURN, _ERROR | errno.EPERM)]
    return [*body, _step(_RETURN, _ALLOW)]


def _unless(values: tuple[int, ...]) -> list[bytes]:
    body: list[bytes] = []
    for value in values:
        body += [_step(_EQUAL, value, 0, 1), _step(_RETURN, _ERROR | errno.EPERM)]
    return body

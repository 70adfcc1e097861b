"""The system calls that a program from a response may make, as a seccomp filter. Imports no module of gspo_mega.

Every call that is not on the list fails with EPERM: no process, no program, no socket, no signal to another process, no
access to another process's memory, no change of a file's mode or owner, no mount, no key, no new name space. A thread
is allowed; its memory counts.
"""

import ctypes
import errno
import os
import platform
import struct

_ARCHITECTURE = 0xC000003E  # AUDIT_ARCH_X86_64
_X32 = 0x40000000
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_CLONE_THREAD, _CLONE_VFORK = 0x10000, 0x4000

# For x86_64, the only architecture supported here.
_CALLS = """
    read=0 write=1 close=3 stat=4 fstat=5 lstat=6 poll=7 lseek=8 mmap=9 mprotect=10 munmap=11 brk=12
    rt_sigaction=13 rt_sigprocmask=14 rt_sigreturn=15 pread64=17 pwrite64=18 readv=19 writev=20 access=21 pipe=22
    select=23 sched_yield=24 mremap=25 mincore=27 dup=32 dup2=33 pause=34 nanosleep=35 getitimer=36
    alarm=37 setitimer=38 getpid=39 sendfile=40 exit=60 wait4=61 uname=63 flock=73 truncate=76 ftruncate=77
    getcwd=79 chdir=80 fchdir=81 rename=82 mkdir=83 rmdir=84 link=86 unlink=87 symlink=88 readlink=89 umask=95
    gettimeofday=96 getrlimit=97 getrusage=98 sysinfo=99 times=100 getuid=102 getgid=104 geteuid=107 getegid=108
    getppid=110 getpgrp=111 getgroups=115 getresuid=118 getresgid=120 getpgid=121 getsid=124 rt_sigpending=127
    rt_sigtimedwait=128 rt_sigsuspend=130 sigaltstack=131 statfs=137 fstatfs=138 arch_prctl=158 gettid=186 time=201
    futex=202 sched_getaffinity=204 epoll_create=213 getdents64=217 set_tid_address=218 restart_syscall=219
    clock_gettime=228 clock_getres=229 clock_nanosleep=230 exit_group=231 epoll_wait=232 epoll_ctl=233 waitid=247
    mkdirat=258 newfstatat=262 unlinkat=263 renameat=264 linkat=265 symlinkat=266 readlinkat=267
    faccessat=269 pselect6=270 ppoll=271 set_robust_list=273 get_robust_list=274 epoll_pwait=281 eventfd2=290
    epoll_create1=291 dup3=292 pipe2=293 preadv=295 pwritev=296 getcpu=309 renameat2=316 getrandom=318
    copy_file_range=326 statx=332 rseq=334 close_range=436 faccessat2=439
"""
# kill and tgkill, for signals to itself only: the first argument must be the caller's pid; the last is the signal.
# Process groups reach beyond PID name spaces, process 1 of a name space is the server, and tkill can name any process's
# thread.
_KILL_CALL, _TGKILL = 62, 234
# Signals that a program may not send itself, so that an end or a stop by one of them means that somebody else sent it,
# such as the kernel when the machine's memory is exhausted. SIGKILL, SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU.
_FOREIGN = (9, 19, 20, 21, 22)
# These succeed and do nothing: the program's folder is thrown away, and time spent on a disk would count as the
# machine's.
_SYNCS = (26, 74, 75)  # msync, fsync, fdatasync
# A program must not be able to wait in the kernel as if for a disk: that would count as the machine's time, and a
# response could get no reward where it deserves 0. So: no membarrier, no vfork-like wait for a thread, no file that is
# synchronous or bypasses the page cache, and no page thrown out.
_OPEN, _OPENAT, _OPENAT2, _PREADV2, _PWRITEV2, _MADVISE = 2, 257, 437, 327, 328, 28
_O_DIRECT, _O_SYNC = 0x4000, 0x101000  # the latter with O_DSYNC
_ADVICE = (0, 1, 2, 3, 4, 8, 10, 11, 14, 15, 16, 17)  # how it will be read, DONTNEED, FREE, (NO)FORK, HUGEPAGE, DUMP
_SET_FLAGS = 4
_CLONE, _CLONE3, _IOCTL, _FCNTL, _PRCTL, _PRLIMIT = 56, 435, 16, 72, 157, 302
_IOCTLS = (0x5401, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
# Descriptors, flags, locks, and a pipe's size; not F_SETOWN, by which the kernel would signal other processes.
_FCNTLS = (0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1030, 1032)
_PRCTLS = (15, 0x53564D41)  # PR_SET_NAME, PR_SET_VMA (names of malloc's arenas)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def problem():
    """Return why no filter can be made on this machine, or None."""
    machine = platform.machine()
    return None if machine == "x86_64" else f"the list of system calls is for x86_64; this machine is {machine}"


def restrict(libc):
    """Filter this process's calls for good. Raises OSError."""
    if libc.prctl(38, 1, 0, 0, 0) != 0:  # PR_SET_NO_NEW_PRIVS
        raise OSError(ctypes.get_errno(), "no_new_privs")
    code = b"".join(_instructions(os.getpid()))
    held = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(held, ctypes.c_void_p))
    if libc.prctl(22, 2, ctypes.byref(program), 0, 0) != 0:  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise OSError(ctypes.get_errno(), "seccomp")


def _instructions(own_pid):
    def step(code, value, if_true=0, if_false=0):
        return struct.pack("HBBI", code, if_true, if_false, value)

    def give(error):
        return step(_RETURN, _ERRNO | error)

    allow = step(_RETURN, _ALLOW)

    def only(call, argument, values, error):
        """Allow a call whose argument's low word is one of the values."""
        inner = [step(_LOAD, _ARGUMENTS + 8 * argument)]
        for value in values:
            inner += [step(_EQUAL, value, 0, 1), allow]
        inner.append(give(error))
        return [step(_EQUAL, call, 0, len(inner)), *inner]

    def to_itself(call, signal):
        """Allow a call whose first argument's low word, all that the kernel looks at, is the caller's own pid."""
        inner = [step(_LOAD, _ARGUMENTS), step(_EQUAL, own_pid, 1, 0), give(errno.EPERM)]
        inner.append(step(_LOAD, _ARGUMENTS + 8 * signal))
        for number in _FOREIGN:
            inner += [step(_EQUAL, number, 0, 1), give(errno.EPERM)]
        inner.append(allow)
        return [step(_EQUAL, call, 0, len(inner)), *inner]

    def without(call, argument, bits, error):
        """Allow a call whose argument's low word has none of the bits."""
        inner = [step(_LOAD, _ARGUMENTS + 8 * argument), step(_ANY_BIT, bits, 0, 1), give(error), allow]
        return [step(_EQUAL, call, 0, len(inner)), *inner]

    yield step(_LOAD, _ARCH)
    yield step(_EQUAL, _ARCHITECTURE, 1, 0)
    yield step(_RETURN, _KILL)
    yield step(_LOAD, _NUMBER)
    yield step(_AT_LEAST, _X32, 0, 1)
    yield step(_RETURN, _KILL)
    for name in _CALLS.split():
        number = int(name.partition("=")[2])
        yield step(_EQUAL, number, 0, 1)
        yield allow
    for number in _SYNCS:
        yield from [step(_EQUAL, number, 0, 1), give(0)]
    # glibc falls back to clone, whose flags a filter can read.
    yield from [step(_EQUAL, _CLONE3, 0, 1), give(errno.ENOSYS)]
    yield from [step(_EQUAL, _CLONE, 0, 5), step(_LOAD, _ARGUMENTS), step(_ANY_BIT, _CLONE_THREAD, 0, 2)]
    yield from [step(_ANY_BIT, _CLONE_VFORK, 1, 0), allow, give(errno.EPERM)]
    yield from [step(_EQUAL, _OPENAT2, 0, 1), give(errno.ENOSYS)]  # its flags are in memory, which a filter cannot read
    yield from without(_OPEN, 1, _O_DIRECT | _O_SYNC, errno.EINVAL)
    yield from without(_OPENAT, 2, _O_DIRECT | _O_SYNC, errno.EINVAL)
    yield from without(_PREADV2, 5, 0xFFFFFFFF, errno.EOPNOTSUPP)
    yield from without(_PWRITEV2, 5, 0xFFFFFFFF, errno.EOPNOTSUPP)
    yield from only(_MADVISE, 2, _ADVICE, errno.EINVAL)
    inner = [step(_LOAD, _ARGUMENTS + 8), step(_EQUAL, _SET_FLAGS, 0, 4), step(_LOAD, _ARGUMENTS + 16)]
    inner += [step(_ANY_BIT, _O_DIRECT, 0, 1), give(errno.EPERM), allow]
    yield from [step(_EQUAL, _FCNTL, 0, len(inner)), *inner, step(_LOAD, _NUMBER)]
    yield from to_itself(_KILL_CALL, 1)
    yield from to_itself(_TGKILL, 2)
    yield from only(_IOCTL, 1, _IOCTLS, errno.ENOTTY)
    yield from only(_FCNTL, 1, _FCNTLS, errno.EPERM)
    yield from only(_PRCTL, 0, _PRCTLS, errno.EPERM)
    # Limits may be read, not set: the third argument is a pointer of two words.
    yield from [step(_EQUAL, _PRLIMIT, 0, 6), step(_LOAD, _ARGUMENTS + 16), step(_EQUAL, 0, 0, 3)]
    yield from [step(_LOAD, _ARGUMENTS + 20), step(_EQUAL, 0, 0, 1), allow, give(errno.EPERM)]
    yield give(errno.EPERM)

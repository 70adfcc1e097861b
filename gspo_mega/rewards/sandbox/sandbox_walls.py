"""Restrict what a program from a response may see and reach, by a root of its own in name spaces or by Landlock.
Imports no module of gspo_mega.

In name spaces a program sees no other process, no network and no /proc. Of the machine's files it sees only the folders
that Python needs, read-only, and a few devices. With Landlock it may read the same and nothing else.
"""

import ctypes
import os
import platform
import struct
import sys

libc = ctypes.CDLL(None, use_errno=True)

_NEW_USER, _NEW_MOUNT, _NEW_PID, _NEW_NET, _NEW_IPC, _NEW_UTS = (
    0x10000000,
    0x20000,
    0x20000000,
    0x40000000,
    0x8000000,
    0x4000000,
)
_READ_ONLY, _NO_SUID, _NO_DEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MOUNT_SETATTR, _PIVOT_ROOT = 442, 155
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
LEAST_LANDLOCK = 3  # older versions do not cover truncating a file
_DEVICES = ("null", "zero", "full", "random", "urandom")
_READS = 1 << 2 | 1 << 3  # a file's content, a folder's names
_EXECUTES = 1


def readable():
    """Return the folders and files of the machine that Python and its libraries need."""
    wanted = ["/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives"]
    wanted += [sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable)), *sys.path]
    found = []
    for path in sorted({os.path.abspath(path) for path in wanted if os.path.exists(path)}):
        if path != "/" and not any(path.startswith(f"{above}/") for above in found):
            found.append(path)
    return found


def enter_name_spaces():
    """Create name spaces and continue in their first process, with a root of its own.

    The calling process waits for that process and exits as it does. Raises OSError if the kernel refuses; the caller is
    then unchanged. The name spaces are made in a fork, because a process whose PID name space has lost its first
    process cannot fork.
    """
    user, group = os.getuid(), os.getgid()
    came, told = os.pipe()
    outer = os.fork()
    if outer == 0:
        os.close(came)
        try:
            libc.prctl(1, 9, 0, 0, 0)  # it ends with the process that waits for it
            _call(libc.unshare(_NEW_USER | _NEW_MOUNT | _NEW_PID | _NEW_NET | _NEW_IPC | _NEW_UTS), "new name spaces")
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"{user} {user} 1")
            _write("/proc/self/gid_map", f"{group} {group} 1")
            first = os.fork()
            if first == 0:
                libc.prctl(1, 9, 0, 0, 0)
                _make_root()
                os.close(told)
                return
        except OSError as error:
            os.write(told, str(error).encode())
            os._exit(1)
        os.close(told)
        _exit_as(first)
    os.close(told)
    said = b""
    while piece := os.read(came, 4096):
        said += piece
    os.close(came)
    if said:
        os.waitpid(outer, 0)
        raise OSError(0, said.decode())
    _exit_as(outer)


def _exit_as(process):
    """Wait for a process and exit as it does. Input and output belong to that process, and end with it."""
    libc.prctl(1, 9, 0, 0, 0)
    for number in (0, 1):
        os.close(number)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) & 0xFF)


def _make_root():
    """Enter a root of its own: an empty one in memory, into which the paths of `readable` are bound read-only."""
    shown = readable()
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _NO_SUID | _NO_DEV, "size=1m,mode=755")
    os.mkdir("/tmp/before")
    os.chdir("/tmp")
    _call(_system(_PIVOT_ROOT, b".", b"before"), "pivot_root")
    os.chdir("/")
    for path in shown:
        before = f"/before{path}"
        if os.path.islink(before):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(os.readlink(before), path)
        else:
            _bind(before, path)
            _freeze(path)
    for name in _DEVICES:
        if os.path.exists(f"/before/dev/{name}"):
            _bind(f"/before/dev/{name}", f"/dev/{name}")
    os.makedirs(own_place(), exist_ok=True)
    _call(libc.umount2(b"/before", 2), "leaving the machine's root")  # MNT_DETACH
    os.rmdir("/before")
    _mount(None, "/", None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEV)


def own_place():
    """Return where a program's own folder is: /tmp, or /own if Python itself lies below /tmp and would be hidden."""
    return "/own" if any(f"{path}/".startswith("/tmp/") for path in readable()) else "/tmp"


def own_folder(num_bytes):
    """Mount an empty folder in memory on `own_place`, for this process only. Raises OSError."""
    place = own_place()
    _call(libc.unshare(_NEW_MOUNT), "a folder of its own")
    _mount("tmpfs", place, "tmpfs", _NO_SUID | _NO_DEV, f"size={num_bytes},nr_inodes=4096,mode=700")
    return place


def drop_capabilities():
    """Give up every capability, for good. Raises OSError."""
    for capability in range(64):
        if libc.prctl(24, capability, 0, 0, 0) != 0:  # PR_CAPBSET_DROP
            break
    libc.prctl(47, 4, 0, 0, 0)  # PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _call(libc.capset(ctypes.create_string_buffer(header), ctypes.create_string_buffer(none)), "capset")


def landlock_version():
    """Return the kernel's version of Landlock, or 0 without it."""
    return max(0, _system(_LANDLOCK_CREATE, None, 0, 1))


def restrict_with_landlock(folder):
    """Allow this process to read only what `readable` names, to write only below `folder`, and to read and write a few
    devices; from Landlock 4 on, forbid it to bind and connect TCP sockets. Raises OSError.
    """
    version = landlock_version()
    everything = (1 << (16 if version >= 5 else 15)) - 1
    rules = struct.pack("Q", everything)
    if version >= 4:
        rules += struct.pack("Q", 3)  # binding and connecting
    if version >= 6:
        rules += struct.pack("Q", 3)  # abstract sockets and signals stay inside
    made = _system(_LANDLOCK_CREATE, ctypes.create_string_buffer(rules, len(rules)), len(rules), 0)
    _call(min(made, 0), "landlock_create_ruleset")
    devices = [f"/dev/{name}" for name in _DEVICES]
    for path, rights in [
        *((path, _READS | _EXECUTES) for path in readable()),
        *((path, 1 << 2 | 1 << 1) for path in devices),
        (folder, everything & ~_EXECUTES),
    ]:
        if not os.path.exists(path):
            continue
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            rights &= 1 | 1 << 1 | 1 << 2 | 1 << 14
        rule = struct.pack("<Qi", rights, place)
        _call(_system(_LANDLOCK_ADD, made, 1, ctypes.create_string_buffer(rule, len(rule)), 0), "landlock_add_rule")
        os.close(place)
    _call(libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    _call(_system(_LANDLOCK_RESTRICT, made, 0), "landlock_restrict_self")
    os.close(made)


def kernel():
    return f"Linux {platform.release()}, Landlock {landlock_version() or 'absent'}"


def _system(number, *arguments):
    """Make a system call for which the C library has no function."""
    given = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    return libc.syscall(ctypes.c_long(number), *given)


def _bind(source, target):
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, None, _BIND | _REC)


def _freeze(path):
    """Make a path read-only, with everything that is mounted below it."""
    attributes = struct.pack("QQQQ", 1 | 2 | 4, 0, 0, 0)  # MOUNT_ATTR_RDONLY, NOSUID, NODEV
    done = _system(_MOUNT_SETATTR, -100, path.encode(), 0x8000, ctypes.create_string_buffer(attributes, 32), 32)
    _call(done, f"read-only {path}")


def _mount(source, target, kind, flags, options=None):
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    given = None if options is None else options.encode()
    _call(libc.mount(*texts, ctypes.c_ulong(flags), given), f"mount {target}")


def _call(result, what):
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _write(path, text):
    with open(path, "w", encoding="ascii") as file:
        file.write(text)

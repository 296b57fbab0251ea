"""Seccomp filter (classic BPF) that refuses system calls to sandboxed programs.

Namespaces leave three gaps. No limit applies to memory outside of processes and file systems (memfd, System V). Network
namespaces do not isolate some socket families (vsock reaches the host of a virtual machine). Many system calls for
administrators only have been used to escape from containers.
"""

import errno
import struct

from slipstream.errors import SandboxError

MACHINES = ("x86_64", "aarch64")
REFUSED_CALLS = {
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "setns": (308, 268), "unshare": (272, 97),
    "syslog": (103, 116), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "open_by_handle_at": (304, 265), "swapon": (167, 224),
    "reboot": (169, 142),
}  # fmt: skip
"""Numbers of refused system calls, in the order of `MACHINES`."""
ARCHITECTURE = (0xC000003E, 0xC00000B7)
CLONE3 = 435
"""Number of system call clone3, whose arguments a filter cannot read. If clone3 is refused, libraries use `clone`."""
SOCKETS = ((41, 53), (198, 199))
"""Numbers of the system calls socket and socketpair."""
PRCTL = (157, 167)
SET_PDEATHSIG = 1
"""Option of prctl that would let a program survive its parent."""
SETSOCKOPT = (54, 208)
SOL_SOCKET, SO_SNDBUF = 1, 7
"""Option for the send buffer's size. The filter skips it, so that the number of sockets bounds their memory."""
SOCKET_FAMILIES = (1, 2, 10)
"""Allowed socket families: Unix, IPv4, IPv6."""
X32 = 0x40000000
"""First number of the x32 system calls on x86_64."""

LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER, ARCH, ARGUMENT, SECOND, THIRD = 0, 4, 16, 24, 32
"""Offsets in `struct seccomp_data`; the last three are the lower halves of the first three arguments."""
ALLOW, ERRNO = 0x7FFF0000, 0x00050000


def program(machine: str) -> bytes:
    """Return the filter for bubblewrap's option --seccomp. `machine` is the output of `uname -m`."""
    if machine not in MACHINES:
        raise SandboxError(
            f"bubblewrap: there is no filter for {machine}: run code on x86_64 or aarch64, or on a server by its URL"
        )
    at = MACHINES.index(machine)
    code = [(LOAD, 0, 0, ARCH), (EQUAL, 1, 0, ARCHITECTURE[at]), _fail(errno.EPERM), (LOAD, 0, 0, NUMBER)]
    code += [(AT_LEAST, 0, 1, X32), _fail(errno.ENOSYS), (EQUAL, 0, 1, CLONE3), _fail(errno.ENOSYS)]
    for numbers in REFUSED_CALLS.values():
        code += [(EQUAL, 0, 1, numbers[at]), _fail(errno.EPERM)]
    code += [(EQUAL, 0, 4, PRCTL[at]), (LOAD, 0, 0, ARGUMENT), (EQUAL, 0, 1, SET_PDEATHSIG), _fail(errno.EPERM)]
    code += [(LOAD, 0, 0, NUMBER)]
    code += [(EQUAL, 0, 6, SETSOCKOPT[at]), (LOAD, 0, 0, SECOND), (EQUAL, 0, 3, SOL_SOCKET), (LOAD, 0, 0, THIRD)]
    code += [(EQUAL, 0, 1, SO_SNDBUF), _fail(0), (LOAD, 0, 0, NUMBER)]
    first, second = SOCKETS[at]
    code += [(EQUAL, 2, 0, first), (EQUAL, 1, 0, second), (RETURN, 0, 0, ALLOW), (LOAD, 0, 0, ARGUMENT)]
    for family in SOCKET_FAMILIES:
        code += [(EQUAL, 0, 1, family), (RETURN, 0, 0, ALLOW)]
    code += [_fail(errno.EAFNOSUPPORT)]
    return b"".join(struct.pack("<HBBI", *each) for each in code)


def _fail(number: int) -> tuple[int, int, int, int]:
    return RETURN, 0, 0, ERRNO | number

"""A file of gpupoold's that one other user may read, and nobody else: by an access control list."""

from __future__ import annotations

import errno
import os
import struct

_NAME = "system.posix_acl_access"
_VERSION, _NO_ID = 2, 0xFFFFFFFF
#: linux/posix_acl.h
_USER_OBJ, _USER, _GROUP_OBJ, _MASK, _OTHER = 1, 2, 4, 16, 32
_READ, _WRITE = 4, 2


def let_read(fd: int, uid: int) -> None:
    """Lets the user read the file of mode 0600, and not write it, as its owner could.

    Where the file system has no access control lists the user becomes its owner. Raises OSError.
    """
    entries = [
        (_USER_OBJ, _READ | _WRITE, _NO_ID),
        (_USER, _READ, uid),
        (_GROUP_OBJ, 0, _NO_ID),
        (_MASK, _READ, _NO_ID),
        (_OTHER, 0, _NO_ID),
    ]
    packed = b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(fd, _NAME, struct.pack("<I", _VERSION) + packed)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        os.fchown(fd, uid, -1)

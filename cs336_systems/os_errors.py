"""What the system refused, in words: which file, why, and what helps against that cause."""

import errno
from collections.abc import Mapping

_REMEDIES: Mapping[int, str] = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "stay within the quota, or have it raised",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EROFS: "make the file system writable",
    errno.EACCES: "change the permissions",
    errno.EPERM: "change the permissions",
    errno.ENOENT: "put back what was moved or removed",
    errno.ENOTDIR: "move away the file that stands in the place of a directory",
    errno.EEXIST: "move away the file that stands in the place of a directory",
    errno.ESTALE: "put back what was moved or removed",
    errno.EIO: "check the disk and its connection",
}


def remedy(error: OSError) -> str | None:
    """What helps against the cause, or None where that is not known."""
    return None if error.errno is None else _REMEDIES.get(error.errno)


def in_words(error: OSError) -> str:
    """The file, what is wrong with it, and what to do, in one line."""
    what = error.strerror or str(error)
    named = f"{error.filename}: {what}" if error.filename is not None else what
    known = remedy(error)
    return named if known is None else f"{named}; {known} and run the same command again"

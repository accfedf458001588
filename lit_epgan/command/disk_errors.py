"""What a disk that is full, read-only or out of reach makes of a run, in one sentence."""

import errno

from lit_epgan.errors import UserError

REMEDIES = {
    errno.ENOSPC: "Make room there",
    errno.EDQUOT: "Make room within your quota there",
    errno.EFBIG: "Raise the limit of a file's size (ulimit -f)",
    errno.EROFS: "That place can only be read: name another with --trainer.default_root_dir",
}
OF_THE_DISK = {*REMEDIES, errno.ENAMETOOLONG, errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.ENOLCK}


def disk_error(error: BaseException) -> str | None:
    """What could not be written or read, why, and what to do; None where no file is the cause.

    An error that another one followed on the way out, as where a logger closes, counts too.
    """
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, UserError):
        if isinstance(seen, OSError) and (seen.filename or seen.errno in OF_THE_DISK):
            what = seen.filename2 or seen.filename or "A file that a library writes"
            remedy = REMEDIES.get(seen.errno or 0)
            return f"{what} could not be written: {seen.strerror}. {remedy}." if remedy else f"{what}: {seen.strerror}."
        hidden = seen.__context__ if isinstance(seen, OSError | RuntimeError) else None
        seen = seen.__cause__ or hidden
    return None

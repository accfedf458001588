"""A client's data that cannot be read: whose they are, and which record."""

from collections.abc import Iterator
from typing import Any

from lit_epgan.datamodules.clients import Client
from lit_epgan.errors import UserError
from lit_epgan.listing import few


def readable(
    client: Client, name: str, local_steps: int | None, local_epochs: int, *stream: int | str
) -> Iterator[Any]:
    """The client's batches, as its ``batches`` gives them.

    Args:
        client: whose they are.
        name: the client's.
        local_steps, local_epochs: how many batches are asked for.
        stream: names the random stream that they are drawn from.

    Raises:
        UserError: its data set, its collate function or its loader raised; that exception is the cause.
    """
    number = 0
    try:
        for batch in client.batches(local_steps, local_epochs, *stream):
            yield batch
            number += 1
    except UserError:
        raise
    except Exception as error:  # whatever a data set raises
        ended = "exited unexpectedly" in str(error)  # a loader's worker: what ended it might end this process too
        records = [] if ended else client.culprits(number, local_steps, local_epochs, *stream)
        raise UserError(
            f"client {name!r}: {_what(records)} cannot be read: {_summary(error)}. Mend the data, or leave them out."
        ) from error


def _what(records: list[int]) -> str:
    if not records:
        return "a batch"
    return f"record {records[0]}" if len(records) == 1 else f"a batch of the records {few(list(map(str, records)))}"


def _summary(error: Exception) -> str:
    """The exception in a line; one of a loader's worker ends with the original one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "Original Traceback" in str(error):
        return lines[-1].rstrip(".")
    return ": ".join([type(error).__name__, *lines[:1]]).rstrip(".")

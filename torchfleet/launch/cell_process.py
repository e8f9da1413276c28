"""`python -m torchfleet.launch.cell_process`: calls the function that fleet.notebook.run passed to this process.

Arguments: the descriptor of the inherited file with the call, then two comma-separated lists of descriptors: the files
for the results of the workers, and those for the results of the servers.
"""

from __future__ import annotations

import os
import sys
import time
import traceback

import torchfleet as fleet
from torchfleet.api import process_role
from torchfleet.launch.handover import Failure, loaded, read_call, write_failure, write_outcome


def main() -> None:
    call, workers, servers = sys.argv[1:]
    is_server = os.environ["FLEET_ROLE"] == "SERVER"
    index = int(os.environ["FLEET_SERVER_INDEX" if is_server else "FLEET_WORKER_INDEX"])
    file = int((servers if is_server else workers).split(",")[index])
    try:
        function, args, kwargs = loaded(read_call(int(call)))
        value = function(*args, **kwargs)
        write_outcome(file, None if is_server else value, "what the function returned")
        if process_role.is_under_way():  # the worker is done, and servers wait until every worker has stopped
            fleet.stop_worker()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            write_outcome(file, None, "nothing")
            raise
        _fail(file, error)


def _fail(file: int, error: BaseException) -> None:
    """Write the traceback for the notebook and to the log, and end this process."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next  # start at the user's function: our own frames do not help
    text = "".join(traceback.format_exception(type(error), error, frames))
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    write_failure(file, Failure(summary, text, time.time()))
    sys.stderr.write(text)
    sys.stderr.flush()
    sys.stdout.flush()
    sys.exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


if __name__ == "__main__":
    main()

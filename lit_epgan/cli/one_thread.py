"""Loaded first in the process that runs are forked from: its libraries read these variables when they are loaded."""

import os

from lit_epgan.cli.study_run import ONE_THREAD

os.environ.update(ONE_THREAD)

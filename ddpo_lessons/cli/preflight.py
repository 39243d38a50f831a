"""`ddpo-lessons preflight`: print what `checks.preflight` finds in the first epoch of a run."""

import tempfile

from ddpo_lessons.checks import preflight
from ddpo_lessons.cli import train
from ddpo_lessons.cli.messages import terminal_width
from ddpo_lessons.cli.options import Preflight
from ddpo_lessons.data.folders import find_images


def run(arguments: Preflight) -> int:
    """Print a line per check; return 0, or 1 if one failed."""
    images = None if arguments.images is None else find_images(arguments.images)
    with tempfile.TemporaryDirectory() as folder:  # another run may be in the folder that the flags name
        arguments.settings |= {"output_dir": folder, "resume_from": "", "log_with": None}
        findings = preflight(train.make_trainer(arguments, images))
    print(findings.text(terminal_width()))
    return int(bool(findings.failed))

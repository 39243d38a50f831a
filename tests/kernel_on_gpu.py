"""What a kernel begins with in `make test`, by PYTHONSTARTUP: a machine with a GPU, which is made up.

nbval runs every lesson so. A lesson that lets accelerate choose its device ends in an error, because all of
them stay on the CPU. Lesson 13, which asks for a GPU, hears that there is none. `make notebooks` and readers
run them without this file.
"""

import sys
from pathlib import Path
from unittest import mock

sys.path.append(str(Path(__file__).parent))

from fake_device import fake_device

machine = fake_device(is_refused=True)
machine.__enter__()  # until the kernel ends
available = mock.patch("torch.cuda.is_available", return_value=True)
available.start()


def in_small() -> bool:
    """Take the GPU away from the kernel that asks for it."""
    available.stop()
    return False


mock.patch("ddpo_lessons.lessons.has_gpu", in_small).start()

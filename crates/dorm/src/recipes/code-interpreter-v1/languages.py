"""Which languages there are, and how the kernel of each is started."""

import os
import sys

from kernel_ipython import IPythonKernel
from kernel_pipes import BashKernel, NodeKernel

HERE = os.path.dirname(os.path.abspath(__file__))
NAMES = ["python", "javascript", "typescript", "bash"]
OTHER_NAMES = {"python3": "python", "py": "python", "js": "javascript", "ts": "typescript", "sh": "bash"}


def named(language):
    language = str(language).lower()
    language = OTHER_NAMES.get(language, language)
    return language if language in NAMES else None


async def start(language, cwd):
    match language:
        case "python":
            startup = os.path.join(HERE, "startup.py")
            line = f"import runpy; runpy.run_path({startup!r})['set_up'](get_ipython(), {HERE!r}); del runpy"
            options = {"HistoryManager.enabled": False, "InteractiveShell.colors": "nocolor", "InteractiveShellApp.exec_lines": line}
            command = [sys.executable, "-m", "ipykernel_launcher", *(f"--{name}={value}" for name, value in options.items())]
            return await IPythonKernel.start(command, cwd)
        case "bash":
            return await BashKernel.start(cwd)
        case _:
            return await NodeKernel.start(cwd, script=os.path.join(HERE, "kernel.js"), language=language)

"""What a kernel says, in the form that clients read."""

import signal
import time

FIELDS = {
    "text/plain": "text", "text/html": "html", "text/markdown": "markdown", "image/svg+xml": "svg", "image/png": "png",
    "image/jpeg": "jpeg", "application/pdf": "pdf", "text/latex": "latex", "application/json": "json",
    "application/javascript": "javascript", "e2b/data": "data", "e2b/chart": "chart",
}


def stream(name, text):
    return {"type": name, "text": text, "timestamp": time.time_ns()}


def failure(name, value, traceback=None):
    return {"type": "error", "name": name, "value": value, "traceback": traceback or f"{name}: {value}"}


def kernel_ended(status):
    why = f"signal {signal.Signals(-status).name}" if status is not None and status < 0 else f"status {status}"
    return failure("KernelEnded", f"the kernel ended with {why}; what it held is gone, and the next code starts it anew")


def count(number):
    return {"type": "number_of_executions", "execution_count": number}


def result(bundle, is_main):
    """From a bundle of representations by their types."""
    output = {"type": "result", "is_main_result": is_main}
    extra = {}
    for kind, value in bundle.items():
        if isinstance(value, list) and all(isinstance(line, str) for line in value):
            value = "".join(value)
        if kind in FIELDS:
            if value not in (None, {}):
                output[FIELDS[kind]] = value
        else:
            extra[kind] = value
    if extra:
        output["extra"] = extra
    # A string is shown as it is, not as one would write it down.
    text = output.get("text", "")
    if len(text) >= 2 and text[0] in "'\"" and text[-1] == text[0]:
        output["text"] = text[1:-1]
    return output

"""Runs in every Python kernel before anything else: adds what clients tabulate or draw themselves to the results, and bounds what is
kept of what is printed."""


def set_up(shell, folder):
    import contextlib
    import importlib.util
    import math
    import os
    import sys

    from IPython.core.formatters import BaseFormatter
    from traitlets import ObjectName, Unicode

    # What is printed is published five times a second, however much that is, unless it is told before.
    most_unpublished = 1 << 20
    # Nobody reads longer tables; they are in the HTML in extracts.
    most_rows = 10_000
    replaced = []

    def bound(stream):
        schedule = stream._schedule_flush

        def schedule_or_flush():
            schedule()
            with stream._buffer_lock:
                unpublished = sum(buffer.tell() for buffer in stream._buffers.values())
            if unpublished > most_unpublished:
                stream.flush()

        # Not `write`, which IPython exchanges and puts back for every cell.
        stream._schedule_flush = schedule_or_flush

    def enter_env(env):
        replaced.append({name: os.environ.get(name) for name in env})
        os.environ.update(env)

    def leave_env():
        for name, value in replaced.pop().items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def plain(value):
        """As JSON can hold it."""
        if hasattr(value, "isoformat"):
            return None if value != value else value.isoformat()
        if hasattr(value, "item"):
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value if isinstance(value, (str, int, float, type(None))) else str(value)

    def table(frame):
        if len(frame) > most_rows:
            return None
        return {str(name): [plain(value) for value in column] for name, column in frame.items()}

    def chart(figure):
        spec = importlib.util.spec_from_file_location("code_interpreter_charts", os.path.join(folder, "charts.py"))
        charts = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(charts)
        # There are figures of which it can make nothing. Their picture is there all the same.
        with contextlib.suppress(Exception):
            return charts.of_figure(figure)

    class DataFormatter(BaseFormatter):
        format_type = Unicode("e2b/data")
        print_method = ObjectName("_repr_e2b_data_")
        _return_type = dict

    class ChartFormatter(BaseFormatter):
        format_type = Unicode("e2b/chart")
        print_method = ObjectName("_repr_e2b_chart_")
        _return_type = dict

        def __call__(self, shown):
            # Not by the type, as others: matplotlib takes figures out of all formatters.
            figures = getattr(sys.modules.get("matplotlib.figure"), "Figure", ())
            return chart(shown) if isinstance(shown, figures) else super().__call__(shown)

    bound(sys.stdout)
    bound(sys.stderr)
    display = shell.display_formatter
    display.formatters["e2b/data"] = data = DataFormatter(parent=display)
    display.formatters["e2b/chart"] = ChartFormatter(parent=display)
    # By name, so that nothing is imported for those who do not use it.
    data.for_type_by_name("pandas", "DataFrame", table)
    data.for_type_by_name("pandas.core.frame", "DataFrame", table)
    shell.enter_env, shell.leave_env = enter_env, leave_env

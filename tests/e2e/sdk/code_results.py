"""What code gives back: text, streams, errors, rich results, tables and charts."""

import base64

from e2b_code_interpreter import Sandbox
from e2b_code_interpreter.charts import ChartType, ScaleType

box = Sandbox.create(envs={"GIVEN": "at creation"}, timeout=3000)


def run(code, **options):
    execution = box.run_code(code, **options)
    assert execution.error is None, execution.error.traceback
    return execution


def only(code):
    (result,) = run(code).results
    return result


# What one call makes is there for the next.
first = run("x = 41")
assert first.text is None and first.results == [] and first.execution_count == 1, first
second = run("x += 1; x")
assert second.text == "42" and second.execution_count == 2 and second.results[0].is_main_result, second
assert run("'a string'").text == "a string"
assert run("import asyncio; await asyncio.sleep(0, 'awaited')").text == "awaited"

# Streams are told as they come, and collected.
heard = []
printed = run(
    "import sys, subprocess\nprint('out')\nprint('err', file=sys.stderr)\nsubprocess.run(['echo', 'from a child'])\n'last'",
    on_stdout=lambda message: heard.append(("out", message.line, message.error)),
    on_stderr=lambda message: heard.append(("err", message.line, message.error)),
    on_result=lambda result: heard.append(("result", result.text, None)),
)
assert "".join(printed.logs.stdout).splitlines() == ["out", "from a child"], printed.logs
assert "".join(printed.logs.stderr) == "err\n", printed.logs
assert ("err", "err\n", True) in heard and any(kind == "out" and "out\n" in text for kind, text, _ in heard), heard
unicode = run("print('ä€😀' * 20000)")
assert "".join(unicode.logs.stdout) == "ä€😀" * 20000 + "\n"

# Errors carry name, value and traceback, and end nothing.
errors = []
failed = box.run_code("def fails():\n    raise ValueError('no luck')\nfails()", on_error=errors.append)
assert (failed.error.name, failed.error.value) == ("ValueError", "no luck") and errors == [failed.error], failed
assert "fails()" in failed.error.traceback and "no luck" in failed.error.traceback
syntax = box.run_code("def ():")
assert syntax.error.name == "SyntaxError", syntax
assert run("x").text == "42"
ended = box.run_code("import os; os._exit(7)")
assert ended.error.name == "KernelEnded" and "status 7" in ended.error.value, ended
assert box.run_code("x").error.name == "NameError"
assert run("import os; os.getcwd()").text == "/home/user"

# Variables: of the sandbox, and of one call.
assert run("os.environ['GIVEN']").text == "at creation"
assert run("os.environ['GIVEN'] + os.environ['MORE']", envs={"GIVEN": "now", "MORE": " and more"}).text == "now and more"
assert run("os.environ['GIVEN'], os.environ.get('MORE')").text == "('at creation', None)"

# Representations of every kind.
shown = {
    "html": ("HTML('<b>bold</b>')", "<b>bold</b>"),
    "markdown": ("Markdown('# title')", "# title"),
    "latex": ("Latex('$x$')", "$x$"),
    "javascript": ("Javascript('alert(1)')", "alert(1)"),
    "json": ("JSON({'a': [1, 2]})", {"a": [1, 2]}),
}
run("from IPython.display import *")
for kind, (code, value) in shown.items():
    result = only(code)
    assert result[kind] == value and kind in result.formats(), (kind, result.formats(), result[kind])
assert "<circle" in only("SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"><circle r=\"1\"/></svg>')").svg
pixel = "from PIL import Image as Picture\nPicture.new('RGB', (2, 2), 'red')"
assert base64.b64decode(only(pixel).png).startswith(b"\x89PNG")
assert base64.b64decode(only("import io; data = io.BytesIO(); Picture.new('RGB', (2, 2)).save(data, 'jpeg'); Image(data.getvalue(), format='jpeg')").jpeg).startswith(b"\xff\xd8")
assert only("class Pdf:\n    def _repr_pdf_(self): return b'%PDF-1'\nPdf()").pdf is not None
several = run("display('one'); display(HTML('<i>two</i>')); 'main'")
assert [(result.text, result.is_main_result) for result in several.results] == [
    ("one", False), ("<IPython.core.display.HTML object>", False), ("main", True)], several
own = only("class Own:\n    def _repr_mimebundle_(self, **_): return {'text/plain': 'own', 'application/x-own': {'k': 1}}\nOwn()")
assert own.text == "own" and own.extra == {"application/x-own": {"k": 1}}, own.extra

# Tables as data.
table = only("import pandas as pd\npd.DataFrame({'n': [1, 2], 'f': [0.5, float('nan')], 's': ['a', 'b'], 't': pd.to_datetime(['2024-05-06', '2024-05-07'])})")
assert "<table" in table.html
assert table.data == {"n": [1, 2], "f": [0.5, None], "s": ["a", "b"], "t": ["2024-05-06T00:00:00", "2024-05-07T00:00:00"]}, table.data

# Charts as pictures, and as data.
run("import matplotlib.pyplot as plt")


def chart(code, kind):
    result = only(code + "\nplt.show()")
    assert base64.b64decode(result.png).startswith(b"\x89PNG")
    assert result.chart.type == kind, result.chart.to_dict()
    return result.chart


line = chart("""
plt.plot([1, 2, 3], [4.5, 5, 6], label='grows'); plt.plot([1, 3], [7, 8])
plt.title('T'); plt.xlabel('Time (s)'); plt.ylabel('Way [m]'); plt.grid()""", ChartType.LINE)
assert (line.title, line.x_label, line.x_unit, line.y_unit) == ("T", "Time (s)", "s", "m")
assert (line.x_scale, line.elements[0].label, line.elements[0].points) == (ScaleType.LINEAR, "grows", [(1, 4.5), (2, 5), (3, 6)])
assert len(line.elements) == 2 and line.elements[1].label == "Line 1" and len(line.x_ticks) == len(line.x_tick_labels)
dated = chart("import datetime\nplt.plot([datetime.date(2024, 1, 1), datetime.date(2024, 3, 1)], [1, 2]); plt.yscale('log')", ChartType.LINE)
assert (dated.x_scale, dated.y_scale) == (ScaleType.DATETIME, ScaleType.LOG) and dated.elements[0].points[0] == ("2024-01-01", 1)
scatter = chart("plt.scatter([1, 2], [3, 4], label='a'); plt.scatter([5], [6], label='b')", ChartType.SCATTER)
assert [(one.label, one.points) for one in scatter.elements] == [("a", [(1, 3), (2, 4)]), ("b", [(5, 6)])]
bars = chart("plt.bar(['A', 'B'], [10, 10], label='first'); plt.bar(['A', 'B'], [1, 2], bottom=10, label='second')", ChartType.BAR)
assert [(one.label, one.group, one.value) for one in bars.elements] == [("A", "first", 10), ("B", "first", 10), ("A", "second", 1), ("B", "second", 2)]
lying = chart("plt.barh(['A', 'B'], [3, 4]); plt.xlabel('amount'); plt.ylabel('name')", ChartType.BAR)
assert [(one.label, one.value) for one in lying.elements] == [("A", 3), ("B", 4)] and (lying.x_label, lying.y_label) == ("name", "amount")
pie = chart("plt.pie([1, 3], labels=['one', 'three'])", ChartType.PIE)
assert [(one.label, round(one.angle, 3), one.radius) for one in pie.elements] == [("one", 90, 1), ("three", 270, 1)]
for filled in ("False", "True"):
    boxes = chart(f"plt.boxplot([[1, 2, 3, 4, 5, 30], [2, 3, 4]], tick_labels=['p', 'q'], patch_artist={filled})", ChartType.BOX_AND_WHISKER)
    p, q = boxes.elements
    assert (p.label, p.min, p.median, p.max, p.outliers) == ("p", 1, 3.5, 5, [30]), vars(p)
    assert (q.first_quartile, q.median, q.third_quartile) == (2.5, 3, 3.5), vars(q)
several = chart("figure, (a, b) = plt.subplots(2); a.plot([1, 2]); b.bar(['x'], [1]); figure.suptitle('both')", ChartType.SUPERCHART)
assert several.title == "both" and [one.type for one in several.elements] == [ChartType.LINE, ChartType.BAR]
assert chart("plt.imshow([[1, 2], [3, 4]])", ChartType.UNKNOWN).elements == []
assert only("%config InlineBackend.figure_formats = ['svg']\nplt.plot([1, 2]); plt.show()").svg.startswith("<?xml")

# What is installed is there at once.
run("%pip --version")
assert box.kill()

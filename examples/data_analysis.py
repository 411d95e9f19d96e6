"""A data analysis that goes on after a pause where it was: the table that was loaded once is still in memory.

Needs the template of the code interpreter: dorm template build code-interpreter-v1
"""

import csv
import io
import random

from e2b_code_interpreter import Sandbox

ROWS = 20_000


def sales():
    """A table to look into, the same every time."""
    chance, text = random.Random(7), io.StringIO()
    table = csv.writer(text)
    table.writerow(["region", "month", "amount"])
    for _ in range(ROWS):
        table.writerow([chance.choice(["north", "south", "west"]), chance.randint(1, 12), round(chance.uniform(1, 100), 2)])
    return text.getvalue()


def run(box, code):
    """The result of code that must not fail."""
    execution = box.run_code(code)
    if execution.error:
        raise SystemExit(execution.error.traceback)
    return execution


def main():
    box = Sandbox.create(timeout=600)
    print(f"{box.sandbox_id} is made")
    try:
        box.files.write("/home/user/sales.csv", sales())
        loaded = run(box, "import os, pandas as pd\nsales = pd.read_csv('sales.csv')\nos.remove('sales.csv')\nlen(sales)")
        print(f"{loaded.text} rows are loaded, and the file is gone: they are nowhere but in memory")
        assert loaded.text == str(ROWS)

        for evening in range(1, 4):
            box.pause()
            print(f"evening {evening}: the sandbox is paused")
            box = Sandbox.connect(box.sandbox_id)
            by_region = run(box, "sales.groupby('region', as_index=False).amount.sum().round(2)").results[0].data
            print(f"morning {evening}: {dict(zip(by_region['region'], by_region['amount']))}")
            assert set(by_region["region"]) == {"north", "south", "west"}

        drawn = run(box, "import matplotlib.pyplot as plt\nsales.groupby('month').amount.sum().plot.bar(title='Sales'); plt.show()").results[0]
        print(f"a chart, {drawn.chart.title}, with {len(drawn.chart.elements)} bars, and a picture of {len(drawn.png)} characters of base64")
        assert len(drawn.chart.elements) == 12 and drawn.png
    finally:
        box.kill()


main()

"""The data behind a figure of matplotlib, in the form in which E2B's SDKs give charts to their users."""

import math
import re

from matplotlib import dates
from matplotlib.collections import PathCollection
from matplotlib.container import BarContainer
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch, Rectangle, Wedge
from matplotlib.text import Text

UNIT = re.compile(r"\s\((.*?)\)|\[(.*?)\]")


def of_figure(figure):
    """`None` if nothing is drawn."""
    axes = [ax for ax in figure.get_axes() if ax.has_data()]
    if not axes:
        return None
    charts = [of_axes(ax) for ax in axes]
    if len(charts) == 1:
        return charts[0]
    return {"type": "superchart", "title": figure.get_suptitle() or None, "elements": charts}


def of_axes(ax):
    artists = [artist for artist in ax.get_children() if artist in ax._children and not isinstance(artist, Text)]

    def all_are(*kinds):
        return bool(artists) and all(isinstance(artist, kinds) for artist in artists)

    if all_are(Line2D) and not is_boxes_of_lines(ax):
        return points(ax, "line", lines(ax))
    if all_are(PathPatch, Line2D):
        return boxes(ax)
    artists = [artist for artist in artists if not is_rule(artist)]
    if all_are(PathCollection):
        return points(ax, "scatter", clouds(ax))
    if all_are(Wedge):
        return pie(ax)
    if all_are(Rectangle):
        return bars(ax)
    return {"type": "unknown", "title": title(ax), "elements": []}


def title(ax):
    return ax.get_title() or None


def plane(ax, kind, elements, swapped=False):
    """What has two axes. Of bars and boxes that lie, the axes change places."""
    labels = [ax.get_xlabel() or None, ax.get_ylabel() or None]
    if swapped:
        labels.reverse()
    units = [unit(label) for label in labels]
    return {"type": kind, "title": title(ax), "x_label": labels[0], "y_label": labels[1], "x_unit": units[0], "y_unit": units[1],
            "elements": elements}


def unit(label):
    found = UNIT.search(label or "")
    return (found.group(1) or found.group(2)) if found else None


def points(ax, kind, elements):
    chart = plane(ax, kind, elements)
    for name, axis in (("x", ax.xaxis), ("y", ax.yaxis)):
        ticks, labels = list(axis.get_ticklocs()), [label.get_text() for label in axis.get_ticklabels()]
        is_dates = isinstance(axis.get_major_locator(), dates.DateLocator)
        if is_dates:
            ticks = [dates.num2date(tick).isoformat() for tick in ticks]
        chart[f"{name}_ticks"] = [plain(tick) for tick in ticks]
        chart[f"{name}_tick_labels"] = labels
        chart[f"{name}_scale"] = "datetime" if is_dates else scale(axis.get_scale(), ticks, labels)
    return chart


def scale(given, ticks, labels):
    """Names on an axis are ticks 0, 1, 2… that are labelled otherwise."""
    if given != "linear" or not ticks:
        return given
    named = all(tick == number and label != str(number) for number, (tick, label) in enumerate(zip(ticks, labels)))
    return "categorical" if named else "linear"


def plain(value):
    """As JSON can hold it."""
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if type(value).__name__ == "datetime64":
        return str(value.astype("datetime64[s]"))
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, (int, float)):
        return value if math.isfinite(value) else None
    return str(value)


def lines(ax):
    drawn = [line for line in ax.get_lines() if not is_rule(line) or len(ax.get_lines()) == 1]
    return [
        {"label": label(line, "_child", "Line"), "points": [[plain(x), plain(y)] for x, y in zip(line.get_xdata(), line.get_ydata())]}
        for line in drawn
    ]


def clouds(ax):
    drawn = [collection for collection in ax.collections if isinstance(collection, PathCollection)]
    return [
        {"label": label(cloud, "_child", "Group"), "points": [[plain(x), plain(y)] for x, y in cloud.get_offsets()]} for cloud in drawn
    ]


def label(artist, prefix, name):
    """Its own, or one by its number where matplotlib gave it a hidden one."""
    text = str(artist.get_label())
    return f"{name} {text[len(prefix):]}" if text.startswith(prefix) else text


def pie(ax):
    elements = [
        {"label": wedge.get_label(), "angle": rounded(abs(wedge.theta2 - wedge.theta1)), "radius": float(wedge.r)}
        for wedge in ax.patches
    ]
    return {"type": "pie", "title": title(ax), "elements": elements}


def bars(ax):
    elements, lie = [], False
    for container in ax.containers:
        if not isinstance(container, BarContainer):
            continue
        lie = getattr(container, "orientation", None) == "horizontal"
        group = label(container, "_container", "Group")
        names = tick_names(ax.yaxis if lie else ax.xaxis)
        for bar in container:
            at = bar.get_y() + bar.get_height() / 2 if lie else bar.get_x() + bar.get_width() / 2
            value = bar.get_width() if lie else bar.get_height()
            elements.append({"label": nearest(names, at), "group": group, "value": plain(value)})
    return plane(ax, "bar", elements, swapped=lie)


def tick_names(axis):
    return [(float(at), text.get_text()) for at, text in zip(axis.get_ticklocs(), axis.get_ticklabels())]


def nearest(names, at):
    """A bar has the name of the tick that it stands on; without one it has its place."""
    if names:
        tick, name = min(names, key=lambda pair: abs(pair[0] - at))
        if abs(tick - at) <= 0.5 and name:
            return name
    return f"{rounded(at):g}"


def is_rule(artist):
    """A line from edge to edge: part of the grid, or a mark, but no data."""
    if not isinstance(artist, Line2D):
        return False
    x, y = list(artist.get_xdata()), list(artist.get_ydata())
    return len(x) == 2 and len(y) == 2 and (x[0] == x[1] or y[0] == y[1])


def is_boxes_of_lines(ax):
    """boxplot() draws its boxes as lines unless it is told to fill them: five corners that end where they began."""
    closed = [line for line in ax.get_lines() if len(line.get_xdata()) == 5 and line.get_xdata()[0] == line.get_xdata()[-1]]
    return bool(closed) and len(ax.get_lines()) >= 5 * len(closed)


def boxes(ax):
    outlines = [patch.get_path().vertices for patch in ax.patches if isinstance(patch, PathPatch)]
    if not outlines:
        outlines = [list(zip(line.get_xdata(), line.get_ydata())) for line in ax.get_lines() if len(line.get_xdata()) == 5]
    corners = [([rounded(x) for x, _ in outline], [rounded(y) for _, y in outline]) for outline in outlines]
    # All boxes are equally wide; if they are equally high instead, they lie.
    widths = {rounded(max(xs) - min(xs)) for xs, _ in corners}
    heights = {rounded(max(ys) - min(ys)) for _, ys in corners}
    lie = len(heights) == 1 and len(widths) > 1
    names = tick_names(ax.yaxis if lie else ax.xaxis)
    elements = []
    for xs, ys in corners:
        across, along = (ys, xs) if lie else (xs, ys)
        elements.append(box(ax, lie, names, (min(across), max(across)), (min(along), max(along))))
    return plane(ax, "box_and_whisker", elements, swapped=lie)


def box(ax, lie, names, across, along):
    low, high = along
    found = {"label": nearest(names, sum(across) / 2), "min": low, "first_quartile": low, "median": None, "third_quartile": high,
             "max": high, "outliers": []}
    for line in ax.get_lines():
        xs, ys = [rounded(x) for x in line.get_xdata()], [rounded(y) for y in line.get_ydata()]
        beside, values = (ys, xs) if lie else (xs, ys)
        if not beside or not all(across[0] <= at <= across[1] for at in beside):
            continue
        is_marks = line.get_linestyle() in ("None", "", " ") or len(values) == 1
        if is_marks:
            found["outliers"].extend(values)
        elif len(values) == 2 and values[0] == values[1] and low <= values[0] <= high and beside == [across[0], across[1]]:
            found["median"] = values[0]
        elif len(values) == 2 and max(values) == low:
            found["min"] = min(values)
        elif len(values) == 2 and min(values) == high:
            found["max"] = max(values)
    return found


def rounded(value):
    return round(float(value), 10)

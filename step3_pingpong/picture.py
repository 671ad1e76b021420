"""The curve as a picture: time and bandwidth by message size, both axes logarithmic."""

from pathlib import Path

from step0_monolith.files import write_whole
from step3_pingpong.curve import GROWTH, Fit, Point


def size_name(num_bytes: int) -> str:
    """4 B, 16 KiB, 64 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024 or unit == "MiB":
            return f"{num_bytes} {unit}"
        num_bytes //= 1024
    raise AssertionError


def draw(points: list[Point], fitted: Fit | None, path: Path, title: str) -> None:
    """Writes the picture, whole or not at all; needs no display. Raises RunError when the disk refuses."""
    # Imported late: it takes a second, and only rank 0 draws.
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    figure.suptitle(title, fontsize=11)
    time_axes, speed_axes = figure.subplots(1, 2)
    x = [point.num_bytes for point in points]
    lines = {
        "step 2's channels": ("o-", "C0", [p.ours for p in points]),
        "bare send / recv": ("s--", "C1", [p.bare for p in points]),
    }
    for name, (style, colour, seconds) in lines.items():
        options = {"color": colour, "label": name, "markersize": 4, "linewidth": 1.4}
        time_axes.plot(x, [1e6 * s for s in seconds], style, **options)
        speed_axes.plot(x, [n / s / 1e6 for n, s in zip(x, seconds, strict=True)], style, **options)
    if fitted:
        predicted = [fitted.seconds(n) for n in x]
        options = {
            "color": "0.4",
            "linewidth": 1.2,
            "linestyle": ":",
            "label": "predicted for bare: latency + bytes / bandwidth",
        }
        time_axes.plot(x, [1e6 * s for s in predicted], **options)
        speed_axes.plot(x, [n / s / 1e6 for n, s in zip(x, predicted, strict=True)], **options)
    time_axes.set_ylabel("microseconds, one way")
    speed_axes.set_ylabel("MB/s (1 MB = 1,000,000 bytes)")
    for axes in (time_axes, speed_axes):
        axes.set_xscale("log", base=GROWTH)
        axes.set_yscale("log")
        axes.set_xticks(x, [size_name(n) for n in x], rotation=45, ha="right", fontsize=8)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.set_xlabel("message size")
        axes.grid(alpha=0.3)
    time_axes.set_title("time", fontsize=10)
    speed_axes.set_title("bandwidth", fontsize=10)
    time_axes.legend(loc="upper left", fontsize=8)
    write_whole(path, lambda temporary: figure.savefig(temporary, dpi=90))

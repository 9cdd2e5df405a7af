"""How a run shows itself: its log, the terminal, the live page, and the baselines."""

from littlelm_core.report.baseline import baselines, comparison
from littlelm_core.report.callbacks import Callback, TensorBoard
from littlelm_core.report.log import MetricsLog, mfu, read_metrics, write_text
from littlelm_core.report.page import Page, write_report
from littlelm_core.report.run import Report
from littlelm_core.report.terminal import Progress, duration

__all__ = [
    "Callback",
    "MetricsLog",
    "Page",
    "Progress",
    "Report",
    "TensorBoard",
    "baselines",
    "comparison",
    "duration",
    "mfu",
    "read_metrics",
    "write_report",
    "write_text",
]

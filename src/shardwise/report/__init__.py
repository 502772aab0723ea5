"""Reports: one self-contained HTML page about a plan, a simulated step or a training run."""

from shardwise.report.page import contents, render, title_of, write_page
from shardwise.report.run_report import RunConfig, write_report

__all__ = ["RunConfig", "contents", "render", "title_of", "write_page", "write_report"]

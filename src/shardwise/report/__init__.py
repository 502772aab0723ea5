"""Reports: one self-contained HTML page about a plan, a simulated step or a training run."""

from shardwise.report.page import render, write_page
from shardwise.report.page_data import contents, title_of
from shardwise.report.run_report import RunConfig, write_report

__all__ = ["RunConfig", "contents", "render", "title_of", "write_page", "write_report"]

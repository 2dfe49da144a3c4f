"""A run folder as one self-contained HTML page and as the plain-text table printed at the end of a run.

Both read only the folder's files, so a report can be rebuilt anywhere, long after the run and without the data.
"""

from medfl.report.page import write_report
from medfl.report.run_files import RunFiles
from medfl.report.table import result_table

__all__ = ["RunFiles", "result_table", "write_report"]

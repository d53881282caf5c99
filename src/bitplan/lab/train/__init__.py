"""Training: tasks under plans, in run folders that can be resumed bit for bit."""

from bitplan.lab.train.config import RunConfig
from bitplan.lab.train.folder import RunFolder, find_runs, fresh_folder
from bitplan.lab.train.loop import resume_command, train
from bitplan.lab.train.summary import Progress, Summary

__all__ = ["Progress", "RunConfig", "RunFolder", "Summary", "find_runs", "fresh_folder", "resume_command", "train"]

"""Runs of an engine as JSONL files: arrivals, plans and step times, in the order in which the engine saw them.

No prompt text and no token id is in a file unless that was asked for: pages of tokens are numbered in the order of
their first appearance, so equal prefixes have equal numbers and nothing else is told.
"""

from jcb.recording.events import Abort, Arrival, End, Event, Header, Knobs, Row, Step, Truncated
from jcb.recording.reader import Recording
from jcb.recording.recorder import Recorder, RecordingFile

__all__ = [
    "Abort",
    "Arrival",
    "End",
    "Event",
    "Header",
    "Knobs",
    "Recorder",
    "Recording",
    "RecordingFile",
    "Row",
    "Step",
    "Truncated",
]

"""Follow: run a mod as Python would, and record every location that it reads as a guard that reads them again.

`Follower(record).mod(*inputs)` runs it; `guard_of(record, conditions)` returns the guard. What a guard cannot check
(the mod's own changes, unknown C functions, randomness, clocks) is noted in `record.reason`.
"""

from flexattn.trace.follow import instructions as instructions
from flexattn.trace.follow import known_calls as known_calls
from flexattn.trace.follow.attributes import Refusal as Refusal
from flexattn.trace.follow.attributes import Unfollowable as Unfollowable
from flexattn.trace.follow.bytecode import IS_KNOWN_VERSION as IS_KNOWN_VERSION
from flexattn.trace.follow.frames import Follower as Follower
from flexattn.trace.follow.frames import current_line as current_line
from flexattn.trace.follow.lifted import LIFTED as LIFTED
from flexattn.trace.follow.lifted import literal as literal
from flexattn.trace.follow.lifted import symbolic as symbolic
from flexattn.trace.follow.record import Guard as Guard
from flexattn.trace.follow.record import ReadLog as ReadLog
from flexattn.trace.follow.record import guard_of as guard_of

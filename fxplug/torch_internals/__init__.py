"""The private parts of torch that we stand on, one file a subject: no other file of ours names any.

Each says what we need of torch. We promise none of them to anybody: a name here changes, or goes, with torch's own. What a new
torch breaks, tests/test_torch_internals.py tells by name, with what of ours hangs on it.
"""

from ..versions import warn_if_untested

warn_if_untested("torch")

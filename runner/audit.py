"""`runner.audit`: what somebody else's training loop really did. It changes nothing in the loop.

from runner.audit import Audit

audit = Audit(model, optimizer, loader)   # as they are trained: after accelerator.prepare or DDP(model)
...                                       # the loop, unchanged
audit.finish()                            # on every process
"""

from runner.tools.audit.audit import Audit
from runner.tools.audit.records import Finding

__all__ = ["Audit", "Finding"]

"""Python imports this as it starts where this folder is on PYTHONPATH, as it is for scripts without a head.

Fallow's workers do without torch's compiler until something is compiled; here they do, too, which takes half the time.
"""

from fallow.worker.api.lazy_imports import put_off_compiler

put_off_compiler()

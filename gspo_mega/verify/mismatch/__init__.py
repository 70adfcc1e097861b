"""`gspo-mega mismatch`: where the mismatch of trainer and server comes from, and whether the clip range can bear it.

Functions of numbers alone: `causes.py` is the list of causes, `walks.py` changes them
one after the other, `attribution.py` makes rows of the differences, `faults.py` finds
what is no rounding, `findings.py` is all of that for one budget, `findings.py`
says it in words, `run.py` shows it. `run.py` starts servers and ranks for
it, and `ranks.py` runs on them, with `scores.py`,
`scores.py` and `scores.py`.
"""
